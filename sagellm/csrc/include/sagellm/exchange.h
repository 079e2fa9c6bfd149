// How ranks that split a model's layers exchange numbers in the middle of a step.
#pragma once

#include <cstddef>

namespace sage {

// All ranks make the same calls in the same order. A call returns when its result is there; it throws when a rank has gone.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // numbers[i] becomes the sum of numbers[i] of all ranks, the same bits on each rank.
  virtual void add_up(float* numbers, std::size_t count) = 0;
  // The same in two calls, between which the caller computes. Sums end in the order in which they begin, at most `kMostBegun` are
  // under way, and nothing else meanwhile. Numbers stay where they are until the end.
  static constexpr int kMostBegun = 2;
  virtual void begin_sum(float* numbers, std::size_t count) = 0;
  virtual void end_sum() = 0;
  // `all` [ranks][count] gets the numbers `own` [count] of each rank.
  virtual void gather(const float* own, std::size_t count, float* all) = 0;
};

}  // namespace sage
