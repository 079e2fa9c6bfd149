// The weight of each block of a sequence for the queries of a key head. For `kernels_impl.h` alone, which says what it is
// compiled for.
#pragma once

#include "attend_impl.h"

namespace sage::cpu::NAMESPACE {

inline std::size_t block_weights_bytes(int rows, int head_size, int count) {
  const auto size = static_cast<std::size_t>(padded(head_size, kTile)) * 4;
  return aligned_to_64(size) * static_cast<std::size_t>(rows + 2) +
         aligned_to_64(static_cast<std::size_t>(rows) * static_cast<std::size_t>(padded(count, kTile)) * 4);
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

// As `bound`, around the mean of the keys, sum * unit: the numbers of a key lie anywhere inside their ranges on their own, so
// that its product is off by `reach` times the root of the summed squares.
template <int rows = 4>
void spread(int num_rows, const float* queries, const float* low, const float* high, const std::int32_t* sums, float unit,
            int size, float reach, float* to, int wide) {
  if constexpr (rows > 1) {
    if (num_rows < rows) return spread<rows - 1>(num_rows, queries, low, high, sums, unit, size, reach, to, wide);
  }
  Vec totals[rows]{}, squares[rows]{};
  int i = 0;
  for (; i + WIDTH <= size; i += WIDTH) {
    const Vec mean = __builtin_convertvector(load_words(sums + i), Vec) * unit, half = (load(high + i) - load(low + i)) * 0.5f;
    for (int row = 0; row < rows; ++row) {
      const Vec numbers = load(queries + row * size + i), off = numbers * half;
      totals[row] += numbers * mean;
      squares[row] += off * off;
    }
  }
  for (int row = 0; row < rows; ++row) {
    const float* query = queries + row * size;
    float result = sum(totals[row]), square = sum(squares[row]);
    for (int n = i; n < size; ++n) {
      const float off = query[n] * (high[n] - low[n]) * 0.5f;
      result += query[n] * static_cast<float>(sums[n]) * unit;
      square += off * off;
    }
    to[row * wide] = result + reach * std::sqrt(square);
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

// Codes of 16 tokens and 16 numbers are 64 bytes: byte 4 t + j has, from the lowest bits on, those of token t and the numbers
// j, 4 + j, 8 + j and 12 + j. Vectors of the same tokens follow each other.
template <class T>
void encode_keys(const Attend& task, int block, const float* bounds, std::uint8_t* codes) {
  const int size = task.head_size, block_size = 1 << task.block_shift;
  float key[kMaxHead], by[kMaxHead];
  typename T::Weight decoded[kMaxHead];
  for (int n = 0; n < size; ++n) {
    const float range = bounds[size + n] - bounds[n];
    by[n] = range > 0.f ? 4.f / range : 0.f;
  }
  std::fill_n(codes, code_bytes(block_size, size), std::uint8_t{0});
  for (int i = 0; i < block_size; ++i) {
    read_key<T>(task, block * block_size + i, decoded, key);
    std::uint8_t* to = codes + i / kCodeGroup * kCodeGroup * (size / 4) + i % kCodeGroup * 4;
    for (int n = 0; n < size; ++n) {
      const int code = std::clamp(static_cast<int>((key[n] - bounds[n]) * by[n]), 0, 3);
      to[n / kCodeGroup * 64 + n % 4] |= static_cast<std::uint8_t>(code << (n % kCodeGroup / 4 * 2));
    }
  }
}

// Scores of the keys of a full block from their codes, for up to four queries of `size` numbers: a number is its lower bound and
// code + 1/2 fourths of the range. `wide`: from the scores of a query to those of the next.
template <int rows = 4>
void score_codes(int num_rows, const float* queries, const float* bounds, const std::uint8_t* codes, int size, int count,
                 float* scores, int wide) {
  if constexpr (rows > 1) {
    if (num_rows < rows) return score_codes<rows - 1>(num_rows, queries, bounds, codes, size, count, scores, wide);
  }
  float steps[rows][kMaxHead], bases[rows];
  for (int row = 0; row < rows; ++row) {
    Vec base{};
    for (int n = 0; n < size; n += WIDTH) {
      const Vec low = load(bounds + n), step = (load(bounds + size + n) - low) * 0.25f, number = load(queries + row * size + n);
      store(steps[row] + n, number * step);
      base += number * (low + 0.5f * step);
    }
    bases[row] = sum(base);
  }
#ifdef __AVX512VNNI__
  // Steps are rounded to 8 bits; an instruction adds up four products.
  std::int8_t rounded[rows][kMaxHead];
  float units[rows];
  for (int row = 0; row < rows; ++row) {
    Vec sizes{};
    for (int n = 0; n < size; n += WIDTH) sizes = larger(sizes, as_float(as_bits(load(steps[row] + n)) & 0x7fffffff));
    const float top = maximum(sizes), by = top > 0.f ? 127.f / top : 0.f;
    units[row] = top / 127.f;
    for (int n = 0; n < size; n += WIDTH) {
      store_codes(rounded[row] + n, __builtin_convertvector(nearest(load(steps[row] + n) * by), IVec));
    }
  }
  for (int i = 0; i < count; i += kCodeGroup) {
    IVec totals[rows][2]{};
    for (int n = 0; n < size; n += kCodeGroup, codes += 64) {
      const IVec four = load_words(codes);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const IVec of_word = (four >> (2 * k)) & 0x03030303;
        for (int row = 0; row < rows; ++row) {
          totals[row][k % 2] = add_codes(totals[row][k % 2], of_word, rounded[row] + n + 4 * k);
        }
      }
    }
    for (int row = 0; row < rows; ++row) {
      store(scores + row * wide + i, __builtin_convertvector(totals[row][0] + totals[row][1], Vec) * units[row] + bases[row]);
    }
  }
#else
  for (int i = 0; i < count; i += kCodeGroup) {
    float totals[rows][kCodeGroup]{};
    for (int n = 0; n < size; n += kCodeGroup, codes += 64) {
      for (int k = 0; k < kCodeGroup; ++k) {
        for (int t = 0; t < kCodeGroup; ++t) {
          const auto code = static_cast<float>((codes[4 * t + k % 4] >> (k / 4 * 2)) & 3);
          for (int row = 0; row < rows; ++row) totals[row][t] += steps[row][n + k] * code;
        }
      }
    }
    for (int row = 0; row < rows; ++row) {
      for (int t = 0; t < kCodeGroup; ++t) scores[row * wide + i + t] = totals[row][t] + bases[row];
    }
  }
#endif
}

// Asks for what is known of a block that comes soon: blocks lie anywhere, so the processor does not see it coming.
inline void prefetch_summary(const Attend& task, const KeySummary& summary, int block) {
  const auto touch = [](const void* from, std::size_t bytes) {
    for (std::size_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(static_cast<const char*>(from) + byte);
  };
  const auto number = static_cast<std::size_t>(task.table[block]);
  touch(summary.bounds + number * summary.bounds_stride, static_cast<std::size_t>(2 * task.head_size) * sizeof(float));
  if (summary.sums != nullptr) {
    touch(summary.sums + number * summary.sums_stride, static_cast<std::size_t>(task.head_size) * sizeof(*summary.sums));
  }
  if (summary.codes == nullptr) return;
  touch(summary.codes + number * summary.codes_stride, code_bytes(1 << task.block_shift, task.head_size));
}
constexpr int kBlocksAhead = 2;

// As `block_weights`, from codes. The keys of a block that is not full are taken to lie in the middle of its bounds.
inline void code_weights(const Attend& task, const KeySummary& summary, const float* queries, float* weights, Scratch parts) {
  const int size = task.head_size, rows = task.share, block_size = 1 << task.block_shift;
  const int blocks = (task.end + block_size - 1) / block_size;
  const auto count = static_cast<std::size_t>(rows * blocks);
  // The largest score of each block, and the sum of exp(score - largest).
  auto *tops = parts.take<float>(count), *sums = parts.take<float>(count);
  auto* scores = parts.take<float>(static_cast<std::size_t>(rows * block_size));
  for (int block = 0; block < blocks; ++block) {
    const auto number = static_cast<std::size_t>(task.table[block]);
    const float* bounds = summary.bounds + number * summary.bounds_stride;
    const int keys = std::min(block_size, task.end - block * block_size);
    if (block + kBlocksAhead < blocks) prefetch_summary(task, summary, block + kBlocksAhead);
    for (int row = 0; row < rows; row += 4) {
      if (keys == block_size) {
        score_codes(rows - row, queries + row * size, bounds, summary.codes + number * summary.codes_stride, size, block_size,
                    scores + row * block_size, block_size);
      } else {
        bound(rows - row, queries + row * size, bounds, bounds + size, size, 0.f, scores + row * block_size, block_size);
      }
    }
    for (int row = 0; row < rows; ++row) {
      float* of_row = scores + row * block_size;
      if (keys < block_size) std::fill_n(of_row, block_size, *of_row);
      Vec top = broadcast(kNone), total{};
      for (int i = 0; i < block_size; i += WIDTH) {
        const Vec score = scaled(task, load(of_row + i));
        store(of_row + i, score);
        top = larger(top, score);
      }
      const float largest_score = tops[row * blocks + block] = maximum(top);
      for (int i = 0; i < block_size; i += WIDTH) total += exponential(load(of_row + i) - largest_score);
      sums[row * blocks + block] = sum(total) * static_cast<float>(keys) / static_cast<float>(block_size);
    }
  }
  std::fill_n(weights, blocks, 0.f);
  for (int row = 0; row < rows; ++row) {
    const float *of_tops = tops + row * blocks, *of_sums = sums + row * blocks;
    const float top = *std::max_element(of_tops, of_tops + blocks);
    float total = 0.f;
    for (int block = 0; block < blocks; ++block) total += of_sums[block] * std::exp(of_tops[block] - top);
    for (int block = 0; block < blocks; ++block) weights[block] += of_sums[block] * std::exp(of_tops[block] - top) / total;
  }
}

template <class T>
void block_weights(const Attend& task, const KeySummary& summary, float* weights, char* scratch) {
  const int size = task.head_size, rows = task.tokens * task.share, block_size = 1 << task.block_shift;
  const int blocks = (task.end + block_size - 1) / block_size;
  const bool by_block = summary.bounds != nullptr;
  const int count = by_block ? blocks : task.end, wide = padded(count, WIDTH);
  Scratch parts(scratch);
  auto* queries = parts.take<float>(static_cast<std::size_t>(rows * size));
  for (int row = 0; row < rows; ++row) {
    const auto* from = query_of<typename T::Input>(task, 0, row);
    for (int i = 0; i < size; ++i) queries[row * size + i] = T::to_float(from[i]);
  }
  if (summary.codes != nullptr) return code_weights(task, summary, queries, weights, parts);
  auto* scores = parts.take<float>(static_cast<std::size_t>(rows * wide));
  auto* decoded = parts.take<typename T::Weight>(static_cast<std::size_t>(size));
  auto* key = parts.take<float>(static_cast<std::size_t>(size));
  for (int i = 0; i < count; ++i) {
    if (by_block) {
      if (i + kBlocksAhead < blocks) prefetch_summary(task, summary, i + kBlocksAhead);
      const auto number = static_cast<std::size_t>(task.table[i]);
      const float* low = summary.bounds + number * summary.bounds_stride;
      const int keys = std::min(block_size, task.end - i * block_size);
      const float unit = std::ldexp(1.f, -kKeySumBits) / static_cast<float>(keys);
      for (int row = 0; row < rows; row += 4) {
        if (summary.sums != nullptr) {
          spread(rows - row, queries + row * size, low, low + size, summary.sums + number * summary.sums_stride, unit, size,
                 summary.reach, scores + row * wide + i, wide);
          continue;
        }
        bound(rows - row, queries + row * size, low, low + size, size, summary.reach, scores + row * wide + i, wide);
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
  if (by_block) seen.first_position = count - 1;  // all blocks
  add_weights(seen, rows, by_block ? 0 : task.block_shift, scores, wide, weights);
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
  const typename T::Weight* const one[] = {keys};
  Vec totals[rows][1]{};
  T::template dots<rows>(of_rows, one, count, totals);
  for (int row = 0; row < rows; ++row) to[row * wide] = sum(totals[row][0]);
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
      std::copy_n(query_of<Input>(task, 0, token * task.share + row % task.share), size, strip_of + i * size);
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
