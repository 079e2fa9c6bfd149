// How the attention of a step is cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "sagellm/decoder.h"

namespace sage::cpu {

struct Sequence {
  int row, tokens, length;  // first row of its new tokens, their number, and its tokens with these
  bool has_cache;
  std::vector<std::int64_t> table;
  int seen = 0;        // tokens in the blocks that attention reads; all of them, or those of `keep` blocks
  int common = 0;      // of them, the first, which its group reads
  int num_splits = 0;  // results to merge: of the runs of its group and of its own splits
  std::vector<int> depths = {}, paths = {};  // of a tree; see `Attend`
};

struct AttentionTask {
  int sequence, head, heads;  // `heads` key heads from `head` on
  int first, tokens;          // new tokens of the sequence
  int begin, end;             // keys
  // Where its results wait to be merged, head by head; -1: they are the whole. Those of a group come after
  // `partials` of each member, times `heads_together`.
  std::int64_t partial;
  int group = -1;             // of sequences that have these keys in common: the task has the new token of each
  int tile = -1;              // of the new tokens of a step of prompts, counted over its sequences
};

struct AttentionPlan {
  std::vector<Sequence> sequences;
  std::vector<int> owners;  // sequence of each new token
  std::vector<AttentionTask> tasks;
  // Heads of a sequence whose splits are merged. Their partial results follow each other from `partial` on.
  std::vector<AttentionTask> merged;
  struct Group {
    std::vector<int> members;  // sequences that begin with the same blocks
    int run;                   // tokens of these that a task reads
  };
  std::vector<Group> groups;
  int first_tasks = 0, first_merged = 0;  // of `tasks` and `merged`: those of the rows before `half`, which come first
  int heads_together = 1;              // key heads of a task of decoding
  std::vector<std::int64_t> partials;  // [sequences][key heads / heads_together]: `partial` of `merged`
  std::int64_t num_partials = 0;
};

constexpr int kFewRows = 15;     // query rows of a sequence that decodes, computed together
constexpr int kPromptRows = 96;  // query rows of a chunk of a prompt, computed together
// Adjacent tokens of a prompt that are computed together.
inline int prompt_tile(const DecoderShape& shape) { return std::max(1, kPromptRows * shape.kv_heads / shape.heads); }

// Type of plain numbers in the cache, or the type that others are decoded to.
Type type_of_cache(const PagedCache& cache, const Kernels& kernels);

// Seconds that a key head's queries take for a split of keys, measured on a cache: sequences that read common keys together pay
// for all of their rows at once.
class AttentionCosts {
 public:
  AttentionCosts(const Kernels& kernels, const DecoderShape& shape, const PagedCache& cache);

  bool is_of(const PagedCache& cache) const { return cache.format == format_ && cache.dtype == dtype_; }
  // Seconds for the queries of so many sequences, on straight lines between measurements of few and of many.
  double seconds(int members) const;

 private:
  struct Line {
    int first = 1, last = 1;  // members
    double at_first = 0, at_last = 0;
    double at(int members) const;
  };
  const Format format_;
  const Dtype dtype_;
  Line few_, many_;
};

// `costs`: null, or what decides whether sequences read common keys together. `half`: a row that no task crosses, but those of
// groups; 0: none. Throws std::invalid_argument for lengths or blocks outside of the step and the cache.
AttentionPlan plan_attention(const PagedCache& cache, const DecoderStep& step, const DecoderShape& shape,
                             const AttentionCosts* costs, int threads, int half = 0);

}  // namespace sage::cpu
