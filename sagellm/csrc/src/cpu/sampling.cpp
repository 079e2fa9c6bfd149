#include "sagellm/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "product.h"

namespace sage {

using cpu::Kernels;
using cpu::Size;
using cpu::size;

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Candidate {
  float score;
  int token;
};

// The likelier one first, of equal ones that with the lower number.
bool is_before(const Candidate& one, const Candidate& other) {
  return one.score > other.score || (one.score == other.score && one.token < other.token);
}

// The `count` likeliest tokens, in order.
std::vector<Candidate> likeliest(const float* scores, int vocabulary, int count) {
  std::vector<Candidate> found;
  count = std::min(count, vocabulary);
  if (count <= 0) return found;
  const Size limit = size(count), full = 2 * limit + 64;
  found.reserve(full);
  float least = kNever;  // nothing below is among them
  for (int token = 0; token < vocabulary; ++token) {
    if (!(scores[token] > least) && found.size() >= limit) continue;
    found.push_back({std::isnan(scores[token]) ? kNever : scores[token], token});  // NaN has no place in an order
    if (found.size() == full) {
      std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), is_before);
      found.resize(limit);
      least = found.back().score;
    }
  }
  std::sort(found.begin(), found.end(), is_before);
  if (found.size() > limit) found.resize(limit);
  return found;
}

int first_of(const float* scores, int vocabulary, float value) {
  return static_cast<int>(std::find(scores, scores + vocabulary, value) - scores) % vocabulary;
}

// A number in [0, 1) from two integers: splitmix64 (Steele, Lea and Flood, 2014).
float uniform(std::int64_t seed, std::int64_t offset) {
  std::uint64_t z = static_cast<std::uint64_t>(seed) * 0x9E3779B97F4A7C15U +
                    static_cast<std::uint64_t>(offset) * 0xD1B54A32D192ED03U + 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return static_cast<float>((z ^ (z >> 31)) >> 40) / 16777216.F;
}

// Drops candidates by top-p and min-p, likeliest first, and puts probabilities in place of the scores of the others.
void weigh(std::vector<Candidate>& candidates, float top_p, float min_p) {
  const float top = candidates[0].score;
  const auto as_probabilities = [&] {
    float total = 0;
    for (const Candidate& each : candidates) total += std::exp(each.score - top);
    return total;
  };
  if (top_p < 1.F) {
    const float total = as_probabilities();
    float before = 0;
    Size kept = 0;
    for (; kept < candidates.size() && (kept == 0 || before <= top_p); ++kept) {
      before += std::exp(candidates[kept].score - top) / total;
    }
    candidates.resize(kept);
  }
  if (min_p > 0.F) {
    Size kept = 1;
    while (kept < candidates.size() && std::exp(candidates[kept].score - top) >= min_p) ++kept;
    candidates.resize(kept);
  }
  for (Candidate& each : candidates) each.score = std::exp(each.score - top);
}

// Inverse-transform sampling with one number a row.
int draw(const std::vector<Candidate>& weights, float number) {
  float total = 0;
  for (const Candidate& each : weights) total += each.score;
  float sum = 0;
  int last = weights[0].token;
  for (const Candidate& each : weights) {
    if (each.score > 0.F) last = each.token;
    sum += each.score;
    if (sum > number * total) return each.token;
  }
  return last;  // rounding may push the number past all of them
}

// The same over the whole vocabulary, in the order of its tokens.
int draw_any(const Kernels& kernels, const float* scores, int vocabulary, float top, float number) {
  constexpr int kPart = 256;
  std::vector<float> sums(size(cpu::divided(vocabulary, kPart)));
  float total = 0;
  for (Size part = 0; part < sums.size(); ++part) {
    const Size first = part * kPart;
    sums[part] = kernels.sum_of_powers(scores + first, std::min(kPart, vocabulary - static_cast<int>(first)), top);
    total += sums[part];
  }
  const float wanted = number * total;
  float sum = 0;
  int last = 0;
  for (Size part = 0; part < sums.size(); ++part) {
    if (sum + sums[part] <= wanted && part + 1 < sums.size()) {
      sum += sums[part];
      continue;
    }
    const int first = static_cast<int>(part) * kPart;
    for (int token = first; token < std::min(vocabulary, first + kPart); ++token) {
      const float weight = std::exp(scores[token] - top);
      if (weight > 0.F) last = token;
      sum += weight;
      if (sum > wanted && weight > 0.F) return token;
    }
  }
  return last;
}

float wish(const std::vector<float>& wishes, int row, float otherwise) {
  return wishes.empty() ? otherwise : wishes[size(row)];
}

// Logits with the row's penalties, temperature and forbidden tokens; without any of these the logits themselves.
const float* apply(const float* logits, const Sampling& wishes, int row, float* scores) {
  const float penalty = wish(wishes.repetition_penalty, row, 1.F), temperature = wish(wishes.temperature, row, 1.F);
  if (penalty == 1.F && temperature == 1.F && wishes.forbidden.width == 0) return logits;
  std::copy_n(logits, wishes.vocabulary, scores);
  if (penalty != 1.F) {
    for (int i = 0; i < wishes.seen.width; ++i) {
      const std::int64_t token = wishes.seen.tokens[size(row) * size(wishes.seen.width) + size(i)];
      const float score = logits[token];  // a token that occurs twice is punished once
      scores[token] = score < 0 ? score * penalty : score / penalty;
    }
  }
  if (temperature != 1.F) {
    for (int i = 0; i < wishes.vocabulary; ++i) scores[i] /= temperature;
  }
  for (int i = 0; i < wishes.forbidden.width; ++i) {
    const Size at = size(row) * size(wishes.forbidden.width) + size(i);
    if (wishes.forbidden.marks[at] != 0) scores[wishes.forbidden.tokens[at]] = kNever;
  }
  return scores;
}

int choose(const Kernels& kernels, const float* scores, const Sampling& wishes, int row) {
  const int vocabulary = wishes.vocabulary;
  const float top = kernels.largest(scores, vocabulary);
  if (wishes.seeds.empty()) return first_of(scores, vocabulary, top);
  const float number = uniform(wishes.seeds[size(row)], wishes.offsets[size(row)]);
  const int top_k = wishes.top_k.empty() ? 0 : static_cast<int>(wishes.top_k[size(row)]);
  const float top_p = wish(wishes.top_p, row, 1.F), min_p = wish(wishes.min_p, row, 0.F);
  if (!(top > kNever)) return first_of(scores, vocabulary, top);  // all are forbidden, or not a number
  if (top_k <= 0 && top_p >= 1.F && min_p <= 0.F) return draw_any(kernels, scores, vocabulary, top, number);
  std::vector<Candidate> candidates = likeliest(scores, vocabulary, top_k > 0 ? top_k : vocabulary);
  weigh(candidates, top_p, min_p);
  return draw(candidates, number);
}

void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

}  // namespace

void check(const Sampling& wishes) {
  const auto fits = [&](const auto& entries, int width = 1) {
    return entries.empty() || entries.size() == size(wishes.rows) * size(width);
  };
  require(fits(wishes.temperature) && fits(wishes.repetition_penalty) && fits(wishes.top_p) && fits(wishes.min_p) &&
              fits(wishes.top_k) && fits(wishes.seeds) && fits(wishes.offsets) &&
              wishes.seeds.size() == wishes.offsets.size() && fits(wishes.seen.tokens, wishes.seen.width) &&
              fits(wishes.forbidden.tokens, wishes.forbidden.width) &&
              wishes.forbidden.marks.size() == wishes.forbidden.tokens.size(),
          "wishes for sampling are not as many as the rows");
  for (const auto* words : {&wishes.seen, &wishes.forbidden}) {
    for (const std::int64_t token : words->tokens) {
      require(token >= 0 && token < wishes.vocabulary, "a penalized or forbidden token is outside of the vocabulary");
    }
  }
}

Sampled sample_row(const Kernels& kernels, const float* logits, const Sampling& wishes, int row, float* scratch) {
  Sampled result;
  result.token = choose(kernels, apply(logits, wishes, row, scratch), wishes, row);
  if (wishes.num_logprobs < 0) return result;
  const float top = kernels.largest(logits, wishes.vocabulary);
  const float norm = top + std::log(kernels.sum_of_powers(logits, wishes.vocabulary, top));
  result.ids.push_back(result.token);
  result.logprobs.push_back(logits[result.token] - norm);
  for (const Candidate& each : likeliest(logits, wishes.vocabulary, wishes.num_logprobs)) {
    result.ids.push_back(each.token);
    result.logprobs.push_back(each.score - norm);
  }
  return result;
}

}  // namespace sage
