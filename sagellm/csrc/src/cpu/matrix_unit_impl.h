// Products of bfloat16 by the matrix unit of a processor, Intel's AMX. For `kernels_impl.h` alone, which says what it is compiled
// for.
//
// A tile register has up to 16 rows of 64 bytes. One instruction adds the product of 16 rows of 16 pairs with 16 pairs of 16
// outputs. Each sum of a result runs over the even and over the odd inputs of a step of 32, whatever the other rows are.
#pragma once

#include "vectors_impl.h"

namespace sage::cpu::NAMESPACE {

#ifdef MATRIX_UNIT

constexpr int kUnitRows = 16, kUnitPairs = 16, kUnitColumns = 16;

// Shapes of the tile registers, as `ldtilecfg` reads them. Results: 0 and 1 of the first rows, 2 and 3 of the second ones;
// inputs of both: 4 and 5; weights: 6 and 7, of `columns` outputs each. Loading it clears the registers.
class UnitShapes {
 public:
  UnitShapes(int first_rows, int second_rows, int pairs, int columns = kUnitColumns) {
    for (const int tile : {0, 1, 4}) set(tile, first_rows, tile == 4 ? pairs : columns);
    for (const int tile : {2, 3, 5}) set(tile, second_rows, tile == 5 ? pairs : columns);
    for (const int tile : {6, 7}) set(tile, pairs, columns);
    _tile_loadconfig(&config_);
  }
  // The saved state of a thread is 8 KiB larger while registers are in use.
  ~UnitShapes() { _tile_release(); }
  UnitShapes(const UnitShapes&) = delete;
  UnitShapes& operator=(const UnitShapes&) = delete;

 private:
  void set(int tile, int rows, int words) {
    if (rows == 0) return;
    config_.rows[tile] = static_cast<std::uint8_t>(rows);
    config_.bytes[tile] = static_cast<std::uint16_t>(words * 4);
  }
  struct alignas(64) {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
  } config_;
};

// GCC does not know that the instructions read memory.
inline void written() { asm volatile("" ::: "memory"); }

// kTile numbers of two tokens to pairs, in the order that `interleave<kUnitRun>` undoes.
constexpr int kUnitRun = 4;
inline void pair_tokens(const void* first, const void* second, std::uint16_t* to) {
  const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
  _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
  _mm512_storeu_si512(to + kTile, _mm512_unpackhi_epi16(a, b));
}

// out (+)= inputs . weights for the rows of one or two registers and a tile of kTile outputs. Strides are in bytes.
template <int registers>
inline void multiply_in_unit(const void* input, std::size_t stride, const std::uint16_t* tile, int steps, int pairs, float* out,
                             std::size_t out_stride, bool accumulate) {
  auto* second_out = reinterpret_cast<char*>(out) + kUnitRows * out_stride;
  const auto* first = static_cast<const char*>(input);
  const auto* second = first + kUnitRows * stride;
  written();
  if (accumulate) {
    _tile_loadd(0, out, out_stride);
    _tile_loadd(1, out + WIDTH, out_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if constexpr (registers == 2) {
    if (accumulate) {
      _tile_loadd(2, second_out, out_stride);
      _tile_loadd(3, second_out + 64, out_stride);
    } else {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int s = 0; s < steps; ++s, first += pairs * 4, second += pairs * 4, tile += pairs * 2 * kTile) {
    _tile_loadd(6, tile, kTile * 4);
    _tile_loadd(4, first, stride);
    _tile_loadd(7, tile + 2 * WIDTH, kTile * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (registers == 2) {
      _tile_loadd(5, second, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_stride);
  _tile_stored(1, out + WIDTH, out_stride);
  if constexpr (registers == 2) {
    _tile_stored(2, second_out, out_stride);
    _tile_stored(3, second_out + 64, out_stride);
  }
}

// For up to two registers of rows, whose shapes are set.
inline void multiply_in_unit(int rows, const void* input, std::size_t stride, const std::uint16_t* tile, int steps, int pairs,
                             float* out, std::size_t out_stride, bool accumulate) {
  if (rows > kUnitRows)
    multiply_in_unit<2>(input, stride, tile, steps, pairs, out, out_stride, accumulate);
  else
    multiply_in_unit<1>(input, stride, tile, steps, pairs, out, out_stride, accumulate);
}

// As `Kernels::multiply`.
inline void multiply_plain_in_unit(const void* input, std::size_t stride, int rows, const void* tile, int tiles, int inputs,
                                   float* out, std::size_t out_stride, bool accumulate) {
  constexpr int kBoth = 2 * kUnitRows, kStep = 2 * kUnitPairs;
  const std::size_t row_bytes = stride * 2, out_bytes = out_stride * 4, tile_size = static_cast<std::size_t>(inputs) * kTile;
  const auto multiply_all = [&](int from_row, int end_row, int begin, int steps, int pairs, bool adds) {
    if (from_row == end_row || steps == 0) return;
    const int width = std::min(kBoth, end_row - from_row);
    const UnitShapes shapes(std::min(kUnitRows, width), std::max(0, width - kUnitRows), pairs);
    const auto* weight = static_cast<const std::uint16_t*>(tile) + begin * kTile;
    for (int t = 0; t < tiles; ++t, weight += tile_size) {
      for (int row = from_row; row < end_row; row += kBoth) {
        const auto at = static_cast<std::size_t>(row);
        multiply_in_unit(width, static_cast<const char*>(input) + at * row_bytes + begin * 2, row_bytes, weight, steps, pairs,
                         out + at * out_stride + t * kTile, out_bytes, adds);
      }
    }
  };
  const int whole = rows / kBoth * kBoth, steps = inputs / kStep, begin = steps * kStep, rest = (inputs - begin) / 2;
  for (const auto& [from_row, end_row] : {std::pair(0, whole), std::pair(whole, rows)}) {
    multiply_all(from_row, end_row, 0, steps, kUnitPairs, accumulate);
    multiply_all(from_row, end_row, begin, rest > 0, rest, accumulate || steps > 0);
  }
}

#endif

}  // namespace sage::cpu::NAMESPACE
