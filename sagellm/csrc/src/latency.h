// A histogram of durations: four buckets an octave, so a quantile read from it is at most a quarter too high.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sage {

inline std::size_t latency_bucket(std::uint64_t ns) {
  if (ns < 4) return static_cast<std::size_t>(ns);
  const auto octave = static_cast<std::size_t>(63 - __builtin_clzll(ns));
  return octave * 4 + ((ns >> (octave - 2)) & 3);
}

// The largest duration in a bucket.
inline std::uint64_t latency_bound(std::size_t bucket) {
  if (bucket < 8) return bucket < 4 ? bucket : bucket - 4;
  const std::size_t octave = bucket / 4;
  return ((std::uint64_t{4} + bucket % 4 + 1) << (octave - 2)) - 1;
}

}  // namespace sage
