// Products with weights of few bits. For `kernels_impl.h` alone, which says what it is compiled for.
//
// A weight is scale * level + offset, with one scale and one offset for a block of inputs. Levels are small whole
// numbers, or floats of 8 bits, which every input type holds exactly. So a block's sum of inputs times levels is that of a plain product,
// and scales come last.
#pragma once

#include <vector>

#include "products_impl.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace sage::cpu::NAMESPACE {

constexpr int kRunVectors = std::max(1, kLanes / WIDTH);

// Where vector v of a tile begins: a tile is two runs of kLanes outputs each, so that what a thread reads lies in one run.
inline std::size_t place_of(int v, std::size_t run_bytes) {
  return static_cast<std::size_t>(v * WIDTH / kLanes) * run_bytes + static_cast<std::size_t>(v * WIDTH % kLanes * 4);
}

constexpr int bits_of(Format format) { return format == Format::kLevels4 ? 4 : 8; }

constexpr float kLeastFloat8 = 0x1p-9f / (1 << kFloat8Shift);

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
// bits, of which floats of 8 bits lie in different halves too.
template <Format format>
Vec level_of(IVec words, int at) {
  if constexpr (format == Format::kLevels4) {
    return __builtin_convertvector((words >> (16 * (at % 2) + 4 * (at / 2))) & 15, Vec);
  } else if constexpr (format == Format::kLevels8) {
    return __builtin_convertvector((words << (24 - 8 * at)) >> 24, Vec);
  } else {
    const IVec byte = words >> (16 * (at % 2) + 8 * (at / 2)), size = byte & 0x7f;
    const Vec normal = as_float((size << 20) + ((127 - kFloat8Bias - kFloat8Shift) << 23));
    const Vec small = __builtin_convertvector(size, Vec) * kLeastFloat8;
    return as_float(as_bits(size < 8 ? small : normal) | ((byte & 0x80) << 24));
  }
}

#ifdef DOT_BF16
// Two adjacent levels of each lane, as bfloat16.
template <Format format>
__m512bh pair_of(IVec words, int at) {
  if constexpr (format == Format::kLevels4) {
    // The sixteen levels twice over: the fifth bit of an index belongs to the next level.
    alignas(64) static constexpr std::uint16_t kLevels[32] = {
        0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const auto shifted = _mm512_srli_epi16(reinterpret_cast<__m512i>(words), static_cast<unsigned>(2 * at));
    return reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(shifted, _mm512_load_si512(kLevels)));
  } else if constexpr (format == Format::kLevels8) {
    const IVec first = as_bits(level_of<format>(words, at)), second = as_bits(level_of<format>(words, at + 1));
    return reinterpret_cast<__m512bh>(((first >> 16) & 0xffff) | (second & static_cast<std::int32_t>(0xffff0000)));
  } else {
    // m * 2^-9 of the numbers without an exponent, moved as all others.
    alignas(64) static constexpr std::uint16_t kSmall[32] = {0,      0x3700, 0x3780, 0x37c0,
                                                             0x3800, 0x3820, 0x3840, 0x3860};
    const auto bytes = _mm512_srli_epi16(reinterpret_cast<__m512i>(words), static_cast<unsigned>(4 * at));
    const auto size = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
    constexpr short kExponent = (127 - kFloat8Bias - kFloat8Shift) << 7;
    const auto normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(kExponent));
    const auto is_small = _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8));
    const auto number = _mm512_mask_permutexvar_epi16(normal, is_small, size, _mm512_load_si512(kSmall));
    const auto sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
    return reinterpret_cast<__m512bh>(_mm512_or_si512(number, sign));
  }
}
#endif

// sums[r] = inputs of row r times the levels of a block, in the order of T::multiply.
template <class T, Format format, int rows>
void multiply_block(const typename T::Input* input, std::size_t stride, const char* words, int block,
                    Vec (&sums)[rows][kRunVectors]) {
  constexpr int kLevels = 32 / bits_of(format);  // of a word
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kRunVectors; ++v) sums[r][v] = Vec{};
  }
  for (int i = 0; i < block; i += kLevels, words += kLanes * 4) {
    for (int v = 0; v < kRunVectors; ++v) {
      const IVec lanes = load_words(words + v * WIDTH * 4);
      for (int at = 0; at < kLevels; at += 2) {
#ifdef DOT_BF16
        if constexpr (T::kInputs == Type::kBFloat16) {
          const __m512bh weight = pair_of<format>(lanes, at);
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
          const Vec first = level_of<format>(lanes, at), second = level_of<format>(lanes, at + 1);
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
template <class T, Format format>
void expand_block(const char* words, std::size_t run_bytes, int block, typename T::Weight* tile) {
  constexpr int kLevels = 32 / bits_of(format);
  for (int i = 0; i < block; i += kLevels, words += kLanes * 4) {
    for (int v = 0; v < kVectors; ++v) {
      const IVec lanes = load_words(words + place_of(v, run_bytes));
      for (int at = 0; at < kLevels; at += 2) {
        auto* to = tile + (i + at) * kTile + v * WIDTH * T::kStep;
#ifdef DOT_BF16
        if constexpr (T::kInputs == Type::kBFloat16) {
          const __m512bh pair = pair_of<format>(lanes, at);
          std::memcpy(to, &pair, sizeof(pair));
          continue;
        }
#endif
        const Vec first = level_of<format>(lanes, at), second = level_of<format>(lanes, at + 1);
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

// Scales and offsets of a vector's outputs in a block.
struct Scales {
  Vec scale, offset;
};

inline Scales scales_of(const char* tile, int v, std::size_t run_bytes) {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(tile + static_cast<std::size_t>(v * WIDTH / kLanes) * run_bytes);
  return {from_halves(halves + v * WIDTH % kLanes), from_halves(halves + kLanes + v * WIDTH % kLanes)};
}

// One block's part of the result: the same words for every number of rows, so that they round alike.
inline void add_block(float* to, Vec sum, Vec scale, Vec offset, float inputs) {
  store(to, load(to) + scale * sum + offset * inputs);
}

template <class T, Format format, int rows>
void multiply_few_levels(int count, const typename T::Input* input, std::size_t stride, const char* tile, int tiles,
                         int blocks, int block, const float* of_inputs, float* out, std::size_t out_stride) {
  if constexpr (rows > 1) {
    if (count < rows) {
      return multiply_few_levels<T, format, rows - 1>(count, input, stride, tile, tiles, blocks, block, of_inputs, out,
                                                    out_stride);
    }
  }
  const std::size_t block_bytes = bytes_of_block(bits_of(format), block);
  // Run by run: the processor fetches one stream ahead better than two.
  for (int run = 0; run < 2 * tiles; ++run) {
    for (int b = 0; b < blocks; ++b, tile += block_bytes) {
      Vec sums[rows][kRunVectors];
      multiply_block<T, format, rows>(input + b * block, stride, tile + kLanes * 4, block, sums);
      for (int v = 0; v < kRunVectors; ++v) {
        const auto [scale, offset] = scales_of(tile, v, 0);
        for (int r = 0; r < rows; ++r) {
          add_block(out + static_cast<std::size_t>(r) * out_stride + run * kLanes + v * WIDTH, sums[r][v], scale, offset,
                    of_inputs[r * blocks + b]);
        }
      }
    }
  }
}

// `product`: of so many rows, at most `most`, and a tile of levels, into sums [rows][kTile].
template <class T, Format format, int most, class Product>
void multiply_many_levels(const typename T::Input* input, std::size_t stride, int rows, const char* tile, int tiles,
                          int blocks, int block, const float* of_inputs, float* out, std::size_t out_stride, Product product) {
  const std::size_t block_bytes = bytes_of_block(bits_of(format), block), run_bytes = static_cast<std::size_t>(blocks) * block_bytes;
  alignas(64) typename T::Weight levels[kMaxBlock * kTile];
  alignas(64) float sums[most * kTile];
  for (int t = 0; t < tiles; ++t, tile += run_bytes, out += kTile) {
    for (int b = 0; b < blocks; ++b, tile += block_bytes) {
      Scales scales[kVectors];
      for (int v = 0; v < kVectors; ++v) scales[v] = scales_of(tile, v, run_bytes);
      expand_block<T, format>(tile + kLanes * 4, run_bytes, block, levels);
      for (int first = 0; first < rows; first += most) {
        const int count = std::min(most, rows - first);
        product(count, input + static_cast<std::size_t>(first) * stride + b * block, levels, sums);
        for (int r = 0; r < count; ++r) {
          for (int v = 0; v < kVectors; ++v) {
            add_block(out + static_cast<std::size_t>(first + r) * out_stride + v * WIDTH,
                      load(sums + r * kTile + v * WIDTH), scales[v].scale, scales[v].offset,
                      of_inputs[(first + r) * blocks + b]);
          }
        }
      }
    }
  }
}

#ifdef MATRIX_UNIT
template <Format format>
void multiply_levels_in_unit(const std::uint16_t* input, std::size_t stride, int rows, const char* tile, int tiles, int blocks,
                             int block, const float* of_inputs, float* out, std::size_t out_stride) {
  constexpr int kBoth = 2 * kUnitRows;
  const int pairs = block % (2 * kUnitPairs) == 0 ? kUnitPairs : kUnitPairs / 2;
  const auto product = [&](int count, const std::uint16_t* from, const std::uint16_t* levels, float* sums) {
    multiply_in_unit(count, from, stride * 2, levels, block / (2 * pairs), pairs, sums, kTile * 4, false);
  };
  const int whole = rows / kBoth * kBoth;
  for (const auto& [first, count] : {std::pair(0, whole), std::pair(whole, rows - whole)}) {
    if (count == 0) continue;
    const UnitShapes shapes(std::min(kUnitRows, count), std::clamp(count - kUnitRows, 0, kUnitRows), pairs);
    const auto at = static_cast<std::size_t>(first);
    multiply_many_levels<BFloat16Dot, format, kBoth>(input + at * stride, stride, count, tile, tiles, blocks, block,
                                                     of_inputs + first * blocks, out + at * out_stride, out_stride, product);
  }
}
#endif

template <class T, Format format>
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
#ifdef MATRIX_UNIT
  if constexpr (T::kInputs == Type::kBFloat16) {
    return multiply_levels_in_unit<format>(from, stride, rows, bytes, tiles, blocks, block, of_inputs.data(), out, out_stride);
  }
#endif
  if (rows <= kFusedRows) {
    multiply_few_levels<T, format, kFusedRows>(rows, from, stride, bytes, tiles, blocks, block, of_inputs.data(), out,
                                             out_stride);
  } else {
    const auto product = [&](int count, const typename T::Input* input_rows, const typename T::Weight* levels, float* sums) {
      if (count == ROWS)
        multiply_rows<T, ROWS, 1>(input_rows, stride, levels, block, sums, kTile, false);
      else
        multiply_rest<T, ROWS - 1>(count, input_rows, stride, levels, block, sums, kTile, false);
    };
    multiply_many_levels<T, format, ROWS>(from, stride, rows, bytes, tiles, blocks, block, of_inputs.data(), out, out_stride,
                                          product);
  }
}

#ifdef __AVX2__
// ---- inputs of 8 bits
//
// An input is scale * level too, with a scale for each block of a row, so that blocks are multiplied in whole numbers
// (as ggml's Q8_0). An instruction adds up kGroup adjacent products of each lane.

#ifdef __AVX512VNNI__
using Level = std::int8_t;
constexpr int kUnsigned = 128;  // vpdpbusd takes one factor without sign: levels of 8 bits are moved up by so much
inline IVec add_products(IVec total, IVec levels, std::int32_t inputs) {
  return reinterpret_cast<IVec>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(total), reinterpret_cast<__m512i>(levels), _mm512_set1_epi32(inputs)));
}
#else
using Level = std::int16_t;
constexpr int kUnsigned = 0;
inline IVec add_products(IVec total, IVec levels, std::int32_t inputs) {
#ifdef __AVX512BW__
  return total + reinterpret_cast<IVec>(
                     _mm512_madd_epi16(reinterpret_cast<__m512i>(levels), _mm512_set1_epi32(inputs)));
#else
  return total + reinterpret_cast<IVec>(
                     _mm256_madd_epi16(reinterpret_cast<__m256i>(levels), _mm256_set1_epi32(inputs)));
#endif
}
#endif
constexpr int kGroup = 4 / sizeof(Level);

// The levels of each lane's word that instruction `step` of it takes, as they lie in the word.
template <int bits>
IVec levels_of(IVec words, int step) {
  if constexpr (bits == 4) return (words >> (4 * step)) & (kGroup == 4 ? 0x0f0f0f0f : 0x000f000f);
  if constexpr (bits == 8 && kGroup == 4) return words ^ static_cast<std::int32_t>(0x80808080);
  typedef std::int16_t Halves __attribute__((vector_size(WIDTH * 4)));
  const auto halves = reinterpret_cast<Halves>(words);
  return reinterpret_cast<IVec>(step == 0 ? (halves << 8) >> 8 : halves >> 8);
}

// Their numbers among 8 adjacent ones, instruction by instruction.
template <int bits>
constexpr int number_of(int at) {
  constexpr int kFirst4[] = {0, 4, 1, 5, 2, 6, 3, 7}, kFirst2[] = {0, 2, 1, 3, 4, 6, 5, 7};
  if (bits == 4) return kGroup == 4 ? kFirst4[at] : at;
  return kGroup == 4 ? at : kFirst2[at];
}

template <int bits>
struct Order {
  Level at[16]{};
  constexpr Order() {
    for (int i = 0; i < 16; ++i) at[i] = static_cast<Level>(i / 8 * 8 + number_of<bits>(i % 8));
  }
};

// What follows the levels of a rounded block, which are in the order of `number_of`.
struct OfRounded {
  float scale, sum;
};

inline std::size_t bytes_of_rounded(int block) {
  return static_cast<std::size_t>(block) * sizeof(Level) + sizeof(OfRounded);
}

inline std::size_t rounded_bytes(int inputs, int block) {
  return static_cast<std::size_t>(inputs / block) * bytes_of_rounded(block);
}

// WIDTH inputs as floats.
template <class T>
Vec widened(const typename T::Input* input) {
  if constexpr (T::kInputs == Type::kFloat32) {
    return load(input);
  } else {
    typedef std::uint16_t Narrow __attribute__((vector_size(WIDTH * 2)));
    Narrow narrow;
    std::memcpy(&narrow, input, sizeof(narrow));
    return as_float(__builtin_convertvector(narrow, IVec) << 16);
  }
}

template <class T, int bits>
void round_block(const typename T::Input* input, int block, char* to) {
  typedef Level Levels __attribute__((vector_size(WIDTH * sizeof(Level))));
  typedef Level Levels16 __attribute__((vector_size(16 * sizeof(Level))));
  alignas(64) float numbers[kMaxBlock];
  Vec sizes{};
  for (int i = 0; i < block; i += WIDTH) {
    const Vec wide = widened<T>(input + i);
    store(numbers + i, wide);
    sizes = larger(sizes, as_float(as_bits(wide) & 0x7fffffff));
  }
  const float top = maximum(sizes);
  const float by = top > 1e-30f ? 127.f / top : 0.f, scale = by == 0.f ? 0.f : top / 127.f;
  const Vec magic = broadcast(12582912.f);  // puts the nearest whole number into the low bits
  Vec total{};
  alignas(64) Level rounded[kMaxBlock];
  for (int i = 0; i < block; i += WIDTH) {
    const Vec shifted = load(numbers + i) * by + magic;
    const Levels narrow = __builtin_convertvector(as_bits(shifted) - as_bits(magic), Levels);
    std::memcpy(rounded + i, &narrow, sizeof(narrow));
    total += shifted - magic;
  }
  static constexpr Order<bits> kOrder;
  Levels16 all, order;
  std::memcpy(&order, kOrder.at, sizeof(order));
  for (int i = 0; i < block; i += 16) {
    std::memcpy(&all, rounded + i, sizeof(all));
    all = __builtin_shuffle(all, order);
    std::memcpy(to + static_cast<std::size_t>(i) * sizeof(Level), &all, sizeof(all));
  }
  const OfRounded last{scale, sum(total)};
  std::memcpy(to + static_cast<std::size_t>(block) * sizeof(Level), &last, sizeof(last));
}

template <class T>
void round_inputs(const void* input, std::size_t stride, int rows, int inputs, Format format, int block, char* to) {
  const auto* from = static_cast<const typename T::Input*>(input);
  for (int r = 0; r < rows; ++r, from += stride) {
    for (int i = 0; i < inputs; i += block, to += bytes_of_rounded(block)) {
      if (format == Format::kLevels4)
        round_block<T, 4>(from + i, block, to);
      else
        round_block<T, 8>(from + i, block, to);
    }
  }
}

// a * b + c in one rounding, whatever stands around it.
inline Vec fused(Vec a, Vec b, Vec c) {
#ifdef __AVX512F__
  return reinterpret_cast<Vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#else
  return reinterpret_cast<Vec>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#endif
}

// Vectors [first, first + vectors) of a tile, for `rows` rows. Each block's part is added to `out`, in the same words for
// every number of rows, so that they round alike.
template <int bits, int rows, int vectors>
void multiply_whole(const char* rounded, std::size_t row_bytes, const char* tile, int first, int blocks, int block, float* out,
                    std::size_t out_stride) {
  constexpr int kSteps = 32 / bits / kGroup;  // of a word
  const std::size_t block_bytes = bytes_of_block(bits, block), run_bytes = static_cast<std::size_t>(blocks) * block_bytes;
  for (int b = 0; b < blocks; ++b, tile += block_bytes, rounded += bytes_of_rounded(block)) {
    // All loops over rows and vectors are unrolled, or else the sums lie in memory.
    IVec products[rows][vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) products[r][v] = IVec{};
    }
    const auto of_row = [&](int r) {
      OfRounded found;
      std::memcpy(&found, rounded + static_cast<std::size_t>(r) * row_bytes + block * sizeof(Level), sizeof(found));
      return found;
    };
    const char *words = tile + kLanes * 4, *levels = rounded;
    for (int i = 0; i < block; i += 32 / bits, words += kLanes * 4) {
      IVec lanes[vectors];
      for (int v = 0; v < vectors; ++v) lanes[v] = load_words(words + place_of(first + v, run_bytes));
      for (int step = 0; step < kSteps; ++step, levels += 4) {
        IVec of_step[vectors];
        for (int v = 0; v < vectors; ++v) of_step[v] = levels_of<bits>(lanes[v], step);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
          std::int32_t group;
          std::memcpy(&group, levels + static_cast<std::size_t>(r) * row_bytes, 4);
#pragma GCC unroll 4
          for (int v = 0; v < vectors; ++v) products[r][v] = add_products(products[r][v], of_step[v], group);
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      auto [scale, offset] = scales_of(tile, first + v, run_bytes);
      if (bits == 8) offset -= static_cast<float>(kUnsigned) * scale;
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const OfRounded of_input = of_row(r);
        const Vec of_levels = __builtin_convertvector(products[r][v], Vec) * scale;
        const Vec of_block = fused(broadcast(of_input.sum), offset, of_levels);
        float* to = out + static_cast<std::size_t>(r) * out_stride + (first + v) * WIDTH;
        store(to, fused(of_block, broadcast(of_input.scale), b == 0 ? Vec{} : load(to)));
      }
    }
  }
}

template <int bits, int rows>
void multiply_whole_rest(int count, const char* rounded, std::size_t row_bytes, const char* tile, int blocks, int block,
                         float* out, std::size_t out_stride) {
  if constexpr (rows > 1) {
    if (count < rows) {
      return multiply_whole_rest<bits, rows - 1>(count, rounded, row_bytes, tile, blocks, block, out, out_stride);
    }
  }
  // Few rows wait for memory, of which the processor fetches one stream ahead better than two. Many have as many sums as there
  // are registers.
  constexpr int kAtOnce = rows <= 4 ? kRunVectors : WIDTH == 16 ? kVectors : 1;
  for (int v = 0; v < kVectors; v += kAtOnce) {
    multiply_whole<bits, rows, kAtOnce>(rounded, row_bytes, tile, v, blocks, block, out, out_stride);
  }
}

template <int bits>
void multiply_rounded_of(const char* rounded, int rows, const char* tile, int tiles, int inputs, int block, float* out,
                         std::size_t out_stride) {
  const int blocks = inputs / block;
  const std::size_t row_bytes = rounded_bytes(inputs, block);
  for (int t = 0; t < tiles; ++t, out += kTile) {
    for (int first = 0; first < rows; first += ROWS) {
      multiply_whole_rest<bits, ROWS>(rows - first, rounded + static_cast<std::size_t>(first) * row_bytes, row_bytes, tile,
                                      blocks, block, out + static_cast<std::size_t>(first) * out_stride, out_stride);
    }
    tile += 2 * static_cast<std::size_t>(blocks) * bytes_of_block(bits, block);
  }
}

inline void multiply_rounded(const char* rounded, int rows, const void* tile, int tiles, int inputs, Format format, int block,
                             float* out, std::size_t out_stride) {
  const auto multiply_of = format == Format::kLevels4 ? multiply_rounded_of<4> : multiply_rounded_of<8>;
  multiply_of(rounded, rows, static_cast<const char*>(tile), tiles, inputs, block, out, out_stride);
}
#endif

template <class T>
void multiply_levels(const void* input, std::size_t stride, int rows, const void* tile, int tiles, int inputs,
                     Format format, int block, float* out, std::size_t out_stride) {
  const auto multiply_of = format == Format::kLevels4   ? multiply_levels_of<T, Format::kLevels4>
                           : format == Format::kLevels8 ? multiply_levels_of<T, Format::kLevels8>
                                                        : multiply_levels_of<T, Format::kFloat8>;
  multiply_of(input, stride, rows, tile, tiles, inputs, block, out, out_stride);
}

}  // namespace sage::cpu::NAMESPACE
