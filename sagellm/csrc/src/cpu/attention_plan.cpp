#include "attention_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "product.h"

namespace sage::cpu {

namespace {

constexpr int kFewRows = 15;    // query rows of a sequence that decodes, computed together
constexpr int kQueryRows = 96;  // of a chunk of a prompt

std::vector<Sequence> read_sequences(const PagedCache& cache, const DecoderStep& step) {
  const auto fail = [](const std::string& words) { throw std::invalid_argument(words); };
  std::vector<Sequence> found;
  int row = 0;
  for (int s = 0; s < step.num_sequences; ++s) {
    const std::int64_t tokens = step.query_lengths[s], length = step.lengths[s];
    if (tokens < 1 || tokens > step.num_tokens - row) fail("query lengths do not add up to the step's tokens");
    if (length != 0 && length < tokens) fail("a sequence is shorter than its new tokens");
    Sequence one{row, static_cast<int>(tokens), static_cast<int>(length), length > 0, {}, static_cast<int>(length)};
    const std::int64_t blocks = (length + cache.block_size - 1) / cache.block_size;
    if (step.sparse != nullptr) {
      const int keep = step.sparse->keep[size(s)];
      if (tokens != 1 || keep < 1) fail("a sequence that reads some of its blocks has one new token, and reads a block");
      if (keep < blocks) one.seen = (keep - 1) * cache.block_size + (one.length - 1) % cache.block_size + 1;
    }
    if (blocks > step.table_width) fail("a sequence has more tokens than its blocks hold");
    const std::int64_t* table = step.tables + size(s) * size(step.table_width);
    one.table.assign(table, table + blocks);
    for (const std::int64_t block : one.table) {
      if (block < 0 || block >= cache.num_blocks) fail("a block is outside of the cache");
    }
    row += one.tokens;
    found.push_back(std::move(one));
  }
  if (row != step.num_tokens) fail("query lengths do not add up to the step's tokens");
  return found;
}

}  // namespace

AttentionPlan plan_attention(const PagedCache& cache, const DecoderStep& step, const DecoderShape& shape, int threads) {
  AttentionPlan plan;
  if (step.sparse != nullptr && (!step.is_decoding || step.sparse->keep.size() != size(step.num_sequences))) {
    throw std::invalid_argument("a step that reads some blocks decodes, and says for each sequence how many it reads");
  }
  plan.sequences = read_sequences(cache, step);
  const int share = shape.heads / shape.kv_heads;
  // The heads of a token lie side by side: a task that reads them all reads memory in one run. Where there are few tasks
  // each takes one head, so that all threads have some.
  int splits = 0;
  for (const Sequence& one : plan.sequences) splits += divided(one.seen, kSplit);
  const bool by_head = step.sparse != nullptr && step.sparse->by_head;
  const int heads = step.is_decoding && splits >= threads && !by_head ? shape.kv_heads : 1;
  for (int s = 0; s < static_cast<int>(plan.sequences.size()); ++s) {
    Sequence& one = plan.sequences[size(s)];
    plan.owners.insert(plan.owners.end(), size(one.tokens), s);
    if (!one.has_cache) continue;
    // By what the step does and not by how many tokens there are: a token that is decoded gets the same numbers alone
    // and as a guess beside others, one of a prompt the same whatever part of it was cached.
    const int most = std::max(1, (step.is_decoding ? kFewRows : kQueryRows) / share);
    one.num_splits = step.is_decoding ? divided(one.seen, kSplit) : 0;
    for (int head = 0; head < shape.kv_heads; head += heads) {
      for (int first = 0; first < one.tokens; first += most) {
        const int tokens = std::min(most, one.tokens - first);
        if (!step.is_decoding) {
          plan.tasks.push_back({s, head, heads, first, tokens, 0, one.length - one.tokens + first + tokens, -1});
          continue;
        }
        if (one.num_splits > 1) plan.merged.push_back(static_cast<int>(plan.tasks.size()));
        for (int split = 0; split < one.num_splits; ++split) {
          const int begin = split * kSplit, end = std::min(one.seen, begin + kSplit);
          const std::int64_t partial = one.num_splits > 1 ? plan.num_partials : -1;
          plan.tasks.push_back({s, head, heads, first, tokens, begin, end, partial});
          if (partial >= 0) plan.num_partials += heads * tokens * share * (shape.head_size + 2);
        }
      }
    }
  }
  return plan;
}

}  // namespace sage::cpu
