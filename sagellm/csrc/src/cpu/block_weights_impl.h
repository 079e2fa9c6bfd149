// What each block of a sequence is worth to the queries of a key head. For `kernels_impl.h` alone, which says what it is
// compiled for.
#pragma once

#include "attention_impl.h"

namespace sage::cpu::NAMESPACE {

inline std::size_t block_weights_bytes(int share, int head_size, int count) {
  const auto size = static_cast<std::size_t>(padded(head_size, kTile)) * 4;
  return aligned_to_64(size) * static_cast<std::size_t>(share + 2) +
         aligned_to_64(static_cast<std::size_t>(share) * static_cast<std::size_t>(padded(count, kTile)) * 4);
}

// An estimate of the products of queries with the keys whose numbers lie between `low` and `high`: that of their middle, and so
// much of the way to the largest possible one as `reach` says (1: Quest, Tang et al. 2024). Numbers of a block are read once for
// four queries.
template <int rows = 4>
void bound(int num_rows, const float* queries, const float* low, const float* high, int size, float reach, float* to,
           int wide) {
  if constexpr (rows > 1) {
    if (num_rows < rows) return bound<rows - 1>(num_rows, queries, low, high, size, reach, to, wide);
  }
  Vec totals[rows]{};
  const float of_most = (1.f + reach) / 2.f, of_least = (1.f - reach) / 2.f;
  int i = 0;
  for (; i + WIDTH <= size; i += WIDTH) {
    const Vec least = load(low + i), most = load(high + i);
    for (int row = 0; row < rows; ++row) {
      const Vec numbers = load(queries + row * size + i), a = numbers * least, b = numbers * most;
      totals[row] += of_most * larger(a, b) + of_least * (a + b - larger(a, b));
    }
  }
  for (int row = 0; row < rows; ++row) {
    const float* query = queries + row * size;
    float result = sum(totals[row]);
    for (int n = i; n < size; ++n) {
      const float a = query[n] * low[n], b = query[n] * high[n];
      result += of_most * std::max(a, b) + of_least * std::min(a, b);
    }
    to[row * wide] = result;
  }
}

inline float dot(const float* query, const float* key, int size) {
  Vec total{};
  int i = 0;
  for (; i + WIDTH <= size; i += WIDTH) total += load(query + i) * load(key + i);
  float result = sum(total);
  for (; i < size; ++i) result += query[i] * key[i];
  return result;
}

// `bounds`: of the key head in block 0, smallest and largest numbers, and `stride` numbers further those of block 1; null: the
// keys are read. `task` is one token's.
template <class T>
void block_weights(const Attend& task, const float* bounds, std::size_t stride, float reach, float* weights,
                   char* scratch) {
  using Weight = typename T::Weight;
  const int size = task.head_size, rows = task.share, block_size = 1 << task.block_shift;
  const int blocks = (task.end + block_size - 1) / block_size, count = bounds == nullptr ? task.end : blocks;
  const int wide = padded(count, WIDTH);
  Scratch parts(scratch);
  auto* queries = parts.take<float>(static_cast<std::size_t>(rows * size));
  auto* scores = parts.take<float>(static_cast<std::size_t>(rows * wide));
  auto* decoded = parts.take<Weight>(static_cast<std::size_t>(size));
  auto* key = parts.take<float>(static_cast<std::size_t>(size));
  const auto* from = static_cast<const typename T::Input*>(task.query);
  for (int i = 0; i < rows * size; ++i) queries[i] = T::to_float(from[i]);
  for (int i = 0; i < count; ++i) {
    if (bounds != nullptr) {
      const float* low = bounds + static_cast<std::size_t>(task.table[i]) * stride;
      for (int row = 0; row < rows; row += 4) {
        bound(rows - row, queries + row * size, low, low + size, size, reach, scores + row * wide + i, wide);
      }
      continue;
    }
    const Weight* read = decoded;
    if (task.format == Format::kPlain)
      read = reinterpret_cast<const Weight*>(slot(task, task.keys, i));
    else
      decode_key<T>(task, i, 0, decoded);
    for (int n = 0; n < size; ++n) key[n] = T::to_float(read[n]);
    for (int row = 0; row < rows; ++row) scores[row * wide + i] = dot(queries + row * size, key, size);
  }
  std::fill_n(weights, blocks, 0.f);
  Attend seen = task;  // all of it
  seen.first_position = count - 1;
  seen.begin = 0;
  seen.end = count;
  seen.window = 0;
  for (int row = 0; row < rows; ++row) {
    float* of_row = scores + row * wide;
    std::fill_n(of_row + count, wide - count, 0.f);
    const float total = weigh(of_row, wide, mask(seen, 0, of_row, 0, wide));
    const int shift = bounds == nullptr ? task.block_shift : 0;
    for (int i = 0; i < count; ++i) weights[i >> shift] += of_row[i] / total;
  }
}

}  // namespace sage::cpu::NAMESPACE
