// How the attention of a step is cut into tasks.
#pragma once

#include <cstdint>
#include <vector>

#include "sagellm/decoder.h"

namespace sage::cpu {

struct Sequence {
  int row, tokens, length;  // first row of its new tokens, their number, and its tokens with these
  bool has_cache;
  std::vector<std::int64_t> table;
  int seen = 0;        // tokens in the blocks that attention reads; all of them, or those of `keep` blocks
  int num_splits = 0;  // of them
};

struct AttentionTask {
  int sequence, head, heads;  // `heads` key heads from `head` on
  int first, tokens;          // new tokens of the sequence
  int begin, end;             // keys
  std::int64_t partial;       // where its results wait to be merged, head by head; -1: they are the whole
};

struct AttentionPlan {
  std::vector<Sequence> sequences;
  std::vector<int> owners;  // sequence of each new token
  std::vector<AttentionTask> tasks;
  std::vector<int> merged;  // first of the tasks whose results are merged; its other splits follow
  std::int64_t num_partials = 0;
};

// Throws std::invalid_argument for lengths or blocks outside of the step and the cache.
AttentionPlan plan_attention(const PagedCache& cache, const DecoderStep& step, const DecoderShape& shape, int threads);

}  // namespace sage::cpu
