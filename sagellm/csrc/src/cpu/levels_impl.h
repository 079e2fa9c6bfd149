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
                    Vec (&sums)[rows][kVectors]) {
  constexpr int kLevels = 32 / bits_of(format);  // of a word
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Vec{};
  }
  for (int i = 0; i < block; i += kLevels, words += kTile * 4) {
    for (int v = 0; v < kVectors; ++v) {
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
void expand_block(const char* words, int block, typename T::Weight* tile) {
  constexpr int kLevels = 32 / bits_of(format);
  for (int i = 0; i < block; i += kLevels, words += kTile * 4) {
    for (int v = 0; v < kVectors; ++v) {
      const IVec lanes = load_words(words + v * WIDTH * 4);
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
  const auto block_bytes = static_cast<std::size_t>(kTile) * static_cast<std::size_t>(4 + block * bits_of(format) / 8);
  for (int t = 0; t < tiles; ++t) {
    for (int b = 0; b < blocks; ++b, tile += block_bytes) {
      for (std::size_t at = 0; at < block_bytes; at += 64) __builtin_prefetch(tile + 4096 + at);
      const auto* scales = reinterpret_cast<const std::uint16_t*>(tile);
      Vec sums[rows][kVectors];
      multiply_block<T, format, rows>(input + b * block, stride, tile + kTile * 4, block, sums);
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

template <class T, Format format>
void multiply_many_levels(const typename T::Input* input, std::size_t stride, int rows, const char* tile, int tiles,
                          int blocks, int block, const float* of_inputs, float* out, std::size_t out_stride) {
  const auto block_bytes = static_cast<std::size_t>(kTile) * static_cast<std::size_t>(4 + block * bits_of(format) / 8);
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
      expand_block<T, format>(tile + kTile * 4, block, levels);
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
  if (rows <= kFusedRows) {
    multiply_few_levels<T, format, kFusedRows>(rows, from, stride, bytes, tiles, blocks, block, of_inputs.data(), out,
                                             out_stride);
  } else {
    multiply_many_levels<T, format>(from, stride, rows, bytes, tiles, blocks, block, of_inputs.data(), out, out_stride);
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

// Inputs of a chunk's rows in levels.
struct InputLevels {
  std::vector<Level> levels;  // [rows][blocks][block], in the order of `number_of`
  std::vector<float> scales;  // [rows][blocks]
  std::vector<std::int32_t> sums;
};

template <class T, int bits>
void quantize(const typename T::Input* input, int block, Level* levels, float* scale, std::int32_t* sum_of_levels) {
  typedef Level Levels __attribute__((vector_size(WIDTH * sizeof(Level))));
  typedef Level Levels16 __attribute__((vector_size(16 * sizeof(Level))));
  alignas(64) float numbers[kMaxBlock];
  for (int i = 0; i < block; ++i) numbers[i] = T::to_float(input[i]);
  Vec sizes{};
  for (int i = 0; i < block; i += WIDTH) sizes = larger(sizes, as_float(as_bits(load(numbers + i)) & 0x7fffffff));
  const float top = maximum(sizes);
  const float by = top > 1e-30f ? 127.f / top : 0.f;
  *scale = by == 0.f ? 0.f : top / 127.f;
  const Vec magic = broadcast(12582912.f);  // puts the nearest whole number into the low bits
  Vec total{};
  alignas(64) Level rounded[kMaxBlock];
  for (int i = 0; i < block; i += WIDTH) {
    const Vec shifted = load(numbers + i) * by + magic;
    const Levels narrow = __builtin_convertvector(as_bits(shifted) - as_bits(magic), Levels);
    std::memcpy(rounded + i, &narrow, sizeof(narrow));
    total += shifted - magic;
  }
  *sum_of_levels = static_cast<std::int32_t>(sum(total));
  static constexpr Order<bits> kOrder;
  Levels16 all, order;
  std::memcpy(&order, kOrder.at, sizeof(order));
  for (int i = 0; i < block; i += 16) {
    std::memcpy(&all, rounded + i, sizeof(all));
    all = __builtin_shuffle(all, order);
    std::memcpy(levels + i, &all, sizeof(all));
  }
}

// One block's part of a sum: the same words for every number of rows, so that they round alike.
inline Vec add_levels(Vec total, IVec products, Vec scale, Vec offset, float of_inputs, std::int32_t sum) {
  const Vec of_block = __builtin_convertvector(products, Vec) * scale + static_cast<float>(sum) * offset;
  return total + of_block * of_inputs;
}

// Vectors [first, first + vectors) of a tile, for `rows` rows.
template <int bits, int rows, int vectors>
void multiply_whole(const InputLevels& inputs, int first_row, const char* tile, int first, int blocks, int block,
                    float* out, std::size_t out_stride) {
  constexpr int kSteps = 32 / bits / kGroup;  // of a word
  const auto block_bytes = static_cast<std::size_t>(kTile) * static_cast<std::size_t>(4 + block * bits / 8);
  Vec totals[rows][vectors];
  for (auto& row : totals) {
    for (Vec& total : row) total = Vec{};
  }
  for (int b = 0; b < blocks; ++b, tile += block_bytes) {
    const char* words = tile + kTile * 4 + first * WIDTH * 4;
    const Level* of_rows[rows];
    IVec products[rows][vectors];
    for (int r = 0; r < rows; ++r) {
      of_rows[r] = inputs.levels.data() + static_cast<std::size_t>((first_row + r) * blocks + b) * block;
      for (int v = 0; v < vectors; ++v) products[r][v] = IVec{};
    }
    for (int i = 0; i < block; words += kTile * 4) {
      IVec lanes[vectors];
      for (int v = 0; v < vectors; ++v) lanes[v] = load_words(words + v * WIDTH * 4);
      for (int step = 0; step < kSteps; ++step, i += kGroup) {
        for (int v = 0; v < vectors; ++v) {
          const IVec levels = levels_of<bits>(lanes[v], step);
          for (int r = 0; r < rows; ++r) {
            std::int32_t group;
            std::memcpy(&group, of_rows[r] + i, 4);
            products[r][v] = add_products(products[r][v], levels, group);
          }
        }
      }
    }
    const auto* scales = reinterpret_cast<const std::uint16_t*>(tile) + first * WIDTH;
    for (int v = 0; v < vectors; ++v) {
      const Vec scale = from_halves(scales + v * WIDTH), offset = from_halves(scales + kTile + v * WIDTH);
      for (int r = 0; r < rows; ++r) {
        const auto at = static_cast<std::size_t>((first_row + r) * blocks + b);
        const IVec moved = bits == 8 ? products[r][v] - kUnsigned * inputs.sums[at] : products[r][v];
        totals[r][v] = add_levels(totals[r][v], moved, scale, offset, inputs.scales[at], inputs.sums[at]);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) store(out + static_cast<std::size_t>(r) * out_stride + (first + v) * WIDTH, totals[r][v]);
  }
}

template <int bits, int rows>
void multiply_whole_rest(int count, const InputLevels& inputs, int first_row, const char* tile, int blocks, int block,
                         float* out, std::size_t out_stride) {
  if constexpr (rows > 1) {
    if (count < rows) {
      return multiply_whole_rest<bits, rows - 1>(count, inputs, first_row, tile, blocks, block, out, out_stride);
    }
  }
  // Few rows wait for memory, which is read in one run; with many the sums of all vectors do not fit the registers.
  constexpr int kAtOnce = rows * kVectors <= 4 ? kVectors : 1;
  for (int v = 0; v < kVectors; v += kAtOnce) {
    multiply_whole<bits, rows, kAtOnce>(inputs, first_row, tile, v, blocks, block, out, out_stride);
  }
}

template <class T, int bits>
void multiply_in_8_bits(const void* input, std::size_t stride, int rows, const void* tile, int tiles, int num_inputs,
                        int block, float* out, std::size_t out_stride) {
  static thread_local InputLevels inputs;
  const int blocks = num_inputs / block;
  const auto* from = static_cast<const typename T::Input*>(input);
  const auto count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(blocks);
  if (inputs.scales.size() < count) {
    inputs.scales.resize(count);
    inputs.sums.resize(count);
  }
  if (inputs.levels.size() < count * static_cast<std::size_t>(block)) {
    inputs.levels.resize(count * static_cast<std::size_t>(block));
  }
  for (int r = 0; r < rows; ++r) {
    for (int b = 0; b < blocks; ++b) {
      const auto at = static_cast<std::size_t>(r * blocks + b);
      quantize<T, bits>(from + static_cast<std::size_t>(r) * stride + b * block, block,
                        inputs.levels.data() + at * static_cast<std::size_t>(block), &inputs.scales[at], &inputs.sums[at]);
    }
  }
  const auto tile_bytes =
      static_cast<std::size_t>(kTile) * static_cast<std::size_t>(blocks) * static_cast<std::size_t>(4 + block * bits / 8);
  const auto* at = static_cast<const char*>(tile);
  for (int t = 0; t < tiles; ++t, at += tile_bytes, out += kTile) {
    for (int first = 0; first < rows; first += ROWS) {
      multiply_whole_rest<bits, ROWS>(rows - first, inputs, first, at, blocks, block,
                                      out + static_cast<std::size_t>(first) * out_stride, out_stride);
    }
  }
}
#endif

template <class T>
void multiply_levels(const void* input, std::size_t stride, int rows, const void* tile, int tiles, int inputs,
                     Format format, int block, [[maybe_unused]] bool in_8_bits, float* out, std::size_t out_stride) {
  auto multiply_of = format == Format::kLevels4   ? multiply_levels_of<T, Format::kLevels4>
                     : format == Format::kLevels8 ? multiply_levels_of<T, Format::kLevels8>
                                                  : multiply_levels_of<T, Format::kFloat8>;
#ifdef __AVX2__
  if (in_8_bits) multiply_of = format == Format::kLevels4 ? multiply_in_8_bits<T, 4> : multiply_in_8_bits<T, 8>;
#endif
  multiply_of(input, stride, rows, tile, tiles, inputs, block, out, out_stride);
}

}  // namespace sage::cpu::NAMESPACE
