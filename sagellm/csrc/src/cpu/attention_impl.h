// Attention over blocks of keys and values. For `kernels_impl.h` alone, which says what it is compiled for.
#pragma once

#include "products_impl.h"

namespace sage::cpu::NAMESPACE {

// From so many query rows on, keys are packed as weights are, and multiplied in the same way.
constexpr int kManyRows = 16;
constexpr int kRound = 128;  // keys in a round of many rows

inline std::size_t aligned_to_64(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

inline bool is_few(int rows, bool few) { return few && rows < kManyRows; }

inline std::size_t attend_bytes(int rows, int heads, int head_size, bool few) {
  const auto r = static_cast<std::size_t>(rows);
  const auto d = static_cast<std::size_t>(padded(head_size, kTile));
  if (is_few(rows, few)) return aligned_to_64(static_cast<std::size_t>(heads) * r * (kSplit + kTile) * 4);
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

#ifdef DOT_BF16
// Scores of WIDTH adjacent keys for `rows` queries, which stay in registers; the sums are those of BFloat16Dot::dot.
template <int rows, int parts>
void score_keys(const std::uint16_t* const* queries, const char* key, std::size_t stride, float* scores, int wide) {
  __m512bh query[rows][parts];
  for (int r = 0; r < rows; ++r) {
    for (int p = 0; p < parts; ++p) query[r][p] = reinterpret_cast<__m512bh>(load_words(queries[r] + p * 32));
  }
  Vec products[rows][WIDTH];
  for (int j = 0; j < WIDTH; ++j, key += stride) {
    __m512 sums[rows];
    for (int r = 0; r < rows; ++r) sums[r] = _mm512_setzero_ps();
    for (int p = 0; p < parts; ++p) {
      const auto numbers = reinterpret_cast<__m512bh>(load_words(key + p * 64));
      for (int r = 0; r < rows; ++r) sums[r] = _mm512_dpbf16_ps(sums[r], query[r][p], numbers);
    }
    for (int r = 0; r < rows; ++r) products[r][j] = reinterpret_cast<Vec>(sums[r]);
  }
  for (int r = 0; r < rows; ++r) store(scores + r * wide, add_up(products[r]));
}

template <int parts, int rows = 4>
void score_rows(int count, const std::uint16_t* const* queries, const char* key, std::size_t stride, float* scores,
                int wide) {
  if constexpr (rows > 1) {
    if (count < rows) return score_rows<parts, rows - 1>(count, queries, key, stride, scores, wide);
  }
  score_keys<rows, parts>(queries, key, stride, scores, wide);
}
#endif

// Even numbers of 2 * WIDTH first, then the odd ones: the order in which pairs of bfloat16 are widened.
template <class T>
void in_order(float* numbers, int count) {
  if constexpr (T::kWeights == Type::kFloat32) return;
  for (int n = 0; n < count; n += 2 * WIDTH) {
    float widened[2 * WIDTH];
    std::memcpy(widened, numbers + n, sizeof(widened));
    for (int i = 0; i < WIDTH; ++i) {
      numbers[n + 2 * i] = widened[i];
      numbers[n + 2 * i + 1] = widened[WIDTH + i];
    }
  }
}

// out[r] += weights[r] . values of 64 numbers of `count` adjacent tokens, for `rows` rows; each value is read once.
template <class T, int rows>
void add_values(int count, const typename T::Weight* value, std::size_t stride, const float* weights, int wide,
                float* out, int size) {
  constexpr int kParts = 64 / WIDTH;
  Vec total[rows][kParts];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kParts; ++v) total[r][v] = load(out + r * size + v * WIDTH);
  }
  for (int i = 0; i < count; ++i, value += stride) {
    Vec numbers[kParts];
    if constexpr (T::kWeights == Type::kFloat32) {
      for (int v = 0; v < kParts; ++v) numbers[v] = load(value + v * WIDTH);
    } else {
      for (int v = 0; v < kParts; v += 2) {
        const IVec pairs = load_words(value + v * WIDTH);
        numbers[v] = low_half(pairs);
        numbers[v + 1] = high_half(pairs);
      }
    }
    for (int r = 0; r < rows; ++r) {
      const Vec weight = broadcast(weights[r * wide + i]);
      for (int v = 0; v < kParts; ++v) total[r][v] += weight * numbers[v];
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kParts; ++v) store(out + r * size + v * WIDTH, total[r][v]);
  }
}

template <class T, int rows = 4>
void add_values_of(int num_rows, int count, const typename T::Weight* value, std::size_t stride, const float* weights,
                   int wide, float* out, int size) {
  if constexpr (rows > 1) {
    if (num_rows < rows) {
      return add_values_of<T, rows - 1>(num_rows, count, value, stride, weights, wide, out, size);
    }
  }
  add_values<T, rows>(count, value, stride, weights, wide, out, size);
}

// The heads of a group of tokens lie side by side and are read one after the other: memory is read in one run.
template <class T>
void attend_few(const Attend& task, float* out, float* max, float* sums, char* scratch) {
  using Weight = typename T::Weight;
  const int rows = task.tokens * task.share, size = task.head_size, count = task.end - task.begin;
  const int wide = padded(count, WIDTH), block = 1 << task.block_shift, group = std::min(WIDTH, block);
  const std::size_t stride = task.slot_stride / sizeof(Weight);
  auto* scores = reinterpret_cast<float*>(scratch);  // [heads][rows][wide]
  const auto scores_of = [&](int head, int row) { return scores + (head * rows + row) * wide; };
  const auto result = [&](float* of, int head) { return of + static_cast<std::size_t>(head) * task.result_stride; };
  // Blocks may be anywhere, so that the processor does not fetch the next one ahead by itself.
  const auto fetch = [&](const char* cache, int first) {
    for (int token = first; token < std::min(first + WIDTH, task.end); token += group) {
      const char* at = slot(task, cache, token);
      for (int t = 0; t < std::min(group, task.end - token); ++t, at += task.slot_stride) {
        for (int byte = 0; byte < task.heads * size * static_cast<int>(sizeof(Weight)); byte += 64) {
          __builtin_prefetch(at + byte);
        }
      }
    }
  };
  const auto query = [&](int head, int row) {
    return static_cast<const typename T::Input*>(task.query) +
           static_cast<std::size_t>(row / task.share) * task.query_stride +
           static_cast<std::size_t>((head * task.share + row % task.share) * size);
  };
  fetch(task.keys, task.begin);
  fetch(task.keys, task.begin + WIDTH);
  for (int i = 0; i < wide; i += WIDTH) {
    fetch(task.keys, task.begin + i + 2 * WIDTH);
    for (int head = 0; head < task.heads; ++head) {
      const typename T::Input* queries[kManyRows];
      for (int row = 0; row < rows; ++row) queries[row] = query(head, row);
#ifdef DOT_BF16
      if constexpr (T::kInputs == Type::kBFloat16) {
        if (i + WIDTH <= count && group == WIDTH && (size == 64 || size == 128)) {
          const char* key = slot(task, task.keys, task.begin + i) + static_cast<std::size_t>(head * size) * 2;
          for (int row = 0; row < rows; row += 4) {
            const auto score = size == 64 ? score_rows<2> : score_rows<4>;
            score(std::min(4, rows - row), queries + row, key, task.slot_stride, scores_of(head, row) + i, wide);
          }
          continue;
        }
      }
#endif
      const Weight* keys[WIDTH];
      for (int j = 0; j < WIDTH; ++j) {
        const char* at = slot(task, task.keys, std::min(task.begin + i + j, task.end - 1));
        keys[j] = reinterpret_cast<const Weight*>(at) + head * size;
      }
      for (int row = 0; row < rows; ++row) {
        Vec products[WIDTH];
        for (int j = 0; j < WIDTH; ++j) products[j] = T::dot(queries[row], keys[j], size);
        store(scores_of(head, row) + i, add_up(products));
      }
    }
  }
  fetch(task.values, task.begin);
  fetch(task.values, task.begin + group);
  for (int head = 0; head < task.heads; ++head) {
    for (int row = 0; row < rows; ++row) {
      float *of_row = scores_of(head, row), &top = result(max, head)[row];
      top = mask(task, row, of_row, task.begin, wide);
      result(sums, head)[row] = top == kNone ? 0.f : weigh(of_row, wide, top);
      if (top == kNone) std::fill_n(of_row, wide, 0.f);
    }
    std::fill_n(result(out, head), rows * size, 0.f);
  }
  // out = weights . values; a value is read once for up to four rows.
  for (int i = 0; i < count; i += group) {
    fetch(task.values, task.begin + i + 2 * group);
    const int here = std::min(group, count - i);
    const auto* values = reinterpret_cast<const Weight*>(slot(task, task.values, task.begin + i));
    for (int head = 0; head < task.heads; ++head, values += size) {
      for (int row = 0; row < rows; row += 4) {
        const float* weights = scores_of(head, row) + i;
        float* to = result(out, head) + row * size;
        int part = 0;
        for (; part + 64 <= size; part += 64) {
          add_values_of<T>(std::min(4, rows - row), here, values + part, stride, weights, wide, to + part, size);
        }
        for (int t = 0; t < here && part < size; ++t) {
          for (int r = 0; r < std::min(4, rows - row); ++r) {
            const float weight = weights[r * wide + t];
            if (weight == 0.f) continue;
            const Weight* value = values + static_cast<std::size_t>(t) * stride;
            for (int n = part; n < size; ++n) to[r * size + n] += weight * T::to_float(value[n]);
          }
        }
      }
    }
  }
  for (int head = 0; head < task.heads; ++head) {
    for (int row = 0; row < rows; ++row) in_order<T>(result(out, head) + row * size, size / 64 * 64);
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
