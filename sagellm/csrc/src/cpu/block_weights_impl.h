// What each block of a sequence is worth to the queries of a key head. For `kernels_impl.h` alone, which says what it is
// compiled for.
#pragma once

#include "attention_impl.h"

namespace sage::cpu::NAMESPACE {

inline std::size_t block_weights_bytes(int rows, int head_size, int count) {
  const auto size = static_cast<std::size_t>(padded(head_size, kTile)) * 4;
  return aligned_to_64(size) * static_cast<std::size_t>(rows + 2) +
         aligned_to_64(static_cast<std::size_t>(rows) * static_cast<std::size_t>(padded(count, kTile)) * 4);
}

// Query of a row, [tokens][share].
template <class N>
const N* query_of(const Attend& task, int row) {
  return static_cast<const N*>(task.query) + static_cast<std::size_t>(row / task.share) * task.query_stride +
         static_cast<std::size_t>(row % task.share) * static_cast<std::size_t>(task.head_size);
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

// A key of the task's head, in float32. `decoded` has room for one.
template <class T>
void read_key(const Attend& task, int token, typename T::Weight* decoded, float* to) {
  const typename T::Weight* read = decoded;
  if (task.format == Format::kPlain)
    read = reinterpret_cast<const typename T::Weight*>(slot(task, task.keys, token));
  else
    decode_key<T>(task, token, 0, decoded);
  for (int i = 0; i < task.head_size; ++i) to[i] = T::to_float(read[i]);
}

// Adds the softmax of each row of scores to the blocks that its columns belong to, 1 << shift columns each. `seen`: which
// columns a row sees, and the scale of its scores.
inline void add_weights(const Attend& seen, int rows, int shift, float* scores, int wide, float* weights) {
  for (int row = 0; row < rows; ++row, scores += wide) {
    std::fill_n(scores + seen.end, wide - seen.end, 0.f);
    const float top = mask(seen, row, scores, 0, wide);
    if (top == kNone) continue;
    const float scale = 1.f / weigh(scores, wide, top);
    for (int i = 0; i < seen.end; ++i) weights[i >> shift] += scores[i] * scale;
  }
}

// `bounds`: of the key head in block 0, smallest and largest numbers, and `stride` numbers further those of block 1; null: the
// keys are read.
template <class T>
void block_weights(const Attend& task, const float* bounds, std::size_t stride, float reach, float* weights,
                   char* scratch) {
  const int size = task.head_size, rows = task.tokens * task.share, block_size = 1 << task.block_shift;
  const int blocks = (task.end + block_size - 1) / block_size, count = bounds == nullptr ? task.end : blocks;
  const int wide = padded(count, WIDTH);
  Scratch parts(scratch);
  auto* queries = parts.take<float>(static_cast<std::size_t>(rows * size));
  auto* scores = parts.take<float>(static_cast<std::size_t>(rows * wide));
  auto* decoded = parts.take<typename T::Weight>(static_cast<std::size_t>(size));
  auto* key = parts.take<float>(static_cast<std::size_t>(size));
  for (int row = 0; row < rows; ++row) {
    const auto* from = query_of<typename T::Input>(task, row);
    for (int i = 0; i < size; ++i) queries[row * size + i] = T::to_float(from[i]);
  }
  for (int i = 0; i < count; ++i) {
    if (bounds != nullptr) {
      const float* low = bounds + static_cast<std::size_t>(task.table[i]) * stride;
      for (int row = 0; row < rows; row += 4) {
        bound(rows - row, queries + row * size, low, low + size, size, reach, scores + row * wide + i, wide);
      }
      continue;
    }
    read_key<T>(task, i, decoded, key);
    for (int row = 0; row < rows; ++row) scores[row * wide + i] = dot(queries + row * size, key, size);
  }
  std::fill_n(weights, blocks, 0.f);
  Attend seen = task;
  seen.begin = 0;
  seen.end = count;
  seen.window = 0;
  if (bounds != nullptr) seen.first_position = count - 1;  // all blocks
  add_weights(seen, rows, bounds == nullptr ? task.block_shift : 0, scores, wide, weights);
}

inline std::size_t strip_weights_bytes(int rows, int stride, int head_size, int strips) {
  const auto strip = static_cast<std::size_t>(stride * head_size) * 4;
  return aligned_to_64(static_cast<std::size_t>(rows) * strip) + 2 * aligned_to_64(strip) +
         aligned_to_64(static_cast<std::size_t>(rows) * static_cast<std::size_t>(padded(strips, kTile)) * 4);
}

// products[row] = queries[row] . keys of `count` numbers, for up to four rows; keys are read once for them.
template <class T, int rows = 4>
void multiply_strip(int num_rows, const typename T::Input* queries, const typename T::Weight* keys, int count, float* to,
                    int wide) {
  if constexpr (rows > 1) {
    if (num_rows < rows) return multiply_strip<T, rows - 1>(num_rows, queries, keys, count, to, wide);
  }
  const typename T::Input* of_rows[rows];
  for (int row = 0; row < rows; ++row) of_rows[row] = queries + row * count;
  Vec totals[rows]{};
  T::template dots<rows>(of_rows, keys, count, totals);
  for (int row = 0; row < rows; ++row) to[row * wide] = sum(totals[row]);
}

// A strip of queries meets a strip of keys along the antidiagonal: the first query meets the last key, the second the last but
// one. The mean of their products stands for all of the strip.
template <class T>
void strip_weights(const Attend& task, int stride, float* weights, char* scratch) {
  using Weight = typename T::Weight;
  using Input = typename T::Input;
  const int size = task.head_size, length = stride * size, block_size = 1 << task.block_shift;
  const int num_strips = (task.tokens + stride - 1) / stride, rows = num_strips * task.share;
  const int count = task.end / stride, wide = padded(count, WIDTH);  // keys of a strip that is not full are not estimated
  Scratch parts(scratch);
  auto* queries = parts.take<Input>(static_cast<std::size_t>(rows * length));
  auto* strip_of = parts.take<Input>(static_cast<std::size_t>(length));
  auto* keys = parts.take<Weight>(static_cast<std::size_t>(length));
  auto* scores = parts.take<float>(static_cast<std::size_t>(rows * wide));
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < stride; ++i) {
      // Where the last strip lacks tokens, its last one stands for them.
      const int token = std::min(row / task.share * stride + stride - 1 - i, task.tokens - 1);
      std::copy_n(query_of<Input>(task, token * task.share + row % task.share), size, strip_of + i * size);
    }
    T::arrange(strip_of, length, queries + row * length);
  }
  for (int strip = 0; strip < count; ++strip) {
    for (int i = 0; i < stride; ++i) {
      const int token = strip * stride + i;
      if (task.format == Format::kPlain)
        std::memcpy(keys + i * size, slot(task, task.keys, token), static_cast<std::size_t>(size) * sizeof(Weight));
      else
        decode_key<T>(task, token, 0, keys + i * size);
    }
    for (int row = 0; row < rows; row += 4) {
      multiply_strip<T>(rows - row, queries + row * length, keys, length, scores + row * wide + strip, wide);
    }
  }
  std::fill_n(weights, (task.end + block_size - 1) / block_size, 0.f);
  if (count == 0) return;
  Attend seen = task;
  seen.tokens = num_strips;
  seen.first_position = task.first_position / stride;
  seen.begin = 0;
  seen.end = count;
  seen.scale = task.scale / static_cast<float>(stride);
  int shift = 0;
  while (stride << shift < block_size) ++shift;
  add_weights(seen, rows, shift, scores, wide, weights);
}

}  // namespace sage::cpu::NAMESPACE
