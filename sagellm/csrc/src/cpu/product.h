// Products with packed weights, cut into chunks for a team of threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "sagellm/decoder.h"

namespace sage::cpu {

using Size = std::size_t;

inline Size size(int value) { return static_cast<Size>(value); }
inline int divided(int count, int by) { return (count + by - 1) / by; }

constexpr int kPanel = 96;              // rows of a chunk: their inputs and results stay in the second cache
constexpr Size kChunkBytes = 192 << 10;  // weights of a chunk of few rows: shorter runs are not fetched ahead in time

inline Size tile_bytes(const Kernels& kernels, const Matrix& matrix) {
  if (matrix.format != Format::kPlain) {
    return 2 * size(matrix.inputs / matrix.block) * bytes_of_block(bits_of(matrix.format), matrix.block);
  }
  const int inputs = kernels.weights == Type::kFloat32 ? matrix.inputs : padded(matrix.inputs, 2);
  return size(kTile) * size(inputs) * size_of(kernels.weights);
}

// Adjacent rows of a step.
struct Rows {
  int first = 0, count = 0;
  int end() const { return first + count; }
};

// How a product is cut into chunks: panels of rows times groups of tiles.
struct Cut {
  int first = 0, rows = 0, panel = 0, panels = 0, tiles = 0, group = 1, lanes = 1;

  Cut() = default;
  Cut(const Kernels& kernels, Rows of_step, const Matrix& matrix, int threads, bool pairs)
      : first(of_step.first), rows(of_step.count) {
    const int unit = pairs ? 2 : 1;
    panels = divided(rows, kPanel);
    panel = padded(divided(rows, panels), rows > kPanel ? 12 : 1);
    panels = divided(rows, panel);
    tiles = divided(matrix.outputs, kTile);
    const Size group_of_few = kChunkBytes / tile_bytes(kernels, matrix);
    group = rows > kPanel ? 4 : static_cast<int>(std::clamp<Size>(group_of_few, 1, 8));
    group = std::max(1, std::min(group, tiles * panels / (4 * threads)));
    group = padded(group, unit);
    lanes = threads;
    if (panels > 1) return;
    // Among groups of about this size, the one with which the busiest thread has least to do.
    const auto most_tiles = [&](int of_group) { return divided(divided(tiles, of_group), threads) * of_group; };
    for (int other = padded(group + group / 2, unit); other > 0; other -= unit) {
      if (most_tiles(other) < most_tiles(group)) group = other;
    }
  }
  int chunks() const { return panels * divided(tiles, group); }
  int first_row(int chunk) const { return first + chunk % panels * panel; }
  int num_rows(int chunk) const { return std::min(panel, first + rows - first_row(chunk)); }
  // Threads take chunks in turn. Each then reads one run of memory, which the processor fetches ahead, and no gaps.
  int first_tile(int chunk) const {
    const int at = chunk / panels, groups = divided(tiles, group), lane = at % lanes;
    return (lane * (groups / lanes) + std::min(lane, groups % lanes) + at / lanes) * group;
  }
  int num_tiles(int chunk) const { return std::min(group, tiles - first_tile(chunk)); }
  int width() const { return group * kTile; }  // of a row of the chunk's result
  Size bytes() const { return size(panel) * size(width()) * 4; }
};

// Rows of inputs of a product.
struct Inputs {
  const char* numbers;
  Size stride;                    // in numbers
  const char* rounded = nullptr;  // the same rows in 8 bits, or null
  std::uint64_t key = 0;          // equal for equal inputs, which a thread then rounds once; 0: it rounds them each time
};

// Rows of inputs in 8 bits, as a matrix with `in_8_bits` wants them.
inline Size rounded_bytes(const Kernels& kernels, const Matrix& matrix) {
  return matrix.in_8_bits ? kernels.rounded_bytes(matrix.inputs, matrix.block) : 0;
}
void round_rows(const Kernels& kernels, const Matrix& matrix, const Inputs& inputs, int rows, char* to);

// out = input . weight^T for adjacent tiles of outputs, rows `width` floats apart.
void multiply_tiles(const Kernels& kernels, const Matrix& matrix, int first_tile, int num_tiles, const Inputs& inputs,
                    int rows, float* out, Size width);

// The chunk's part of input . weight^T, as [rows][cut.width()].
void multiply_chunk(const Kernels& kernels, const Cut& cut, const Matrix& matrix, const Inputs& inputs, int chunk,
                    float* local);

// Number `row` of a packed weight, in float32.
void unpack_row(const Kernels& kernels, const Matrix& matrix, int row, float* to);

}  // namespace sage::cpu
