// Products with weights of few bits. For `kernels_impl.h` alone, which says what it is compiled for.
//
// A weight is scale * level + offset, with one scale and one offset for a block of inputs. Levels are small whole
// numbers, or floats of 8 bits, which every input type holds exactly. So a block's sum of inputs times levels is that of a plain product,
// and scales come last.
#pragma once

#include <type_traits>
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

constexpr float kFloat8Unit = 0x1p120f / (1 << kFloat8Shift);

constexpr int kFusedRows = 4;  // rows for which levels are decoded as they are multiplied, not into a tile first

inline Vec from_halves(const std::uint16_t* from) {
#ifdef __AVX512F__
  __m256i halves;
  std::memcpy(&halves, from, sizeof(halves));
  return reinterpret_cast<Vec>(_mm512_maskz_cvtph_ps(0xffff, halves));  // the plain one warns in GCC 12
#elif defined(__AVX2__)
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  IVec bits;
  for (int i = 0; i < WIDTH; ++i) bits[i] = from[i];
  const Vec size = as_float((bits & 0x7fff) << 13) * 0x1p112f;  // the exponents begin 112 apart
  return as_float(as_bits(size) | ((bits & 0x8000) << 16));
#endif
}

// The further bits of word `number`, whose levels have more than 4, moved to the beginning of each byte. `high`: where those of
// a block begin in each lane.
template <int bits>
IVec high_of(const char* high, int number) {
  if constexpr (high_bits(bits) == 0) {
    return IVec{};
  } else {
    constexpr int kWords = 4 / high_bits(bits);
    const IVec words = load_words(high + static_cast<std::size_t>(number / kWords * kLanes * 4));
    return words >> (2 * high_bits(bits) * (number % kWords));
  }
}

inline const char* high_words(const char* words, int block) { return words + static_cast<std::size_t>(block / 8 * kLanes * 4); }

// Asks for the line of a tile two blocks ahead. Few lines are under way else: the levels of one take many instructions, and a
// processor sees a few hundred of these ahead. On a Zen 3 without it a step of one request took 1.4 times as long.
inline void fetch(const char* line) {
  if constexpr (WIDTH == 8) __builtin_prefetch(line + 34 * 64);
}

// Number `at` of the levels in each lane's word: 8 of up to 6 bits, adjacent ones in different halves of the word, or 4 of 8
// bits, of which floats of 8 bits lie in different halves too.
template <Format format>
Vec level_of(IVec words, IVec high, int at) {
  if constexpr (bits_of(format) < 8) {
    constexpr int kHigh = high_bits(bits_of(format));
    const int shift = 16 * (at % 2) + 4 * (at / 2);
    IVec level = (words >> shift) & 15;
    if constexpr (kHigh > 0) level |= ((high >> (shift / 8 * 8 + kHigh * (shift / 4 % 2))) & ((1 << kHigh) - 1)) << 4;
    return __builtin_convertvector(level, Vec);
  } else if constexpr (format == Format::kLevels8) {
    return __builtin_convertvector((words << (24 - 8 * at)) >> 24, Vec);
  } else {
    // The bits of a float that is 2^120 times less; those of one without an exponent, too.
    const IVec bits = ((words << (24 - 16 * (at % 2) - 8 * (at / 2))) >> 4) & static_cast<std::int32_t>(0x87f00000);
    return as_float(bits) * kFloat8Unit;
  }
}

#ifdef DOT_BF16
// The whole numbers from 0 on as bfloat16, and again from the beginning.
template <int count>
struct WholeNumbers {
  alignas(64) std::uint16_t at[std::max(count, 32)]{};
  constexpr WholeNumbers() {
    for (int i = 0; i < std::max(count, 32); ++i) {
      int exponent = 0;
      while (2 << exponent <= i % count) ++exponent;
      at[i] = static_cast<std::uint16_t>(i % count == 0 ? 0 : (127 + exponent) << 7 | (i % count << (7 - exponent) & 0x7f));
    }
  }
};

// Two adjacent levels of each lane, as bfloat16.
template <Format format>
__m512bh pair_of(IVec words, IVec high, int at) {
  if constexpr (bits_of(format) < 8) {
    constexpr int kBits = bits_of(format), kHigh = high_bits(kBits);
    static constexpr WholeNumbers<1 << kBits> kLevels;
    // The sixteen levels of 4 bits are there twice: the fifth bit of an index belongs to the next level.
    auto index = _mm512_srli_epi16(reinterpret_cast<__m512i>(words), static_cast<unsigned>(2 * at));
    if constexpr (kHigh > 0) {
      const auto place = static_cast<unsigned>(at / 4 * 8 + kHigh * (at / 2 % 2));
      const auto further = _mm512_slli_epi16(_mm512_srli_epi16(reinterpret_cast<__m512i>(high), place), 4);
      index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), index, further, 0xca);  // bit by bit: 15 ? index : further
    }
    if constexpr (kBits == 6) {  // bits beyond those of an index do not count
      return reinterpret_cast<__m512bh>(
          _mm512_permutex2var_epi16(_mm512_load_si512(kLevels.at), index, _mm512_load_si512(kLevels.at + 32)));
    }
    return reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(index, _mm512_load_si512(kLevels.at)));
  } else if constexpr (format == Format::kLevels8) {
    const IVec first = as_bits(level_of<format>(words, high, at)), second = as_bits(level_of<format>(words, high, at + 1));
    return reinterpret_cast<__m512bh>(((first >> 16) & 0xffff) | (second & static_cast<std::int32_t>(0xffff0000)));
  } else {
    // Sign, exponent and mantissa move to their places in both halves of a word.
    constexpr short kExponent = (127 - kFloat8Bias - kFloat8Shift) << 7;
    const auto all = reinterpret_cast<__m512i>(words), bytes = at == 0 ? _mm512_slli_epi16(all, 8) : all;
    const auto moved = _mm512_srai_epi16(bytes, 4), fields = _mm512_set1_epi16(static_cast<short>(0x87f0));
    const auto number = _mm512_ternarylogic_epi32(moved, fields, _mm512_set1_epi16(kExponent), 0xea);  // bit by bit: a & b | c
    const bool has_small = _mm512_testn_epi8_mask(all, _mm512_set1_epi8(0x78)) != 0;
    if (__builtin_expect(has_small, 0) == 0) return reinterpret_cast<__m512bh>(number);
    // m * 2^-9 of the numbers without an exponent, moved as all others. Few weights are so small.
    alignas(64) static constexpr std::uint16_t kSmall[32] = {0,      0x3700, 0x3780, 0x37c0,
                                                             0x3800, 0x3820, 0x3840, 0x3860};
    const auto is_small = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(0x7800));
    const auto index = _mm512_and_si512(_mm512_srli_epi16(bytes, 8), _mm512_set1_epi16(7));
    const auto small = _mm512_mask_permutexvar_epi16(number, is_small, index, _mm512_load_si512(kSmall));
    const auto sign = _mm512_and_si512(bytes, _mm512_set1_epi16(static_cast<short>(0x8000)));
    return reinterpret_cast<__m512bh>(_mm512_or_si512(small, sign));
  }
}
#endif

// sums[r] = inputs of row r times the levels of a block, in the order of T::multiply.
template <class T, Format format, int rows>
void multiply_block(const typename T::Input* input, std::size_t stride, const char* words, int block,
                    Vec (&sums)[rows][kRunVectors]) {
  constexpr int kLevels = levels_of_word(bits_of(format));
  const char* further = high_words(words, block);
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kRunVectors; ++v) sums[r][v] = Vec{};
  }
  for (int i = 0; i < block; i += kLevels, words += kLanes * 4) {
    fetch(words);
    for (int v = 0; v < kRunVectors; ++v) {
      const IVec lanes = load_words(words + v * WIDTH * 4);
      const IVec high = high_of<bits_of(format)>(further + v * WIDTH * 4, i / kLevels);
      for (int at = 0; at < kLevels; at += 2) {
#ifdef DOT_BF16
        if constexpr (T::kInputs == Type::kBFloat16) {
          const __m512bh weight = pair_of<format>(lanes, high, at);
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
          const Vec first = level_of<format>(lanes, high, at), second = level_of<format>(lanes, high, at + 1);
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
  constexpr int kLevels = levels_of_word(bits_of(format));
  const char* further = high_words(words, block);
  for (int i = 0; i < block; i += kLevels, words += kLanes * 4) {
    for (int v = 0; v < kVectors; ++v) {
      const IVec lanes = load_words(words + place_of(v, run_bytes));
      const IVec high = high_of<bits_of(format)>(further + place_of(v, run_bytes), i / kLevels);
      for (int at = 0; at < kLevels; at += 2) {
        auto* to = tile + (i + at) * kTile + v * WIDTH * T::kStep;
#ifdef DOT_BF16
        if constexpr (T::kInputs == Type::kBFloat16) {
          const __m512bh pair = pair_of<format>(lanes, high, at);
          std::memcpy(to, &pair, sizeof(pair));
          continue;
        }
#endif
        const Vec first = level_of<format>(lanes, high, at), second = level_of<format>(lanes, high, at + 1);
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

// Whether a block of a tile has another offset than 0 for an output.
inline bool has_offsets(const char* tile, std::size_t run_bytes, int blocks, std::size_t block_bytes) {
  std::uint64_t found = 0;
  for (int run = 0; run < 2; ++run) {
    for (int b = 0; b < blocks; ++b) {
      std::uint64_t offsets[kLanes / 4];
      const std::size_t at = static_cast<std::size_t>(run) * run_bytes + static_cast<std::size_t>(b) * block_bytes;
      std::memcpy(offsets, tile + at + kLanes * 2, sizeof(offsets));
      for (const std::uint64_t four : offsets) found |= four;
    }
  }
  return found != 0;
}

// How many blocks, from the first one of a tile on and at most `most`, have the same scales and no offsets: their sums may be
// added up before they are scaled.
inline int blocks_alike(const char* tile, std::size_t run_bytes, std::size_t block_bytes, int most) {
  if (has_offsets(tile, run_bytes, 1, block_bytes)) return 1;
  int count = 1;
  const auto is_alike = [&](const char* run) {
    return std::memcmp(run, run + static_cast<std::size_t>(count) * block_bytes, kLanes * 2) == 0;
  };
  while (count < most && is_alike(tile) && is_alike(tile + run_bytes) &&
         !has_offsets(tile + static_cast<std::size_t>(count) * block_bytes, run_bytes, 1, block_bytes)) {
    ++count;
  }
  return count;
}

// One block's part of the result: the same words for every number of rows, so that they round alike. Where an offset is 0 its
// term changes nothing.
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

// `product`: of so many rows, at most `most`, with the levels of so many inputs, into sums [rows][kTile]. `of_inputs`: null
// without offsets. `joins`: blocks that are alike are multiplied as one; of all numbers of rows or of none.
template <class T, Format format, int most, bool joins, class Product>
void multiply_many_levels(const typename T::Input* input, std::size_t stride, int rows, const char* tile, int tiles,
                          int blocks, int block, const float* of_inputs, float* out, std::size_t out_stride, Product product) {
  const std::size_t block_bytes = bytes_of_block(bits_of(format), block), run_bytes = static_cast<std::size_t>(blocks) * block_bytes;
  alignas(64) typename T::Weight levels[kMaxBlock * kTile];
  alignas(64) float sums[most * kTile];
  for (int t = 0; t < tiles; ++t, tile += run_bytes, out += kTile) {
    for (int b = 0, joined = 1; b < blocks; b += joined) {
      if constexpr (joins) joined = blocks_alike(tile, run_bytes, block_bytes, std::min(kMaxBlock / block, blocks - b));
      Scales scales[kVectors];
      for (int v = 0; v < kVectors; ++v) scales[v] = scales_of(tile, v, run_bytes);
      const bool adds_offsets = of_inputs != nullptr && joined == 1;
      for (int i = 0; i < joined; ++i, tile += block_bytes) {
        expand_block<T, format>(tile + kLanes * 4, run_bytes, block, levels + i * block * kTile);
      }
      for (int first = 0; first < rows; first += most) {
        const int count = std::min(most, rows - first);
        product(count, input + static_cast<std::size_t>(first) * stride + b * block, levels, joined * block, sums);
        const auto add = [&](auto has_offsets) {
          for (int r = 0; r < count; ++r) {
            for (int v = 0; v < kVectors; ++v) {
              float* to = out + static_cast<std::size_t>(first + r) * out_stride + v * WIDTH;
              const Vec of_block = load(sums + r * kTile + v * WIDTH);
              if constexpr (decltype(has_offsets)::value)
                add_block(to, of_block, scales[v].scale, scales[v].offset, of_inputs[(first + r) * blocks + b]);
              else
                store(to, load(to) + scales[v].scale * of_block);
            }
          }
        };
        // Two loops: where they share a product, a compiler does not make one instruction of it and the sum.
        if (adds_offsets)
          add(std::true_type{});
        else
          add(std::false_type{});
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
  const auto product = [&](int count, const std::uint16_t* from, const std::uint16_t* levels, int inputs, float* sums) {
    multiply_in_unit(count, from, stride * 2, levels, inputs / (2 * pairs), pairs, sums, kTile * 4, false);
  };
  const int whole = rows / kBoth * kBoth;
  for (const auto& [first, count] : {std::pair(0, whole), std::pair(whole, rows - whole)}) {
    if (count == 0) continue;
    const UnitShapes shapes(std::min(kUnitRows, count), std::clamp(count - kUnitRows, 0, kUnitRows), pairs);
    const auto at = static_cast<std::size_t>(first);
    multiply_many_levels<BFloat16Dot, format, kBoth, true>(input + at * stride, stride, count, tile, tiles, blocks, block,
                                                           of_inputs == nullptr ? nullptr : of_inputs + first * blocks,
                                                           out + at * out_stride, out_stride, product);
  }
}
#endif

template <class T, Format format>
void multiply_levels_of(const void* input, std::size_t stride, int rows, const void* tile, int tiles, int inputs,
                        int block, float* out, std::size_t out_stride) {
  static thread_local std::vector<float> added_up;
  const int blocks = inputs / block;
  const auto* from = static_cast<const typename T::Input*>(input);
  const auto* bytes = static_cast<const char*>(tile);
  // Few rows cost less to add up than a look at the offsets before the weights are read in their order.
  bool adds_offsets = rows <= kFusedRows;
  for (int t = 0; t < tiles && !adds_offsets; ++t) {
    const std::size_t block_bytes = bytes_of_block(bits_of(format), block);
    const std::size_t run_bytes = static_cast<std::size_t>(blocks) * block_bytes;
    adds_offsets = has_offsets(bytes + 2 * static_cast<std::size_t>(t) * run_bytes, run_bytes, blocks, block_bytes);
  }
  if (adds_offsets) added_up.resize(static_cast<std::size_t>(rows) * static_cast<std::size_t>(blocks));
  for (int r = 0; r < rows; ++r) {
    const auto* row = from + static_cast<std::size_t>(r) * stride;
    for (int b = 0; b < blocks && adds_offsets; ++b) {
      added_up[static_cast<std::size_t>(r * blocks + b)] = sum_of_inputs<T>(row + b * block, block);
    }
    std::fill_n(out + static_cast<std::size_t>(r) * out_stride, tiles * kTile, 0.f);
  }
  const float* of_inputs = adds_offsets ? added_up.data() : nullptr;
#ifdef MATRIX_UNIT
  if constexpr (T::kInputs == Type::kBFloat16) {
    return multiply_levels_in_unit<format>(from, stride, rows, bytes, tiles, blocks, block, of_inputs, out, out_stride);
  }
#endif
  if (rows <= kFusedRows) {
    multiply_few_levels<T, format, kFusedRows>(rows, from, stride, bytes, tiles, blocks, block, of_inputs, out,
                                             out_stride);
  } else {
    const auto product = [&](int count, const typename T::Input* some, const typename T::Weight* levels, int of_block,
                             float* sums) {
      multiply_at_once<T>(count, some, stride, levels, of_block, sums, kTile, false);
    };
    multiply_many_levels<T, format, most_rows<T>(), false>(from, stride, rows, bytes, tiles, blocks, block, of_inputs, out,
                                                           out_stride, product);
  }
}

template <class T>
void multiply_levels(const void* input, std::size_t stride, int rows, const void* tile, int tiles, int inputs,
                     Format format, int block, float* out, std::size_t out_stride) {
  const auto multiply_of = format == Format::kLevels4   ? multiply_levels_of<T, Format::kLevels4>
                           : format == Format::kLevels5 ? multiply_levels_of<T, Format::kLevels5>
                           : format == Format::kLevels6 ? multiply_levels_of<T, Format::kLevels6>
                           : format == Format::kLevels8 ? multiply_levels_of<T, Format::kLevels8>
                                                        : multiply_levels_of<T, Format::kFloat8>;
  multiply_of(input, stride, rows, tile, tiles, inputs, block, out, out_stride);
}

}  // namespace sage::cpu::NAMESPACE
