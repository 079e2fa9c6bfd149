// Attention over blocks of keys and values. For `kernels_impl.h` alone, which says what it is compiled for.
#pragma once

#include "products_impl.h"

namespace sage::cpu::NAMESPACE {

// From so many query rows on, keys are packed as weights are, and multiplied in the same way.
constexpr int kManyRows = 16;
constexpr int kRound = 128;  // keys in a round of many rows

inline std::size_t aligned_to_64(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

inline bool is_few(int rows, bool few) { return few && rows < kManyRows; }

inline std::size_t attend_bytes(int rows, int head_size, bool few) {
  const auto r = static_cast<std::size_t>(rows);
  const auto d = static_cast<std::size_t>(padded(head_size, kTile));
  if (is_few(rows, few)) return aligned_to_64(r * (kSplit + kTile) * 4) + aligned_to_64(r * d * 4);
  return aligned_to_64(r * d * 4) * 2 + aligned_to_64(r * kRound * 4) * 2 + aligned_to_64(kRound * d * 4) +
         aligned_to_64(r * 12);
}

inline const char* slot(const Attend& task, const char* cache, int token) {
  const std::int64_t block = task.table[token >> task.block_shift];
  const int within = token & ((1 << task.block_shift) - 1);
  return cache + static_cast<std::size_t>(block) * task.block_stride +
         static_cast<std::size_t>(within) * task.slot_stride;
}

// The keys that a row sees are [first, last).
inline int first_seen(const Attend& task, int token) {
  return task.window > 0 ? std::max(task.begin, task.first_position + token + 1 - task.window) : task.begin;
}
inline int last_seen(const Attend& task, int token) { return std::min(task.end, task.first_position + token + 1); }

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Scores to scaled scores, kNone for keys that are not seen; returns the largest. `count` is a multiple of WIDTH.
inline float mask(const Attend& task, int row, float* scores, int begin, int count) {
  const int token = row / task.share;
  const int first = std::clamp(first_seen(task, token) - begin, 0, count);
  const int last = std::clamp(last_seen(task, token) - begin, 0, count);
  Vec top = broadcast(kNone);
  for (int i = 0; i < count; i += WIDTH) {
    Vec score = load(scores + i) * task.scale;
    if (task.softcap > 0) {  // cap tanh(x / cap), by exp(2 x / cap)
      const Vec power = exponential(score * (2.f / task.softcap));
      score = task.softcap * (1.f - 2.f / (power + 1.f));
    }
    if (i < first || i + WIDTH > last) {
      for (int k = 0; k < WIDTH; ++k) {
        if (i + k < first || i + k >= last) score[k] = kNone;
      }
    }
    store(scores + i, score);
    top = larger(top, score);
  }
  return maximum(top);
}

// Scores to exp(score - top); returns their sum. `count` is a multiple of WIDTH.
inline float weigh(float* scores, int count, float top) {
  Vec total{};
  for (int i = 0; i < count; i += WIDTH) {
    const Vec score = load(scores + i);
    const Vec weight = score == broadcast(kNone) ? Vec{} : exponential(score - top);
    store(scores + i, weight);
    total += weight;
  }
  return sum(total);
}

// Adds up each of WIDTH vectors: result[i] is the sum of values[i].
inline Vec add_up(Vec (&values)[WIDTH]) {
  IVec even, odd;
  for (int i = 0; i < WIDTH; ++i) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
  for (int left = WIDTH; left > 1; left /= 2) {
    for (int i = 0; i < left / 2; ++i) {
      const Vec a = values[2 * i], b = values[2 * i + 1];
      values[i] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    }
  }
  return values[0];
}

// Turns WIDTH rows of WIDTH words into columns.
inline void transpose(IVec (&rows)[WIDTH]) {
  for (int step = WIDTH / 2; step > 0; step /= 2) {
    IVec low, high;
    for (int i = 0; i < WIDTH; ++i) {
      low[i] = (i & step) ? WIDTH + i - step : i;
      high[i] = (i & step) ? WIDTH + i : i + step;
    }
    for (int i = 0; i < WIDTH; ++i) {
      if (i & step) continue;
      const IVec a = rows[i], b = rows[i + step];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + step] = __builtin_shuffle(a, b, high);
    }
  }
}

// Keys [kTile][words] of 4 bytes to a tile, [words][kTile].
inline void pack_keys(const char* const (&keys)[kTile], int words, void* tile) {
  auto* to = static_cast<std::int32_t*>(tile);
  int word = 0;
  for (; word + WIDTH <= words; word += WIDTH) {
    for (int j = 0; j < kTile; j += WIDTH) {
      IVec rows[WIDTH];
      for (int i = 0; i < WIDTH; ++i) rows[i] = load_words(keys[j + i] + word * 4);
      transpose(rows);
      for (int i = 0; i < WIDTH; ++i) *reinterpret_cast<IVecAt*>(to + (word + i) * kTile + j) = rows[i];
    }
  }
  for (; word < words; ++word) {
    for (int j = 0; j < kTile; ++j) std::memcpy(to + word * kTile + j, keys[j] + word * 4, 4);
  }
}

template <class T>
void attend_few(const Attend& task, float* out, float* max, float* sums, char* scratch) {
  using Weight = typename T::Weight;
  const int rows = task.tokens * task.share, size = task.head_size, count = task.end - task.begin;
  const int wide = padded(count, WIDTH);
  auto* scores = reinterpret_cast<float*>(scratch);
  // Rows of keys lie apart, in blocks that may be anywhere, so that the processor does not fetch them ahead by itself.
  const auto fetch = [&](const char* cache, int first) {
    for (int token = first; token < std::min(first + WIDTH, task.end); ++token) {
      const char* at = slot(task, cache, token);
      for (std::size_t byte = 0; byte < static_cast<std::size_t>(size) * sizeof(Weight); byte += 64) {
        __builtin_prefetch(at + byte);
      }
    }
  };
  const typename T::Input* queries[kManyRows];
  for (int row = 0; row < rows; ++row) {
    queries[row] = static_cast<const typename T::Input*>(task.query) +
                   static_cast<std::size_t>(row / task.share) * task.query_stride +
                   static_cast<std::size_t>(row % task.share) * static_cast<std::size_t>(size);
  }
  fetch(task.keys, task.begin);
  fetch(task.keys, task.begin + WIDTH);
  const Weight* keys[WIDTH];
  for (int i = 0; i < wide; i += WIDTH) {
    fetch(task.keys, task.begin + i + 2 * WIDTH);
    fetch(task.values, task.begin + i);
    for (int j = 0; j < WIDTH; ++j) {
      keys[j] = reinterpret_cast<const Weight*>(slot(task, task.keys, std::min(task.begin + i + j, task.end - 1)));
    }
    for (int row = 0; row < rows; ++row) {
      Vec products[WIDTH];
      for (int j = 0; j < WIDTH; ++j) products[j] = T::dot(queries[row], keys[j], size);
      store(scores + row * wide + i, add_up(products));
    }
  }
  for (int row = 0; row < rows; ++row) {
    max[row] = mask(task, row, scores + row * wide, task.begin, wide);
    sums[row] = max[row] == kNone ? 0.f : weigh(scores + row * wide, wide, max[row]);
    if (max[row] == kNone) std::fill_n(scores + row * wide, wide, 0.f);
  }
  // out = weights . values; a value row is read once for up to four rows.
  constexpr int kRows = 4, kParts = 64 / WIDTH;
  for (int row = 0; row < rows; row += kRows) {
    const int here = std::min(kRows, rows - row);
    for (int part = 0; part < size; part += 64) {
      const int numbers = std::min(64, size - part);
      if (numbers == 64) {
        Vec total[kRows][kParts] = {};
        for (int i = 0; i < count; ++i) {
          const auto* value = reinterpret_cast<const Weight*>(slot(task, task.values, task.begin + i)) + part;
          Vec wide_value[kParts];
          if constexpr (T::kWeights == Type::kFloat32) {
            for (int v = 0; v < kParts; ++v) wide_value[v] = load(value + v * WIDTH);
          } else {  // even numbers, then odd ones, of 2 * WIDTH
            for (int v = 0; v < kParts; v += 2) {
              const IVec pairs = load_words(value + v * WIDTH);
              wide_value[v] = low_half(pairs);
              wide_value[v + 1] = high_half(pairs);
            }
          }
          for (int r = 0; r < kRows; ++r) {
            const Vec weight = broadcast(r < here ? scores[(row + r) * wide + i] : 0.f);
            for (int v = 0; v < kParts; ++v) total[r][v] += weight * wide_value[v];
          }
        }
        for (int r = 0; r < here; ++r) {
          float* to = out + (row + r) * size + part;
          if constexpr (T::kWeights == Type::kFloat32) {
            for (int v = 0; v < kParts; ++v) store(to + v * WIDTH, total[r][v]);
          } else {
            for (int v = 0; v < kParts; v += 2) {
              for (int i = 0; i < WIDTH; ++i) {
                to[v * WIDTH + 2 * i] = total[r][v][i];
                to[v * WIDTH + 2 * i + 1] = total[r][v + 1][i];
              }
            }
          }
        }
      } else {
        for (int r = 0; r < here; ++r) std::fill_n(out + (row + r) * size + part, numbers, 0.f);
        for (int i = 0; i < count; ++i) {
          const auto* value = reinterpret_cast<const Weight*>(slot(task, task.values, task.begin + i)) + part;
          for (int r = 0; r < here; ++r) {
            const float weight = scores[(row + r) * wide + i];
            if (weight == 0.f) continue;
            for (int n = 0; n < numbers; ++n) out[(row + r) * size + part + n] += weight * T::to_float(value[n]);
          }
        }
      }
    }
  }
}

// Online softmax over rounds of keys (Milakov and Gimelshein, 2018; FlashAttention).
template <class T>
void attend_many(const Attend& task, float* out, float* max, float* sums, char* scratch) {
  using Weight = typename T::Weight;
  using Input = typename T::Input;
  const int rows = task.tokens * task.share, size = task.head_size;
  const int wide = padded(size, kTile), inputs = padded(size, 2);
  const auto take = [&](std::size_t bytes) {
    char* part = scratch;
    scratch += aligned_to_64(bytes);
    return part;
  };
  const auto r_count = static_cast<std::size_t>(rows);
  auto* queries = reinterpret_cast<Input*>(take(r_count * static_cast<std::size_t>(wide) * 4));
  auto* total = reinterpret_cast<float*>(take(r_count * static_cast<std::size_t>(wide) * 4));
  auto* scores = reinterpret_cast<float*>(take(r_count * kRound * 4));
  auto* weights = reinterpret_cast<Input*>(take(r_count * kRound * 4));
  auto* packed = reinterpret_cast<Weight*>(take(kRound * static_cast<std::size_t>(wide) * 4));
  for (int row = 0; row < rows; ++row) {
    const auto* from = static_cast<const Input*>(task.query) +
                       static_cast<std::size_t>(row / task.share) * task.query_stride +
                       static_cast<std::size_t>(row % task.share) * static_cast<std::size_t>(size);
    std::copy_n(from, size, queries + row * inputs);
    if (size % 2 != 0) queries[row * inputs + size] = T::from_float(0.f);
    max[row] = kNone;
    sums[row] = 0.f;
  }
  std::fill_n(total, r_count * static_cast<std::size_t>(wide), 0.f);
  // Rounds begin at the same keys whatever the first query is: sums then run in the same order.
  const int first = std::max(task.begin, first_seen(task, 0)) / kRound * kRound,
            last = std::min(task.end, task.first_position + task.tokens);
  for (int begin = first; begin < last; begin += kRound) {
    const int count = std::min(kRound, last - begin), keys = padded(count, kTile);
    for (int i = 0; i < keys; i += kTile) {
      Weight* tile = packed + i * inputs;
      const char* key[kTile];
      for (int j = 0; j < kTile; ++j) key[j] = slot(task, task.keys, std::min(begin + i + j, last - 1));
      pack_keys(key, size / T::kStep, tile);
      if (size % T::kStep != 0) {
        for (int j = 0; j < kTile; ++j) {
          tile[(size - 1) * kTile + j * T::kStep] = reinterpret_cast<const Weight*>(key[j])[size - 1];
          tile[(size - 1) * kTile + j * T::kStep + 1] = Weight{};
        }
      }
      multiply<T>(queries, static_cast<std::size_t>(inputs), rows, tile, 1, T::kStep == 2 ? inputs : size, scores + i,
                  kRound, false);
    }
    for (int row = 0; row < rows; ++row) {
      float* of_row = scores + row * kRound;
      const float top = mask(task, row, of_row, begin, keys), before = max[row];
      max[row] = std::max(before, top);
      const float shrink = before == kNone ? 0.f : std::exp(before - max[row]);
      const float weight = max[row] == kNone ? (std::fill_n(of_row, keys, 0.f), 0.f) : weigh(of_row, keys, max[row]);
      sums[row] = sums[row] * shrink + weight;
      to_input<T>(of_row, nullptr, keys, weights + row * kRound);
      if (shrink != 1.f) {
        for (int n = 0; n < wide; ++n) total[row * wide + n] *= shrink;
      }
    }
    const int even = padded(count, 2);
    for (int n = 0; n < size; n += kTile) {
      const int numbers = std::min(kTile, size - n);
      const auto value = [&](int i) {
        return reinterpret_cast<const Weight*>(slot(task, task.values, begin + std::min(i, count - 1))) + n;
      };
      for (int i = 0; i < even; i += T::kStep) {
        Weight* to = packed + i * kTile;
        if (numbers < kTile) std::fill_n(to, kTile * T::kStep, Weight{});
        if constexpr (T::kStep == 1) {
          std::copy_n(value(i), numbers, to);
        } else {  // the weight of a token beyond the last one is 0
          const Weight *even_value = value(i), *odd_value = value(i + 1);
          for (int j = 0; j < numbers; ++j) {
            const std::uint32_t pair = even_value[j] | static_cast<std::uint32_t>(odd_value[j]) << 16;
            std::memcpy(to + 2 * j, &pair, 4);
          }
        }
      }
      multiply<T>(weights, kRound, rows, packed, 1, even, total + n, static_cast<std::size_t>(wide), true);
    }
  }
  for (int row = 0; row < rows; ++row) std::copy_n(total + row * wide, size, out + row * size);
}

template <class T>
void attend(const Attend& task, float* out, float* max, float* sums, char* scratch) {
  if (is_few(task.tokens * task.share, task.few))
    attend_few<T>(task, out, max, sums, scratch);
  else
    attend_many<T>(task, out, max, sums, scratch);
}

}  // namespace sage::cpu::NAMESPACE
