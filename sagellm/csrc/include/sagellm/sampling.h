// Tokens drawn from logits: penalties, forbidden tokens, top-k, top-p, min-p, a draw by seed, log probabilities.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sage {

namespace cpu {
struct Kernels;
}

// Wishes of some rows. An empty vector is a wish that no row has; else there is an entry for each row, or `width` of
// them.
struct Sampling {
  struct Words {  // tokens of each row, [rows][width]; those without a mark are left out
    std::vector<std::int64_t> tokens;
    std::vector<std::uint8_t> marks;
    int width = 0;
  };

  int rows = 0, vocabulary = 0;
  std::vector<float> temperature, repetition_penalty, top_p, min_p;
  std::vector<std::int64_t> top_k;           // 0: all
  std::vector<std::int64_t> seeds, offsets;  // empty: the likeliest token
  Words seen;                                // that the repetition penalty is for; without marks
  Words forbidden;
  int num_logprobs = -1;  // likeliest tokens whose log probability is given, beside that of the token; -1: none at all
};

struct Sampled {
  std::int64_t token = 0;
  std::vector<float> logprobs;  // before any wish: of the token, then of the likeliest ones
  std::vector<std::int64_t> ids;
};

// Throws std::invalid_argument for entries that are not as many as the rows want, or tokens outside of the vocabulary.
void check(const Sampling& wishes);

// The token of a row depends on its own logits and wishes alone. `scratch`: as many floats as the vocabulary.
Sampled sample_row(const cpu::Kernels& kernels, const float* logits, const Sampling& wishes, int row, float* scratch);

}  // namespace sage
