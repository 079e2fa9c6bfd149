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
  // Each rank has columns [rank * part, rank * part + part) of `numbers` [rows][columns], and gets the others.
  virtual void gather(float* numbers, std::size_t rows, std::size_t columns, std::size_t part) = 0;
};

}  // namespace sage
