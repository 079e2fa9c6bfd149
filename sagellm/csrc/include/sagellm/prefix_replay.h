// Replays requests against one tier, block by block as an engine with a prefix cache would.
//
// A request has keys, the first block's first. It is looked up (the leading keys that are there), those blocks are locked and
// told as hits, room is made for the others, they are inserted, and all are locked until the request ends. Blocks are told
// deepest first. A block that is locked, or that a cached block continues, stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "sagellm/policy.h"

namespace sage {

// Requests preempt each other without an end: the capacity is too small for them. Python's sagellm.core.errors.CapacityError.
class CapacityError : public PolicyError {
 public:
  using PolicyError::PolicyError;
};

struct PrefixTrace {
  const std::uint64_t* keys = nullptr;     // [num_keys]; a key names a prefix, so it has the same one before it everywhere
  std::size_t num_keys = 0;
  const std::int64_t* offsets = nullptr;   // [num_requests + 1], where each request's keys begin
  std::size_t num_requests = 0;
  const std::int32_t* output_blocks = nullptr;  // [num_requests], or null: none
};

struct PrefixReplayOptions {
  std::int64_t running = 1;  // requests at once; the one admitted first ends before the next
  double block_bytes = 1.0;  // of keys and values, told to the policy
  std::int64_t soon = -1;    // block accesses within which a block that comes back was evicted too soon; -1: the capacity
};

// Vectors have a value a request. Retries are those of requests that had to give way to the output of others.
struct PrefixReplayResult {
  std::vector<std::int32_t> hit_blocks;  // at the first admission
  std::vector<std::int64_t> retries, retry_hit_blocks, retry_blocks;
  std::int64_t num_evicted = 0, num_evicted_soon = 0, num_preempted = 0, num_oversized = 0;
};

// With the name belady the trace is the future: a block's next use is in the rows that were not admitted yet.
// Throws PolicyError: as make_policy; offsets that do not rise, a key with two others before it.
// Throws CapacityError.
PrefixReplayResult replay_prefix(const std::string& name, std::int64_t capacity, const PrefixTrace& trace,
                                 const PrefixReplayOptions& how, const PolicyOptions& options);

}  // namespace sage
