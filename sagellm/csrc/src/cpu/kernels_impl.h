// The kernels of one instruction set. Each file that includes this defines NAMESPACE, WIDTH (floats of a vector) and
// ROWS (of inputs that are multiplied at once), and is compiled for that set.
#pragma once

#include "attend_impl.h"
#include "block_weights_impl.h"
#include "rounded_impl.h"

namespace sage::cpu::NAMESPACE {

template <class T>
const Kernels* kernels_of(const char* name) {
  static const Kernels found = [name] {
    Kernels table = {name,     T::kWeights,  T::kInputs,   multiply<T>,    multiply_levels<T>, nullptr,      nullptr,
                     nullptr,  pack<T>,      to_input<T>,  to_weight<T>,   from_weight<T>,     encode_heads<T>, gate,
                     attend<T>, attend_bytes, block_weights<T>, block_weights_bytes, encode_keys<T>, strip_weights<T>, strip_weights_bytes,
                     rotate,   scale_row,    add_row,      sum_of_squares, largest,          sum_of_powers};
#ifdef MATRIX_UNIT
    if constexpr (T::kInputs == Type::kBFloat16) table.multiply = multiply_plain_in_unit;
#endif
#ifdef __AVX2__
    table.rounded_bytes = rounded_bytes;
    table.round_inputs = round_inputs<T>;
    table.multiply_rounded = multiply_rounded;
#endif
    return table;
  }();
  return &found;
}

}  // namespace sage::cpu::NAMESPACE
