// The choice among the ways of attention, by the query rows, the format of the cache and the instruction set. For
// `kernels_impl.h` alone, which says what it is compiled for.
#pragma once

#include "attention_columns_impl.h"
#include "attention_few_impl.h"
#include "attention_many_impl.h"
#include "attention_unit_impl.h"
#include "attention_whole_impl.h"

namespace sage::cpu::NAMESPACE {

inline std::size_t attend_bytes(int rows, int heads, int head_size, bool few) {
  if (is_few(rows, few)) {
#ifdef MATRIX_UNIT
    return std::max(attend_few_bytes(rows, heads, head_size), attend_unit_bytes(rows, heads, head_size));
#else
    return attend_few_bytes(rows, heads, head_size);
#endif
  }
#ifdef DOT_BF16
  return std::max(attend_many_bytes(rows, heads, head_size), attend_columns_bytes(rows, heads, head_size));
#else
  return attend_many_bytes(rows, heads, head_size);
#endif
}

template <class T>
void attend(const Attend& task, float* out, float* max, float* sums, char* scratch) {
  if (!is_few(task.tokens * task.share, task.few)) {
#ifdef DOT_BF16
    if constexpr (T::kInputs == Type::kBFloat16)
      return attend_columns(task, out, max, sums, scratch);
    else
#endif
      return attend_many<T>(task, out, max, sums, scratch);
  }
#ifdef WHOLE_NUMBERS
  if constexpr (T::kWeights == Type::kBFloat16 && (WIDTH == 8 || T::kInputs == Type::kBFloat16)) {
    if (takes_whole(task)) {
      const auto attend_of =
          task.format == Format::kLevels4 ? attend_whole<T, Format::kLevels4> : attend_whole<T, Format::kLevels8>;
      return attend_of(task, out, max, sums, scratch);
    }
  }
#endif
#ifdef MATRIX_UNIT
  if constexpr (T::kInputs == Type::kBFloat16) {
    if (takes_unit(task)) return attend_in_unit(task, out, max, sums, scratch);
  }
#endif
  attend_few<T>(task, out, max, sums, scratch);
}

}  // namespace sage::cpu::NAMESPACE
