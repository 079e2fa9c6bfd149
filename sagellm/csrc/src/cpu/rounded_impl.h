// Products with weights of few bits and inputs of 8 bits. For `kernels_impl.h` alone, which says what it is compiled for.
//
// An input is scale * level too, with a scale for each block of a row, so that blocks are multiplied in whole numbers
// (as ggml's Q8_0). An instruction adds up kGroup adjacent products of each lane. The matrix unit multiplies many rows, and its
// whole numbers are those of the other instructions.
#pragma once

#include "levels_impl.h"

namespace sage::cpu::NAMESPACE {

#ifdef __AVX2__

constexpr int kGroup = 4;  // adjacent levels that are multiplied together
#ifdef __AVX512VNNI__
constexpr int kUnsigned = 128;  // vpdpbusd takes one factor without sign: levels of 8 bits are moved up by so much
#else
constexpr int kUnsigned = 0;
#endif

inline std::int32_t group_at(const char* inputs) {
  std::int32_t group;
  std::memcpy(&group, inputs, 4);
  return group;
}

#ifdef __AVX512VNNI__
inline IVec add_products(IVec total, IVec levels, const char* inputs) {
  return reinterpret_cast<IVec>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(total), reinterpret_cast<__m512i>(levels),
                                                    _mm512_set1_epi32(group_at(inputs))));
}
#else
// vpmaddubsw adds up two products of bytes in 16 bits. One factor has no sign. Levels of less than 8 bits have none, and all
// products of a lane's word fit: 4 * 63 * 127. The sign of a level of 8 bits moves to the input: 2 * 128 * 127 fits.
#ifdef __AVX512BW__
using Register = __m512i;
#define INTRINSIC(name) _mm512_##name
#else
using Register = __m256i;
#define INTRINSIC(name) _mm256_##name
#endif

inline Register multiply_bytes(IVec unsigned_ones, Register signed_ones) {
  return INTRINSIC(maddubs_epi16)(reinterpret_cast<Register>(unsigned_ones), signed_ones);
}

// total + the products of a word: `levels` of each step of it.
template <int bits, int steps>
[[gnu::always_inline]] inline IVec add_word(IVec total, const IVec (&levels)[steps], const char* inputs) {
  Register pairs;
  if constexpr (bits < 8) {
    pairs = INTRINSIC(add_epi16)(multiply_bytes(levels[0], INTRINSIC(set1_epi32)(group_at(inputs))),
                                 multiply_bytes(levels[1], INTRINSIC(set1_epi32)(group_at(inputs + kGroup))));
  } else {
    const Register input = INTRINSIC(set1_epi32)(group_at(inputs)), level = reinterpret_cast<Register>(levels[0]);
#ifdef __AVX512BW__
    const Register signed_input = _mm512_mask_sub_epi8(input, _mm512_movepi8_mask(level), _mm512_setzero_si512(), input);
#else
    const Register signed_input = _mm256_sign_epi8(input, level);
#endif
    pairs = multiply_bytes(reinterpret_cast<IVec>(INTRINSIC(abs_epi8)(level)), signed_input);
  }
  return total + reinterpret_cast<IVec>(INTRINSIC(madd_epi16)(pairs, INTRINSIC(set1_epi16)(1)));
}
#undef INTRINSIC
#endif

// The levels of each lane's word that instruction `step` of it takes, as they lie in the word.
template <int bits>
IVec levels_of(IVec words, IVec high, int step) {
  if constexpr (bits == 8) return kUnsigned == 0 ? words : words ^ static_cast<std::int32_t>(0x80808080);
  constexpr int kHigh = high_bits(bits), kOnes = 0x01010101;
  const IVec low = (words >> (4 * step)) & (15 * kOnes);
  if constexpr (kHigh == 0) return low;
  return low | (((high >> (kHigh * step)) & (((1 << kHigh) - 1) * kOnes)) << 4);
}

// Their numbers among 8 adjacent ones, instruction by instruction.
template <int bits>
constexpr int number_of(int at) {
  constexpr int kOfNarrow[] = {0, 4, 1, 5, 2, 6, 3, 7};
  return bits < 8 ? kOfNarrow[at] : at;
}

template <int bits>
struct Order {
  std::int8_t at[16]{};
  constexpr Order() {
    for (int i = 0; i < 16; ++i) at[i] = static_cast<std::int8_t>(i / 8 * 8 + number_of<bits>(i % 8));
  }
  constexpr bool is_plain() const { return at[1] == 1 && at[2] == 2; }
};

// A rounded row: the levels of all blocks in the order of `number_of`, and then what else is known of each block.
struct OfRounded {
  float scale, sum;
};

// Rows begin with a line of the cache, as the matrix unit reads them.
inline std::size_t rounded_bytes(int inputs, int block) {
  return static_cast<std::size_t>(padded(inputs + inputs / block * static_cast<int>(sizeof(OfRounded)), 64));
}

struct RoundedRows {
  const char* levels;
  std::size_t row_bytes;
  int inputs;

  const char* block(int number, int size) const { return levels + static_cast<std::size_t>(number * size); }
  OfRounded of(int row, int number) const {
    OfRounded found;
    const char* behind = levels + static_cast<std::size_t>(row) * row_bytes + static_cast<std::size_t>(inputs);
    std::memcpy(&found, behind + static_cast<std::size_t>(number) * sizeof(found), sizeof(found));
    return found;
  }
  RoundedRows from(int row) const { return {levels + static_cast<std::size_t>(row) * row_bytes, row_bytes, inputs}; }
};

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
OfRounded round_block(const typename T::Input* input, int block, char* to) {
  typedef std::int8_t Levels __attribute__((vector_size(WIDTH)));
  IVec sizes{};  // floats without sign are in the order of their bits
  for (int i = 0; i < block; i += WIDTH) {
    const IVec size = as_bits(widened<T>(input + i)) & 0x7fffffff;
    sizes = sizes > size ? sizes : size;
  }
  const float top = maximum(as_float(sizes));
  const float by = top > 1e-30f ? 127.f / top : 0.f, scale = by == 0.f ? 0.f : top / 127.f;
  const Vec magic = broadcast(12582912.f);  // puts the nearest whole number into the low bits
  IVec total{};
  for (int i = 0; i < block; i += WIDTH) {
    const IVec level = as_bits(widened<T>(input + i) * by + magic) - as_bits(magic);
    total += level;
    const Levels narrow = __builtin_convertvector(level, Levels);
    std::memcpy(to + i, &narrow, sizeof(narrow));
  }
  static constexpr Order<bits> kOrder;
  if constexpr (!kOrder.is_plain()) {
    typedef std::int8_t Levels16 __attribute__((vector_size(16)));
    Levels16 all, order;
    std::memcpy(&order, kOrder.at, sizeof(order));
    for (int i = 0; i < block; i += 16, to += sizeof(all)) {
      std::memcpy(&all, to, sizeof(all));
      all = __builtin_shuffle(all, order);
      std::memcpy(to, &all, sizeof(all));
    }
  }
  return {scale, sum(__builtin_convertvector(total, Vec))};
}

template <class T>
void round_inputs(const void* input, std::size_t stride, int rows, int inputs, Format format, int block, char* to) {
  const auto* from = static_cast<const typename T::Input*>(input);
  const auto round = bits_of(format) < 8 ? round_block<T, 4> : round_block<T, 8>;
  for (int r = 0; r < rows; ++r, from += stride, to += rounded_bytes(inputs, block)) {
    char* behind = to + inputs;
    for (int i = 0; i < inputs; i += block, behind += sizeof(OfRounded)) {
      const OfRounded found = round(from + i, block, to + i);
      std::memcpy(behind, &found, sizeof(found));
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

// sum + what a block adds to it: the same operations wherever a block is multiplied, so that results are the same.
template <bool adds_offsets>
Vec with_block(Vec sum, IVec products, const Scales& scales, const OfRounded& of_input) {
  Vec of_block = __builtin_convertvector(products, Vec) * scales.scale;
  if constexpr (adds_offsets) of_block = fused(broadcast(of_input.sum), scales.offset, of_block);
  return fused(of_block, broadcast(of_input.scale), sum);
}

// Where sums of products begin whose levels are moved up by kUnsigned. `sum`: of the inputs.
inline IVec moved_up(float sum) {
  if constexpr (kUnsigned == 0) return IVec{};
  return __builtin_convertvector(broadcast(sum * -static_cast<float>(kUnsigned)), IVec);
}

// Vectors [first, first + vectors) of a tile, for `rows` rows. Each block's part is added to `out`, in the same words for
// every number of rows, so that they round alike.
template <int bits, int rows, int vectors>
void multiply_whole(const RoundedRows& rounded, const char* tile, int first, int blocks, int block, float* out,
                    std::size_t out_stride) {
  constexpr int kLevels = levels_of_word(bits), kSteps = kLevels / kGroup;  // of a word
  const std::size_t block_bytes = bytes_of_block(bits, block), run_bytes = static_cast<std::size_t>(blocks) * block_bytes;
  for (int b = 0; b < blocks; ++b, tile += block_bytes) {
    // All loops over rows and vectors are unrolled, or else the sums lie in memory.
    IVec products[rows][vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) products[r][v] = bits == 8 ? moved_up(rounded.of(r, b).sum) : IVec{};
    }
    fetch(tile + place_of(first, run_bytes));
    const char *words = tile + kLanes * 4, *levels = rounded.block(b, block), *further = high_words(words, block);
    for (int i = 0; i < block; i += kLevels, words += kLanes * 4) {
      IVec lanes[vectors], high[vectors];
      fetch(words + place_of(first, run_bytes));
      for (int v = 0; v < vectors; ++v) {
        lanes[v] = load_words(words + place_of(first + v, run_bytes));
        high[v] = high_of<bits>(further + place_of(first + v, run_bytes), i / kLevels);
      }
#ifdef __AVX512VNNI__
      for (int step = 0; step < kSteps; ++step, levels += kGroup) {
        IVec of_step[vectors];
        for (int v = 0; v < vectors; ++v) of_step[v] = levels_of<bits>(lanes[v], high[v], step);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
          const char* inputs = levels + static_cast<std::size_t>(r) * rounded.row_bytes;
#pragma GCC unroll 4
          for (int v = 0; v < vectors; ++v) products[r][v] = add_products(products[r][v], of_step[v], inputs);
        }
      }
#else
      IVec of_word[vectors][kSteps];
      for (int v = 0; v < vectors; ++v) {
        for (int step = 0; step < kSteps; ++step) of_word[v][step] = levels_of<bits>(lanes[v], high[v], step);
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const char* inputs = levels + static_cast<std::size_t>(r) * rounded.row_bytes;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) products[r][v] = add_word<bits>(products[r][v], of_word[v], inputs);
      }
      levels += kLevels;
#endif
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const Scales scales = scales_of(tile, first + v, run_bytes);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        float* to = out + static_cast<std::size_t>(r) * out_stride + (first + v) * WIDTH;
        store(to, with_block<true>(b == 0 ? Vec{} : load(to), products[r][v], scales, rounded.of(r, b)));
      }
    }
  }
}

template <int bits, int rows>
void multiply_whole_rest(int count, const RoundedRows& rounded, const char* tile, int blocks, int block, float* out,
                         std::size_t out_stride) {
  if constexpr (rows > 1) {
    if (count < rows) return multiply_whole_rest<bits, rows - 1>(count, rounded, tile, blocks, block, out, out_stride);
  }
  // Few rows wait for memory, of which the processor fetches one stream ahead better than two. Many have as many sums as there
  // are registers.
  constexpr int kAtOnce = rows <= 4 ? kRunVectors : WIDTH == 16 ? kVectors : 1;
  for (int v = 0; v < kVectors; v += kAtOnce) {
    multiply_whole<bits, rows, kAtOnce>(rounded, tile, v, blocks, block, out, out_stride);
  }
}

#ifdef MATRIX_UNIT
// Adjacent blocks of a tile: its scales, and its levels as rows of kLanes * 4 bytes, run by run.
struct UnitBlocks {
  const char *scales, *levels;
  std::size_t scales_stride, levels_stride;        // bytes from block to block
  std::size_t scales_run_bytes, levels_run_bytes;  // from run to run
  int first, count, size, step;                    // `step`: inputs that an instruction takes
};

// The products of a block and a tile, [rows][kTile]. Instructions name their registers: those of even blocks, or of odd ones.
template <bool odd>
void multiply_block_in_unit(const char* inputs, std::size_t row_bytes, const UnitBlocks& blocks, int number, std::int32_t* to) {
  constexpr std::size_t kRowBytes = kTile * 4;
  const char* levels = blocks.levels + static_cast<std::size_t>(number) * blocks.levels_stride;
  if constexpr (odd) {
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int i = 0; i < blocks.size; i += blocks.step, inputs += blocks.step, levels += blocks.step * kLanes) {
    _tile_loadd(6, levels, kLanes * 4);
    _tile_loadd(7, levels + blocks.levels_run_bytes, kLanes * 4);
    if constexpr (odd) {
      _tile_loadd(5, inputs, row_bytes);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    } else {
      _tile_loadd(4, inputs, row_bytes);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
    }
  }
  if constexpr (odd) {
    _tile_stored(2, to, kRowBytes);
    _tile_stored(3, to + kLanes, kRowBytes);
  } else {
    _tile_stored(0, to, kRowBytes);
    _tile_stored(1, to + kLanes, kRowBytes);
  }
}

// out += the blocks' part, for rows whose number the shapes of the registers have. While the unit multiplies a block, the
// one before it is scaled.
template <int rows, bool adds_offsets>
void multiply_blocks(const RoundedRows& rounded, const UnitBlocks& blocks, float* out, std::size_t out_stride) {
  alignas(64) std::int32_t products[2][rows][kTile];
  const auto begin = [&products, &rounded, &blocks](int b) {
    const char* inputs = rounded.block(blocks.first + b, blocks.size);
    if (b % 2 == 0)
      multiply_block_in_unit<false>(inputs, rounded.row_bytes, blocks, b, products[0][0]);
    else
      multiply_block_in_unit<true>(inputs, rounded.row_bytes, blocks, b, products[1][0]);
  };
  // All loops over rows and vectors are unrolled, or else the sums lie in memory.
  Vec sums[rows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = blocks.first == 0 ? Vec{} : load(out + static_cast<std::size_t>(r) * out_stride + v * WIDTH);
    }
  }
  written();
  begin(0);
  for (int b = 0; b < blocks.count; ++b) {
    if (b + 1 < blocks.count) begin(b + 1);
    const char* at = blocks.scales + static_cast<std::size_t>(b) * blocks.scales_stride;
    const Scales first = scales_of(at, 0, blocks.scales_run_bytes), second = scales_of(at, 1, blocks.scales_run_bytes);
    const std::int32_t* of_levels = products[b % 2][0];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const OfRounded of_input = rounded.of(r, blocks.first + b);
      sums[r][0] = with_block<adds_offsets>(sums[r][0], load_words(of_levels + r * kTile), first, of_input);
      sums[r][1] = with_block<adds_offsets>(sums[r][1], load_words(of_levels + r * kTile + WIDTH), second, of_input);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(out + static_cast<std::size_t>(r) * out_stride + v * WIDTH, sums[r][v]);
  }
}

template <int rows>
void multiply_blocks_rest(int count, const RoundedRows& rounded, const UnitBlocks& blocks, bool adds_offsets, float* out,
                          std::size_t out_stride) {
  if constexpr (rows > 1) {
    if (count < rows) return multiply_blocks_rest<rows - 1>(count, rounded, blocks, adds_offsets, out, out_stride);
  }
  if (adds_offsets)
    multiply_blocks<rows, true>(rounded, blocks, out, out_stride);
  else
    multiply_blocks<rows, false>(rounded, blocks, out, out_stride);
}

// Levels of less than 8 bits as bytes. They are multiplied as they lie in words, so the order of inputs is the same.
template <int bits>
void widen_levels(const char* words, std::size_t run_bytes, int block, char* to) {
  constexpr int kLevels = levels_of_word(bits);
  const char* further = high_words(words, block);
  for (int i = 0; i < block; i += kLevels, words += kLanes * 4) {
    for (int v = 0; v < kVectors; ++v) {
      const IVec lanes = load_words(words + place_of(v, run_bytes));
      const IVec high = high_of<bits>(further + place_of(v, run_bytes), i / kLevels);
      for (int step = 0; step < kLevels / kGroup; ++step) {
        const IVec levels = levels_of<bits>(lanes, high, step);
        std::memcpy(to + (v * block + i + step * kGroup) * kLanes, &levels, sizeof(levels));
      }
    }
  }
}

constexpr int kUnitInputs = 640;  // whose levels, of a tile, stay in the first cache while all rows meet them

template <int bits>
void multiply_rounded_in_unit(const RoundedRows& rounded, int rows, const char* tile, int tiles, int blocks, int block,
                              float* out, std::size_t out_stride) {
  alignas(64) char widened[bits < 8 ? kUnitInputs * kTile : 1];
  const std::size_t block_bytes = bytes_of_block(bits, block), run_bytes = static_cast<std::size_t>(blocks) * block_bytes;
  const int step = block % 64 == 0 ? 64 : block % 32 == 0 ? 32 : 16, at_once = kUnitInputs / block;
  const auto multiply_all = [&](int from_row, int end_row) {
    const int width = std::min(kUnitRows, end_row - from_row);
    const UnitShapes shapes(width, width, step / 4);
    for (int t = 0; t < tiles; ++t) {
      const char* scales = tile + static_cast<std::size_t>(t) * 2 * run_bytes;
      const bool adds_offsets = has_offsets(scales, run_bytes, blocks, block_bytes);
      for (int first = 0; first < blocks; first += at_once, scales += static_cast<std::size_t>(at_once) * block_bytes) {
        const int count = std::min(at_once, blocks - first);
        UnitBlocks part{scales, scales + kLanes * 4, block_bytes, block_bytes, run_bytes, run_bytes, first, count, block, step};
        if constexpr (bits < 8) {
          for (int b = 0; b < count; ++b, part.levels += block_bytes) {
            widen_levels<bits>(part.levels, run_bytes, block, widened + b * block * kTile);
          }
          part.levels = widened;
          part.levels_stride = static_cast<std::size_t>(block * kTile);
          part.levels_run_bytes = static_cast<std::size_t>(block * kLanes);
        }
        for (int row = from_row; row < end_row; row += kUnitRows) {
          multiply_blocks_rest<kUnitRows>(width, rounded.from(row), part, adds_offsets,
                                          out + static_cast<std::size_t>(row) * out_stride + t * kTile, out_stride);
        }
      }
    }
  };
  const int whole = rows / kUnitRows * kUnitRows;
  if (whole > 0) multiply_all(0, whole);
  if (whole < rows) multiply_all(whole, rows);
}
#endif

template <int bits>
void multiply_rounded_of(const RoundedRows& rounded, int rows, const char* tile, int tiles, int blocks, int block, float* out,
                         std::size_t out_stride) {
#ifdef MATRIX_UNIT
  // Levels of less than 8 bits are widened first, which pays for more rows.
  constexpr int kFewest = bits < 8 ? 9 : 5;
  if (rows >= kFewest) return multiply_rounded_in_unit<bits>(rounded, rows, tile, tiles, blocks, block, out, out_stride);
#endif
  for (int t = 0; t < tiles; ++t, out += kTile) {
    for (int first = 0; first < rows; first += ROWS) {
      multiply_whole_rest<bits, ROWS>(rows - first, rounded.from(first), tile, blocks, block,
                                      out + static_cast<std::size_t>(first) * out_stride, out_stride);
    }
    tile += 2 * static_cast<std::size_t>(blocks) * bytes_of_block(bits, block);
  }
}

inline void multiply_rounded(const char* rounded, int rows, const void* tile, int tiles, int inputs, Format format, int block,
                             float* out, std::size_t out_stride) {
  const auto multiply_of = format == Format::kLevels4   ? multiply_rounded_of<4>
                           : format == Format::kLevels5 ? multiply_rounded_of<5>
                           : format == Format::kLevels6 ? multiply_rounded_of<6>
                                                        : multiply_rounded_of<8>;
  const RoundedRows all{rounded, rounded_bytes(inputs, block), inputs};
  multiply_of(all, rows, static_cast<const char*>(tile), tiles, inputs / block, block, out, out_stride);
}
#endif

}  // namespace sage::cpu::NAMESPACE
