// The kernels of one instruction set. Each file that includes this defines NAMESPACE, WIDTH (floats of a vector) and
// ROWS (of inputs that are multiplied at once), and is compiled for that set.
#pragma once

#include "attention_impl.h"
#include "levels_impl.h"

namespace sage::cpu::NAMESPACE {

#ifdef __AVX2__
constexpr bool kHas8Bits = true;
#else
constexpr bool kHas8Bits = false;
#endif

template <class T>
const Kernels* kernels_of(const char* name) {
  static const Kernels found = {name,      T::kWeights,   T::kInputs, multiply<T>,  multiply_levels<T>,
                                kHas8Bits, pack<T>,       to_input<T>, to_weight<T>, from_weight<T>,
                                gate,      attend<T>,     attend_bytes, rotate,      scale_row,
                                add_row,   sum_of_squares, largest,     sum_of_powers};
  return &found;
}

}  // namespace sage::cpu::NAMESPACE
