// Kernels over vectors of WIDTH floats. Each file that includes this defines WIDTH, ROWS and NAMESPACE, and is compiled
// for one instruction set.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"

#ifdef DOT_BF16
#include <immintrin.h>
#endif

#define FEW_ROWS_TILES 2

namespace sage::cpu::NAMESPACE {

typedef float Vec __attribute__((vector_size(WIDTH * 4)));
typedef std::int32_t IVec __attribute__((vector_size(WIDTH * 4)));
typedef float VecAt __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef std::int32_t IVecAt __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

constexpr int kVectors = kTile / WIDTH;

inline Vec load(const float* from) { return *reinterpret_cast<const VecAt*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<VecAt*>(to) = value; }
inline IVec load_words(const void* from) { return *reinterpret_cast<const IVecAt*>(from); }
inline Vec as_float(IVec bits) { return reinterpret_cast<Vec>(bits); }
inline IVec as_bits(Vec value) { return reinterpret_cast<IVec>(value); }
inline Vec broadcast(float value) { return value - Vec{}; }
inline Vec low_half(IVec pairs) { return as_float(pairs << 16); }  // of bfloat16 pairs
inline Vec high_half(IVec pairs) { return as_float(pairs & static_cast<std::int32_t>(0xffff0000)); }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float widen(std::uint16_t value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline std::uint16_t narrow(float value) {  // to the nearest, ties to even; NaN stays NaN
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16, quiet = (bits >> 16) | 0x40U;
  return static_cast<std::uint16_t>(value == value ? rounded : quiet);
}

inline float sum(Vec value) {
  float result = 0;
  for (int i = 0; i < WIDTH; ++i) result += value[i];
  return result;
}

inline float maximum(Vec value) {
  float result = value[0];
  for (int i = 1; i < WIDTH; ++i) result = std::max(result, value[i]);
  return result;
}

// Cephes' expf: the nearest power of two, and a polynomial for the rest; within 2 units in the last place.
inline Vec exponential(Vec x) {
  const Vec low = broadcast(-87.33654f), high = broadcast(88.37626f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Vec magic = broadcast(12582912.f);
  const Vec shifted = x * 1.44269504f + magic, power = shifted - magic;
  x = x - power * 0.693359375f - power * -2.12194440e-4f;
  Vec y = broadcast(1.9875691500e-4f);
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x * x + x + 1.f;
  return as_float(as_bits(y) + ((as_bits(shifted) - as_bits(magic)) << 23));
}

// ---- types of weights and inputs

struct Float32 {  // float32 weights
  using Weight = float;
  using Input = float;
  static constexpr Type kWeights = Type::kFloat32, kInputs = Type::kFloat32;
  static constexpr int kStep = 1;  // inputs in a row of a tile
  static float to_float(Weight value) { return value; }
  static Input from_float(float value) { return value; }

  template <int rows, int tiles>
  static void multiply(const Input* input, std::size_t stride, const Weight* tile, int inputs,
                       Vec (&sums)[tiles][rows][kVectors]) {
    for (int i = 0; i < inputs; ++i, tile += kTile) {
      for (int t = 0; t < tiles; ++t) {
        const Weight* at = tile + t * inputs * kTile;
        if (rows <= 4) __builtin_prefetch(at + 512);
        Vec weight[kVectors];
        for (int v = 0; v < kVectors; ++v) weight[v] = load(at + v * WIDTH);
        for (int r = 0; r < rows; ++r) {
          const Vec x = broadcast(input[static_cast<std::size_t>(r) * stride + static_cast<std::size_t>(i)]);
          for (int v = 0; v < kVectors; ++v) sums[t][r][v] += x * weight[v];
        }
      }
    }
  }
  // Sum over `size` of query times key, as a vector that is still to be added up.
  static Vec dot(const Input* query, const Weight* key, int size) {
    Vec result{};
    int i = 0;
    for (; i + WIDTH <= size; i += WIDTH) result += load(query + i) * load(key + i);
    for (; i < size; ++i) result[0] += query[i] * key[i];
    return result;
  }
};

struct BFloat16 {  // bfloat16 weights, float32 inputs
  using Weight = std::uint16_t;
  using Input = float;
  static constexpr Type kWeights = Type::kBFloat16, kInputs = Type::kFloat32;
  static constexpr int kStep = 2;
  static float to_float(Weight value) { return widen(value); }
  static Input from_float(float value) { return value; }

  template <int rows, int tiles>
  static void multiply(const Input* input, std::size_t stride, const Weight* tile, int inputs,
                       Vec (&sums)[tiles][rows][kVectors]) {
    for (int i = 0; i < inputs; i += 2, tile += 2 * kTile) {
      for (int t = 0; t < tiles; ++t) {
        const Weight* at = tile + t * inputs * kTile;
        if (rows <= 4) {
          __builtin_prefetch(at + 1024);
          __builtin_prefetch(at + 1056);
        }
        for (int v = 0; v < kVectors; ++v) {
          const IVec pairs = load_words(at + 2 * v * WIDTH);
          const Vec first = low_half(pairs), second = high_half(pairs);
          for (int r = 0; r < rows; ++r) {
            const float* x = input + static_cast<std::size_t>(r) * stride + i;
            sums[t][r][v] += x[0] * first;
            sums[t][r][v] += x[1] * second;
          }
        }
      }
    }
  }
  static Vec dot(const Input* query, const Weight* key, int size) {
    Vec result{};
    int i = 0;
    for (; i + 2 * WIDTH <= size; i += 2 * WIDTH) {
      const IVec pairs = load_words(key + i);
      const Vec a = load(query + i), b = load(query + i + WIDTH);
      result += even(a, b) * low_half(pairs);
      result += odd(a, b) * high_half(pairs);
    }
    for (; i < size; ++i) result[i % WIDTH] += query[i] * widen(key[i]);
    return result;
  }
  static Vec even(Vec a, Vec b) {
    IVec pick;
    for (int i = 0; i < WIDTH; ++i) pick[i] = 2 * i;
    return __builtin_shuffle(a, b, pick);
  }
  static Vec odd(Vec a, Vec b) {
    IVec pick;
    for (int i = 0; i < WIDTH; ++i) pick[i] = 2 * i + 1;
    return __builtin_shuffle(a, b, pick);
  }
};

#ifdef DOT_BF16
struct BFloat16Dot : BFloat16 {  // bfloat16 weights and inputs, products by vdpbf16ps
  using Input = std::uint16_t;
  static constexpr Type kInputs = Type::kBFloat16;
  static Input from_float(float value) { return narrow(value); }

  template <int rows, int tiles>
  static void multiply(const Input* input, std::size_t stride, const Weight* tile, int inputs,
                       Vec (&sums)[tiles][rows][kVectors]) {
    const auto add = [](Vec& sum, __m512bh x, __m512bh weight) {
      sum = reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), x, weight));
    };
    for (int i = 0; i < inputs; i += 2, tile += 2 * kTile) {
      for (int t = 0; t < tiles; ++t) {
        const Weight* at = tile + t * inputs * kTile;
        if (rows <= 4) {
          __builtin_prefetch(at + 1024);
          __builtin_prefetch(at + 1056);
        }
        const auto first = reinterpret_cast<__m512bh>(load_words(at));
        const auto second = reinterpret_cast<__m512bh>(load_words(at + kTile));
        for (int r = 0; r < rows; ++r) {
          std::int32_t pair;
          std::memcpy(&pair, input + static_cast<std::size_t>(r) * stride + i, 4);
          const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
          add(sums[t][r][0], x, first);
          add(sums[t][r][1], x, second);
        }
      }
    }
  }
  static Vec dot(const Input* query, const Weight* key, int size) {
    __m512 result = _mm512_setzero_ps();
    int i = 0;
    for (; i + 32 <= size; i += 32) {
      result = _mm512_dpbf16_ps(result, reinterpret_cast<__m512bh>(load_words(query + i)),
                                reinterpret_cast<__m512bh>(load_words(key + i)));
    }
    Vec wide = reinterpret_cast<Vec>(result);
    for (; i < size; ++i) wide[i % WIDTH] += widen(query[i]) * widen(key[i]);
    return wide;
  }
};
#endif

// ---- products

template <class T, int rows, int tiles>
void multiply_rows(const typename T::Input* input, std::size_t stride, const typename T::Weight* tile, int inputs,
                   float* out, std::size_t out_stride, bool accumulate) {
  Vec sums[tiles][rows][kVectors];
  const auto at = [&](int t, int r, int v) {
    return out + static_cast<std::size_t>(r) * out_stride + t * kTile + v * WIDTH;
  };
  for (int t = 0; t < tiles; ++t) {
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < kVectors; ++v) sums[t][r][v] = accumulate ? load(at(t, r, v)) : Vec{};
    }
  }
  T::template multiply<rows, tiles>(input, stride, tile, inputs, sums);
  for (int t = 0; t < tiles; ++t) {
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < kVectors; ++v) store(at(t, r, v), sums[t][r][v]);
    }
  }
}

template <class T, int rows>
void multiply_rest(int count, const typename T::Input* input, std::size_t stride, const typename T::Weight* tile,
                   int inputs, float* out, std::size_t out_stride, bool accumulate) {
  if constexpr (rows > 0) {
    if (count == rows) {
      return multiply_rows<T, rows, 1>(input, stride, tile, inputs, out, out_stride, accumulate);
    }
    multiply_rest<T, rows - 1>(count, input, stride, tile, inputs, out, out_stride, accumulate);
  }
}

template <class T>
void multiply(const void* input, std::size_t stride, int rows, const void* tile, int tiles, int inputs, float* out,
              std::size_t out_stride, bool accumulate) {
  const auto* weight = static_cast<const typename T::Weight*>(tile);
  const std::size_t tile_size = static_cast<std::size_t>(inputs) * kTile;
  int t = 0;
  if (rows == 1) {  // a sum waits for the one before it, so several tiles are read at once
    for (; t + FEW_ROWS_TILES <= tiles; t += FEW_ROWS_TILES, weight += FEW_ROWS_TILES * tile_size) {
      multiply_rows<T, 1, FEW_ROWS_TILES>(static_cast<const typename T::Input*>(input), stride, weight, inputs,
                                          out + t * kTile, out_stride, accumulate);
    }
  }
  for (; t < tiles; ++t, weight += tile_size) {
    const auto* from = static_cast<const typename T::Input*>(input);
    float* to = out + t * kTile;
    int left = rows;
    for (; left >= ROWS; left -= ROWS, from += ROWS * stride, to += ROWS * out_stride) {
      multiply_rows<T, ROWS, 1>(from, stride, weight, inputs, to, out_stride, accumulate);
    }
    multiply_rest<T, ROWS - 1>(left, from, stride, weight, inputs, to, out_stride, accumulate);
  }
}

template <class T>
void pack(const void* source, std::size_t stride, int outputs, int inputs, void* packed) {
  using Weight = typename T::Weight;
  auto* from = static_cast<const Weight*>(source);
  auto* to = static_cast<Weight*>(packed);
  const int wide = padded(inputs, T::kStep);
  for (int tile = 0; tile < outputs; tile += kTile) {
    for (int i = 0; i < wide; i += T::kStep) {
      for (int j = 0; j < kTile; ++j) {
        for (int k = 0; k < T::kStep; ++k) {
          const bool has = tile + j < outputs && i + k < inputs;
          *to++ = has ? from[static_cast<std::size_t>(tile + j) * stride + static_cast<std::size_t>(i + k)] : Weight{};
        }
      }
    }
  }
}

// ---- numbers of a row

template <class T>
void to_input(const float* from, const float* by, int count, void* to) {
  auto* out = static_cast<typename T::Input*>(to);
  int i = 0;
#ifdef DOT_BF16
  if constexpr (T::kInputs == Type::kBFloat16) {
    for (; i + WIDTH <= count; i += WIDTH) {
      const Vec value = by == nullptr ? load(from + i) : load(from + i) * load(by + i);
      const __m256bh narrowed = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(value));
      std::memcpy(out + i, &narrowed, 2 * WIDTH);
    }
  }
#endif
  for (; i < count; ++i) out[i] = T::from_float(by == nullptr ? from[i] : from[i] * by[i]);
  if (count % 2 != 0) out[count] = T::from_float(0.f);
}

template <class T>
void to_weight(const float* from, int count, void* to) {
  auto* out = static_cast<typename T::Weight*>(to);
  for (int i = 0; i < count; ++i) {
    if constexpr (T::kWeights == Type::kFloat32)
      out[i] = from[i];
    else
      out[i] = narrow(from[i]);
  }
}

template <class T>
void from_weight(const void* from, int count, float* to) {
  auto* in = static_cast<const typename T::Weight*>(from);
  for (int i = 0; i < count; ++i) to[i] = T::to_float(in[i]);
}

inline void gate(float* gates, const float* ups, int count, bool gelu) {
  for (int i = 0; i < count; i += WIDTH) {  // rows of tiles: `count` is a multiple of kTile
    const Vec x = load(gates + i);
    Vec shape = x;
    if (gelu) shape = 2.f * 0.7978845608f * (x + 0.044715f * x * x * x);  // x sigmoid(2 y) is x (1 + tanh y) / 2
    store(gates + i, x / (1.f + exponential(-shape)) * load(ups + i));
  }
}

inline void rotate(float* heads, int count, int size, const float* cos, const float* sin) {
  const int half = size / 2;
  for (int head = 0; head < count; ++head, heads += size) {
    for (int i = 0; i < half; ++i) {
      const float a = heads[i], b = heads[half + i];
      heads[i] = a * cos[i] - b * sin[i];
      heads[half + i] = b * cos[half + i] + a * sin[half + i];
    }
  }
}

// values[i] = values[i] * scale + bias[i]
inline void scale_row(float* values, float scale, const float* bias, int count) {
  int i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    store(values + i, bias == nullptr ? load(values + i) * scale : load(values + i) * scale + load(bias + i));
  }
  for (; i < count; ++i) values[i] = values[i] * scale + (bias == nullptr ? 0.f : bias[i]);
}

// to[i] += from[i] (+ bias[i])
inline void add_row(float* to, const float* from, const float* bias, int count) {
  int i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    Vec value = load(to + i) + load(from + i);
    if (bias != nullptr) value += load(bias + i);
    store(to + i, value);
  }
  for (; i < count; ++i) to[i] += from[i] + (bias == nullptr ? 0.f : bias[i]);
}

inline float sum_of_squares(const float* from, int count) {
  Vec total{};
  int i = 0;
  for (; i + WIDTH <= count; i += WIDTH) total += load(from + i) * load(from + i);
  float result = sum(total);
  for (; i < count; ++i) result += from[i] * from[i];
  return result;
}

// ---- attention

// From so many query rows on, keys are packed as weights are, and multiplied in the same way.
constexpr int kManyRows = 16;
constexpr int kRound = 128;  // keys in a round of many rows

inline std::size_t aligned_to_64(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

inline std::size_t attend_bytes(int rows, int head_size) {
  const auto r = static_cast<std::size_t>(rows);
  const auto d = static_cast<std::size_t>(padded(head_size, kTile));
  if (rows < kManyRows) return aligned_to_64(r * (kSplit + kTile) * 4) + aligned_to_64(r * d * 4);
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
  const int first = std::max(task.begin, first_seen(task, 0)),
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
  const int rows = task.tokens * task.share;
  if (rows < kManyRows)
    attend_few<T>(task, out, max, sums, scratch);
  else
    attend_many<T>(task, out, max, sums, scratch);
}

template <class T>
const Kernels* kernels_of(const char* name) {
  static const Kernels found = {name,         T::kWeights,  T::kInputs,     multiply<T>, pack<T>,
                                to_input<T>,  to_weight<T>, from_weight<T>, gate,        attend<T>,
                                attend_bytes, rotate,       scale_row,      add_row,     sum_of_squares};
  return &found;
}

}  // namespace sage::cpu::NAMESPACE
