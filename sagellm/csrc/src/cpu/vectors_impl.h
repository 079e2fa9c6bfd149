// Vectors of WIDTH floats, and the types of weights and inputs. For `kernels_impl.h` alone, which says what it is
// compiled for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

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

}  // namespace sage::cpu::NAMESPACE
