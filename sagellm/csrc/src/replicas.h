// One set of replicas: the ranks of a tensor-parallel group, between two resets of their block managers.
//
// The ranks make the same calls in the same order. Each call has a number; the first rank to reach it has it decided, and the
// decision is kept until the last rank has read it. So the ranks need not keep step, and what decides need not be a function.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <vector>

#include "block_cache.h"
#include "sage_hooks.h"

namespace sage {

enum class Call : std::uint8_t { kEvict, kEvicted, kReleased, kLookup, kStore };

// `count` is what the hook returns; blocks for a lookup, victims for an eviction.
struct Answer {
  std::int32_t count = 0;
  std::vector<std::int32_t> ids;
  std::vector<std::uint64_t> unique_ids;
};

struct ReplicaCounts {
  std::uint64_t decisions = 0, replays = 0, divergences = 0;
  std::uint64_t lookups = 0, hits = 0, query_tokens = 0, hit_tokens = 0;
};

class Replicas {
 public:
  explicit Replicas(std::int32_t num_ranks);

  // The answer to this rank's next call: that of `decide(Answer&)` for the first rank, the same for the others, and an empty
  // one for a rank that asks for something else. Valid until the next call. Under `mutex`. If `decide` throws, the
  // caller gets the error, and the call has no answer on any rank.
  template <typename Decide>
  const Answer& answer(std::int32_t rank, Call call, std::uint64_t digest, Decide&& decide) {
    if (num_ranks_ == 1) {
      ++counts.decisions;
      clear(scratch_);
      decide(scratch_);
      return scratch_;
    }
    if (const Answer* found = replay(rank, call, digest)) return *found;
    log_.push_back({call, digest, num_ranks_ - 1, {}});
    ++next_[static_cast<std::size_t>(rank)];
    ++counts.decisions;
    decide(log_.back().answer);
    return log_.back().answer;
  }

  // A sequence that waits is looked up in every round; it counts as one lookup.
  void count_lookup(const SageSequence& sequence, std::int32_t num_matched);
  // True once every rank has said so.
  bool reset();
  std::int32_t num_ranks() const noexcept { return num_ranks_; }

  std::mutex mutex;
  std::optional<BlockCache> cache;     // none where the engine keeps its own
  std::optional<std::uint64_t> ended;  // the sequence that was stored at its end; its blocks are released next
  ReplicaCounts counts;

 private:
  struct Entry {
    Call call;
    std::uint64_t digest;
    std::int32_t num_pending;  // ranks that have not read it
    Answer answer;
  };
  static void clear(Answer& answer);
  const Answer* replay(std::int32_t rank, Call call, std::uint64_t digest);

  const std::int32_t num_ranks_;
  std::int32_t num_reset_ = 0;
  std::deque<Entry> log_;
  std::uint64_t first_ = 0;             // number of the log's first call
  std::vector<std::uint64_t> next_;     // by rank: number of its next call
  Answer scratch_;
  std::unordered_set<std::uint64_t> seen_;  // sequences that were looked up and not found
};

}  // namespace sage
