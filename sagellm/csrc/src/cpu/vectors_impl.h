// Vectors of WIDTH floats, and the types of weights and inputs. For `kernels_impl.h` alone, which says what it is
// compiled for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.h"

#ifdef DOT_BF16
#include <immintrin.h>
#endif

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

// A constant vector of at(0), at(1), ...: which numbers a shuffle takes.
template <class F, int... i>
inline IVec indices_of(F at, std::integer_sequence<int, i...>) {
  return IVec{at(i)...};
}
template <class F>
inline IVec indices(F at) {
  return indices_of(at, std::make_integer_sequence<int, WIDTH>{});
}

// Halves are joined until one number is left.
template <int half = WIDTH / 2, class F>
inline float reduce(Vec value, F join) {
  const Vec joined = join(value, __builtin_shuffle(value, indices([](int i) { return i ^ half; })));
  if constexpr (half == 1)
    return joined[0];
  else
    return reduce<half / 2>(joined, join);
}
inline float sum(Vec value) {
  return reduce(value, [](Vec a, Vec b) { return a + b; });
}
inline float maximum(Vec value) { return reduce(value, larger); }

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

// Vectors a and b in turn become runs of a and b in turn.
template <int run>
void interleave(float* numbers, int count) {
  for (int n = 0; n < count; n += 2 * WIDTH) {
    const Vec a = load(numbers + n), b = load(numbers + n + WIDTH);
    const IVec low = indices([](int i) { return i / (2 * run) * run + i % run + i / run % 2 * WIDTH; });
    store(numbers + n, __builtin_shuffle(a, b, low));
    store(numbers + n + WIDTH, __builtin_shuffle(a, b, low + WIDTH / 2));
  }
}

// ---- types of weights and inputs

struct Float32 {  // float32 weights
  using Weight = float;
  using Input = float;
  static constexpr Type kWeights = Type::kFloat32, kInputs = Type::kFloat32;
  static constexpr int kStep = 1;  // inputs in a row of a tile
  static constexpr int kPartRows = 0;  // see `BFloat16`
  static float to_float(Weight value) { return value; }
  static Input from_float(float value) { return value; }

  template <int rows, int tiles>
  static void multiply(const Input* input, std::size_t stride, const Weight* tile, int inputs,
                       Vec (&sums)[tiles][rows][kVectors]) {
    for (int i = 0; i < inputs; ++i, tile += kTile) {
      for (int t = 0; t < tiles; ++t) {
        const Weight* at = tile + t * inputs * kTile;
        Vec weight[kVectors];
        for (int v = 0; v < kVectors; ++v) weight[v] = load(at + v * WIDTH);
        for (int r = 0; r < rows; ++r) {
          const Vec x = broadcast(input[static_cast<std::size_t>(r) * stride + static_cast<std::size_t>(i)]);
          for (int v = 0; v < kVectors; ++v) sums[t][r][v] += x * weight[v];
        }
      }
    }
  }

  // Attention. A query's numbers are brought into the order in which `dots` meets a key's.
  static void arrange(const Input* query, int size, Input* to) { std::copy_n(query, size, to); }
  // sums[r][k]: query r times key k, as a vector that is still to be added up.
  static constexpr int kKeysAtOnce = 1;
  template <int rows, int num_keys>
  static void dots(const Input* const (&queries)[rows], const Weight* const (&keys)[num_keys], int size,
                   Vec (&sums)[rows][num_keys]) {
    int i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
      for (int k = 0; k < num_keys; ++k) {
        const Vec numbers = load(keys[k] + i);
        for (int r = 0; r < rows; ++r) sums[r][k] += load(queries[r] + i) * numbers;
      }
    }
    for (; i < size; ++i) {
      for (int k = 0; k < num_keys; ++k) {
        for (int r = 0; r < rows; ++r) sums[r][k][0] += queries[r][i] * keys[k][i];
      }
    }
  }
  // sums[r] += weights[r] . values of kNumbers numbers of `count` tokens, in an order that `in_order` undoes.
  static constexpr int kNumbers = 4 * WIDTH;
  template <int rows>
  static void add_values(const Input* weights, std::size_t wide, int count, const Weight* value, std::size_t stride,
                         Vec (&sums)[rows][4]) {
    for (int i = 0; i < count; ++i, value += stride) {
      Vec numbers[4];
      for (int v = 0; v < 4; ++v) numbers[v] = load(value + v * WIDTH);
      for (int r = 0; r < rows; ++r) {
        const Vec weight = broadcast(weights[static_cast<std::size_t>(r) * wide + static_cast<std::size_t>(i)]);
        for (int v = 0; v < 4; ++v) sums[r][v] += weight * numbers[v];
      }
    }
  }
  static void in_order(float*) {}
};

struct BFloat16 {  // bfloat16 weights, float32 inputs
  using Weight = std::uint16_t;
  using Input = float;
  static constexpr Type kWeights = Type::kBFloat16, kInputs = Type::kFloat32;
  static constexpr int kStep = 2;
  static float to_float(Weight value) { return widen(value); }
  static float to_float(float value) { return value; }
  static Input from_float(float value) { return value; }

  template <int rows, int tiles>
  static void multiply(const Input* input, std::size_t stride, const Weight* tile, int inputs,
                       Vec (&sums)[tiles][rows][kVectors]) {
    for (int i = 0; i < inputs; i += 2, tile += 2 * kTile) {
      for (int t = 0; t < tiles; ++t) {
        const Weight* at = tile + t * inputs * kTile;
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

#if defined(__AVX2__) && !defined(__AVX512F__)
  // The sums of a whole tile and its widened weights need more registers than there are, so more than ROWS rows, up to kPartRows,
  // are multiplied with kPartVectors vectors of it: those from `tile` on.
  static constexpr int kPartRows = 6, kPartVectors = 2;
  template <int rows>
  static void multiply_part(const Input* input, std::size_t stride, const Weight* tile, int inputs,
                            Vec (&sums)[rows][kPartVectors]) {
    for (int i = 0; i < inputs; i += 2, tile += 2 * kTile) {
      __builtin_prefetch(tile + 2 * kPartVectors * WIDTH);  // of the next part: memory is read in one run
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Vec weight[kPartVectors];
        for (int v = 0; v < kPartVectors; ++v) {
          IVec pairs = load_words(tile + 2 * v * WIDTH);
          if (half == 1) {
            pairs >>= 16;
            asm("" : "+x"(pairs));  // or else a mask takes one of the 16 registers
          }
          weight[v] = low_half(pairs);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          const Vec x = broadcast(input[static_cast<std::size_t>(r) * stride + static_cast<std::size_t>(i + half)]);
          for (int v = 0; v < kPartVectors; ++v) sums[r][v] += x * weight[v];
        }
        asm volatile("" ::: "memory");  // the pairs are loaded again, or else they take two
      }
    }
  }
#else
  static constexpr int kPartRows = 0;
#endif

  // Even numbers of 2 * WIDTH first, then the odd ones: the order in which pairs of bfloat16 are widened.
  static void arrange(const Input* query, int size, Input* to) {
    int i = 0;
    for (; i + 2 * WIDTH <= size; i += 2 * WIDTH) {
      const Vec a = load(query + i), b = load(query + i + WIDTH);
      const IVec even = indices([](int k) { return 2 * k; });
      store(to + i, __builtin_shuffle(a, b, even));
      store(to + i + WIDTH, __builtin_shuffle(a, b, even + 1));
    }
    std::copy_n(query + i, size - i, to + i);
  }
  // A query is read once for two keys: with AVX2 it does not fit into registers.
  static constexpr int kKeysAtOnce = WIDTH == 8 ? 2 : 1;
  template <int rows, int num_keys>
  static void dots(const Input* const (&queries)[rows], const Weight* const (&keys)[num_keys], int size,
                   Vec (&sums)[rows][num_keys]) {
    int i = 0;
    for (; i + 2 * WIDTH <= size; i += 2 * WIDTH) {
      Vec even[num_keys], odd[num_keys];
      for (int k = 0; k < num_keys; ++k) {
        const IVec pairs = load_words(keys[k] + i);
        even[k] = low_half(pairs);
        odd[k] = high_half(pairs);
      }
      for (int r = 0; r < rows; ++r) {
        const Vec first = load(queries[r] + i), second = load(queries[r] + i + WIDTH);
        for (int k = 0; k < num_keys; ++k) {
          sums[r][k] += first * even[k];
          sums[r][k] += second * odd[k];
        }
      }
    }
    for (; i < size; ++i) {
      for (int k = 0; k < num_keys; ++k) {
        for (int r = 0; r < rows; ++r) sums[r][k][i % WIDTH] += queries[r][i] * widen(keys[k][i]);
      }
    }
  }
  static constexpr int kNumbers = 4 * WIDTH;
  template <int rows>
  static void add_values(const Input* weights, std::size_t wide, int count, const Weight* value, std::size_t stride,
                         Vec (&sums)[rows][4]) {
    for (int i = 0; i < count; ++i, value += stride) {
      for (int v = 0; v < 4; v += 2) {
        const IVec pairs = load_words(value + v * WIDTH);
        const Vec even = low_half(pairs), odd = high_half(pairs);
        for (int r = 0; r < rows; ++r) {
          const Vec weight = broadcast(weights[static_cast<std::size_t>(r) * wide + static_cast<std::size_t>(i)]);
          sums[r][v] += weight * even;
          sums[r][v + 1] += weight * odd;
        }
      }
    }
  }
  static void in_order(float* numbers) { interleave<1>(numbers, kNumbers); }
};

#ifdef DOT_BF16
struct BFloat16Dot : BFloat16 {  // bfloat16 weights and inputs, products by vdpbf16ps
  using Input = std::uint16_t;
  static constexpr Type kInputs = Type::kBFloat16;
  static Input from_float(float value) { return narrow(value); }
  static void add(Vec& sum, __m512bh a, __m512bh b) {
    sum = reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), a, b));
  }

  template <int rows, int tiles>
  static void multiply(const Input* input, std::size_t stride, const Weight* tile, int inputs,
                       Vec (&sums)[tiles][rows][kVectors]) {
    for (int i = 0; i < inputs; i += 2, tile += 2 * kTile) {
      for (int t = 0; t < tiles; ++t) {
        const Weight* at = tile + t * inputs * kTile;
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

  static void arrange(const Input* query, int size, Input* to) { std::copy_n(query, size, to); }
  template <int rows, int num_keys>
  static void dots(const Input* const (&queries)[rows], const Weight* const (&keys)[num_keys], int size,
                   Vec (&sums)[rows][num_keys]) {
    int i = 0;
    for (; i + 2 * WIDTH <= size; i += 2 * WIDTH) {
      for (int k = 0; k < num_keys; ++k) {
        const auto numbers = reinterpret_cast<__m512bh>(load_words(keys[k] + i));
        for (int r = 0; r < rows; ++r) add(sums[r][k], reinterpret_cast<__m512bh>(load_words(queries[r] + i)), numbers);
      }
    }
    for (; i < size; ++i) {
      for (int k = 0; k < num_keys; ++k) {
        for (int r = 0; r < rows; ++r) sums[r][k][i % WIDTH] += widen(queries[r][i]) * widen(keys[k][i]);
      }
    }
  }
  // Two tokens at a time, number by number. The weight of a token beyond the last one is 0.
  template <int rows>
  static void add_values(const Input* weights, std::size_t wide, int count, const Weight* value, std::size_t stride,
                         Vec (&sums)[rows][4]) {
    for (int i = 0; i < count; i += 2, value += 2 * stride) {
      const Weight* next = i + 1 < count ? value + stride : value;
      __m512bh pairs[4];
      for (int v = 0; v < 4; v += 2) {
        const auto a = reinterpret_cast<__m512i>(load_words(value + v * WIDTH)),
                   b = reinterpret_cast<__m512i>(load_words(next + v * WIDTH));
        pairs[v] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
        pairs[v + 1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
      }
      for (int r = 0; r < rows; ++r) {
        std::int32_t pair;
        std::memcpy(&pair, weights + static_cast<std::size_t>(r) * wide + i, 4);
        const auto weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        for (int v = 0; v < 4; ++v) add(sums[r][v], weight, pairs[v]);
      }
    }
  }
  // `unpacklo` takes the first 4 of 8 numbers, `unpackhi` the others.
  static void in_order(float* numbers) { interleave<4>(numbers, kNumbers); }
};
#endif

}  // namespace sage::cpu::NAMESPACE
