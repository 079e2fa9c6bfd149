// Products with packed weights, and work on the numbers of a row. For `kernels_impl.h` alone, which says what it is
// compiled for.
#pragma once

#include "matrix_unit_impl.h"

namespace sage::cpu::NAMESPACE {

constexpr int kFewRowsTiles = 2;  // read at once for a single row
constexpr int kPartInputs = 256;  // of a tile that is multiplied part by part

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

template <class T, int rows>
void multiply_parts(int count, const typename T::Input* input, std::size_t stride, const typename T::Weight* tile, int inputs,
                    float* out, std::size_t out_stride, bool accumulate) {
  if constexpr (rows > 1) {
    if (count < rows) return multiply_parts<T, rows - 1>(count, input, stride, tile, inputs, out, out_stride, accumulate);
  }
  constexpr int kPart = T::kPartVectors;
  const auto at = [&](int r, int v) { return out + static_cast<std::size_t>(r) * out_stride + v * WIDTH; };
  for (int first = 0; first < kVectors; first += kPart, tile += kPart * WIDTH * T::kStep) {
    Vec sums[rows][kPart];
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < kPart; ++v) sums[r][v] = accumulate ? load(at(r, first + v)) : Vec{};
    }
    T::template multiply_part<rows>(input, stride, tile, inputs, sums);
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < kPart; ++v) store(at(r, first + v), sums[r][v]);
    }
  }
}

template <class T>
constexpr int most_rows() {  // that are multiplied at once
  return T::kPartRows > 0 ? T::kPartRows : ROWS;
}

// Up to most_rows() rows times a tile.
template <class T>
void multiply_at_once(int count, const typename T::Input* input, std::size_t stride, const typename T::Weight* tile, int inputs,
                      float* out, std::size_t out_stride, bool accumulate) {
  if constexpr (T::kPartRows > 0) {
    if (count > ROWS) {
      return multiply_parts<T, T::kPartRows>(count, input, stride, tile, inputs, out, out_stride, accumulate);
    }
  }
  multiply_rest<T, ROWS>(count, input, stride, tile, inputs, out, out_stride, accumulate);
}

template <class T>
void multiply(const void* input, std::size_t stride, int rows, const void* tile, int tiles, int inputs, float* out,
              std::size_t out_stride, bool accumulate) {
  const auto* weight = static_cast<const typename T::Weight*>(tile);
  const std::size_t tile_size = static_cast<std::size_t>(inputs) * kTile;
  int t = 0;
  if (rows == 1) {  // a sum waits for the one before it, so several tiles are read at once
    for (; t + kFewRowsTiles <= tiles; t += kFewRowsTiles, weight += kFewRowsTiles * tile_size) {
      multiply_rows<T, 1, kFewRowsTiles>(static_cast<const typename T::Input*>(input), stride, weight, inputs,
                                         out + t * kTile, out_stride, accumulate);
    }
  }
  const auto* from = static_cast<const typename T::Input*>(input);
  // Parts of a tile, and the inputs of some rows, stay in the first cache.
  const int most = T::kPartRows > 0 && rows > ROWS ? kPartInputs : std::max(inputs, 1);
  for (; t < tiles; ++t, weight += tile_size) {
    for (int i = 0; i < inputs; i += most) {
      for (int row = 0; row < rows; row += most_rows<T>()) {
        const auto at = static_cast<std::size_t>(row);
        multiply_at_once<T>(std::min(most_rows<T>(), rows - row), from + at * stride + i, stride, weight + i * kTile,
                            std::min(most, inputs - i), out + at * out_stride + t * kTile, out_stride, accumulate || i > 0);
      }
    }
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

inline float largest(const float* from, int count) {
  Vec top = broadcast(-std::numeric_limits<float>::infinity());
  int i = 0;
  for (; i + WIDTH <= count; i += WIDTH) top = larger(top, load(from + i));
  float result = maximum(top);
  for (; i < count; ++i) result = std::max(result, from[i]);
  return result;
}

inline float sum_of_powers(const float* from, int count, float top) {
  Vec total{};
  int i = 0;
  for (; i + WIDTH <= count; i += WIDTH) total += exponential(load(from + i) - top);
  float result = sum(total);
  for (; i < count; ++i) result += std::exp(from[i] - top);
  return result;
}

}  // namespace sage::cpu::NAMESPACE
