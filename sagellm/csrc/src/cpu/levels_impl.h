// Products with weights of few bits. For `kernels_impl.h` alone, which says what it is compiled for.
//
// A weight is scale * level + offset, with one scale and one offset for a block of inputs. Levels are small whole
// numbers, which every input type holds exactly. So a block's sum of inputs times levels is that of a plain product,
// and scales come last.
#pragma once

#include <vector>

#include "products_impl.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace sage::cpu::NAMESPACE {

constexpr int kFusedRows = 4;  // rows for which levels are decoded as they are multiplied, not into a tile first

inline Vec from_halves(const std::uint16_t* from) {
#ifdef __AVX512F__
  __m256i halves;
  std::memcpy(&halves, from, sizeof(halves));
  return reinterpret_cast<Vec>(_mm512_maskz_cvtph_ps(0xffff, halves));  // the plain one warns in GCC 12
#else
  IVec bits;
  for (int i = 0; i < WIDTH; ++i) bits[i] = from[i];
  const Vec size = as_float((bits & 0x7fff) << 13) * 0x1p112f;  // the exponents begin 112 apart
  return as_float(as_bits(size) | ((bits & 0x8000) << 16));
#endif
}

// Number `at` of the levels in each lane's word: 8 of 4 bits, adjacent ones in different halves of the word, or 4 of 8
// bits.
template <int bits>
Vec level_of(IVec words, int at) {
  if constexpr (bits == 4)
    return __builtin_convertvector((words >> (16 * (at % 2) + 4 * (at / 2))) & 15, Vec);
  else
    return __builtin_convertvector((words << (24 - 8 * at)) >> 24, Vec);
}

#ifdef DOT_BF16
// Two adjacent levels of each lane, as bfloat16.
template <int bits>
__m512bh pair_of(IVec words, int at) {
  if constexpr (bits == 4) {
    // The sixteen levels twice over: the fifth bit of an index belongs to the next level.
    alignas(64) static constexpr std::uint16_t kLevels[32] = {
        0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const auto shifted = _mm512_srli_epi16(reinterpret_cast<__m512i>(words), static_cast<unsigned>(2 * at));
    return reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(shifted, _mm512_load_si512(kLevels)));
  } else {
    const IVec first = as_bits(level_of<bits>(words, at)), second = as_bits(level_of<bits>(words, at + 1));
    return reinterpret_cast<__m512bh>(((first >> 16) & 0xffff) | (second & static_cast<std::int32_t>(0xffff0000)));
  }
}
#endif

// sums[r] = inputs of row r times the levels of a block, in the order of T::multiply.
template <class T, int bits, int rows>
void multiply_block(const typename T::Input* input, std::size_t stride, const char* words, int block,
                    Vec (&sums)[rows][kVectors]) {
  constexpr int kLevels = 32 / bits;  // of a word
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Vec{};
  }
  for (int i = 0; i < block; i += kLevels, words += kTile * 4) {
    for (int v = 0; v < kVectors; ++v) {
      const IVec lanes = load_words(words + v * WIDTH * 4);
      for (int at = 0; at < kLevels; at += 2) {
#ifdef DOT_BF16
        if constexpr (T::kInputs == Type::kBFloat16) {
          const __m512bh weight = pair_of<bits>(lanes, at);
          for (int r = 0; r < rows; ++r) {
            std::int32_t pair;
            std::memcpy(&pair, input + static_cast<std::size_t>(r) * stride + i + at, 4);
            sums[r][v] = reinterpret_cast<Vec>(_mm512_dpbf16_ps(
                reinterpret_cast<__m512>(sums[r][v]), reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)), weight));
          }
          continue;
        }
#endif
        if constexpr (T::kInputs == Type::kFloat32) {
          const Vec first = level_of<bits>(lanes, at), second = level_of<bits>(lanes, at + 1);
          for (int r = 0; r < rows; ++r) {
            const float* x = input + static_cast<std::size_t>(r) * stride + i + at;
            sums[r][v] += x[0] * first;
            sums[r][v] += x[1] * second;
          }
        }
      }
    }
  }
}

// The levels of a block as a tile of the plain kernels.
template <class T, int bits>
void expand_block(const char* words, int block, typename T::Weight* tile) {
  constexpr int kLevels = 32 / bits;
  for (int i = 0; i < block; i += kLevels, words += kTile * 4) {
    for (int v = 0; v < kVectors; ++v) {
      const IVec lanes = load_words(words + v * WIDTH * 4);
      for (int at = 0; at < kLevels; at += 2) {
        auto* to = tile + (i + at) * kTile + v * WIDTH * T::kStep;
#ifdef DOT_BF16
        if constexpr (T::kInputs == Type::kBFloat16) {
          const __m512bh pair = pair_of<bits>(lanes, at);
          std::memcpy(to, &pair, sizeof(pair));
          continue;
        }
#endif
        const Vec first = level_of<bits>(lanes, at), second = level_of<bits>(lanes, at + 1);
        if constexpr (T::kWeights == Type::kFloat32) {
          store(to, first);
          store(to + kTile, second);
        } else {
          const IVec pair =
              ((as_bits(first) >> 16) & 0xffff) | (as_bits(second) & static_cast<std::int32_t>(0xffff0000));
          std::memcpy(to, &pair, sizeof(pair));
        }
      }
    }
  }
}

template <class T>
float sum_of_inputs(const typename T::Input* input, int count) {
  float total = 0;
  if constexpr (T::kInputs == Type::kBFloat16) {
    Vec even{}, odd{};
    int i = 0;
    for (; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
      const IVec pairs = load_words(input + i);
      even += low_half(pairs);
      odd += high_half(pairs);
    }
    total = sum(even + odd);
    for (; i < count; ++i) total += widen(input[i]);
  } else {
    Vec all{};
    for (int i = 0; i < count; i += WIDTH) all += load(input + i);  // a block is a multiple of WIDTH
    total = sum(all);
  }
  return total;
}

// One block's part of the result: the same words for every number of rows, so that they round alike.
inline void add_block(float* to, Vec sum, Vec scale, Vec offset, float inputs) {
  store(to, load(to) + scale * sum + offset * inputs);
}

template <class T, int bits, int rows>
void multiply_few_levels(int count, const typename T::Input* input, std::size_t stride, const char* tile, int tiles,
                         int blocks, int block, const float* of_inputs, float* out, std::size_t out_stride) {
  if constexpr (rows > 1) {
    if (count < rows) {
      return multiply_few_levels<T, bits, rows - 1>(count, input, stride, tile, tiles, blocks, block, of_inputs, out,
                                                    out_stride);
    }
  }
  const auto block_bytes = static_cast<std::size_t>(kTile) * static_cast<std::size_t>(4 + block * bits / 8);
  for (int t = 0; t < tiles; ++t) {
    for (int b = 0; b < blocks; ++b, tile += block_bytes) {
      for (std::size_t at = 0; at < block_bytes; at += 64) __builtin_prefetch(tile + 4096 + at);
      const auto* scales = reinterpret_cast<const std::uint16_t*>(tile);
      Vec sums[rows][kVectors];
      multiply_block<T, bits, rows>(input + b * block, stride, tile + kTile * 4, block, sums);
      for (int v = 0; v < kVectors; ++v) {
        const Vec scale = from_halves(scales + v * WIDTH), offset = from_halves(scales + kTile + v * WIDTH);
        for (int r = 0; r < rows; ++r) {
          add_block(out + static_cast<std::size_t>(r) * out_stride + t * kTile + v * WIDTH, sums[r][v], scale, offset,
                    of_inputs[r * blocks + b]);
        }
      }
    }
  }
}

template <class T, int bits>
void multiply_many_levels(const typename T::Input* input, std::size_t stride, int rows, const char* tile, int tiles,
                          int blocks, int block, const float* of_inputs, float* out, std::size_t out_stride) {
  const auto block_bytes = static_cast<std::size_t>(kTile) * static_cast<std::size_t>(4 + block * bits / 8);
  alignas(64) typename T::Weight levels[kMaxBlock * kTile];
  alignas(64) float sums[ROWS * kTile];
  for (int t = 0; t < tiles; ++t, out += kTile) {
    for (int b = 0; b < blocks; ++b, tile += block_bytes) {
      const auto* scales = reinterpret_cast<const std::uint16_t*>(tile);
      Vec scale[kVectors], offset[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        scale[v] = from_halves(scales + v * WIDTH);
        offset[v] = from_halves(scales + kTile + v * WIDTH);
      }
      expand_block<T, bits>(tile + kTile * 4, block, levels);
      for (int first = 0; first < rows; first += ROWS) {
        const int count = std::min(ROWS, rows - first);
        const auto* from = input + static_cast<std::size_t>(first) * stride + b * block;
        if (count == ROWS)
          multiply_rows<T, ROWS, 1>(from, stride, levels, block, sums, kTile, false);
        else
          multiply_rest<T, ROWS - 1>(count, from, stride, levels, block, sums, kTile, false);
        for (int r = 0; r < count; ++r) {
          for (int v = 0; v < kVectors; ++v) {
            add_block(out + static_cast<std::size_t>(first + r) * out_stride + v * WIDTH,
                      load(sums + r * kTile + v * WIDTH), scale[v], offset[v], of_inputs[(first + r) * blocks + b]);
          }
        }
      }
    }
  }
}

template <class T, int bits>
void multiply_levels_of(const void* input, std::size_t stride, int rows, const void* tile, int tiles, int inputs,
                        int block, float* out, std::size_t out_stride) {
  static thread_local std::vector<float> of_inputs;
  const int blocks = inputs / block;
  const auto* from = static_cast<const typename T::Input*>(input);
  of_inputs.resize(static_cast<std::size_t>(rows) * static_cast<std::size_t>(blocks));
  for (int r = 0; r < rows; ++r) {
    const auto* row = from + static_cast<std::size_t>(r) * stride;
    for (int b = 0; b < blocks; ++b) {
      of_inputs[static_cast<std::size_t>(r * blocks + b)] = sum_of_inputs<T>(row + b * block, block);
    }
    std::fill_n(out + static_cast<std::size_t>(r) * out_stride, tiles * kTile, 0.f);
  }
  const auto* bytes = static_cast<const char*>(tile);
  if (rows <= kFusedRows) {
    multiply_few_levels<T, bits, kFusedRows>(rows, from, stride, bytes, tiles, blocks, block, of_inputs.data(), out,
                                             out_stride);
  } else {
    multiply_many_levels<T, bits>(from, stride, rows, bytes, tiles, blocks, block, of_inputs.data(), out, out_stride);
  }
}

template <class T>
void multiply_levels(const void* input, std::size_t stride, int rows, const void* tile, int tiles, int inputs, int bits,
                     int block, float* out, std::size_t out_stride) {
  const auto multiply_of = bits == 4 ? multiply_levels_of<T, 4> : multiply_levels_of<T, 8>;
  multiply_of(input, stride, rows, tile, tiles, inputs, block, out, out_stride);
}

}  // namespace sage::cpu::NAMESPACE
