#include "product.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace sage {

namespace cpu {

namespace {

template <typename Input>
void copy_in_order(const Matrix& matrix, const char* input, Size stride, int rows, Size wide, char* to) {
  for (int row = 0; row < rows; ++row) {
    const auto* from = reinterpret_cast<const Input*>(input) + size(row) * stride;
    auto* numbers = reinterpret_cast<Input*>(to) + size(row) * wide;
    for (int i = 0; i < matrix.inputs; ++i) numbers[i] = from[matrix.order[i]];
    for (Size i = size(matrix.inputs); i < wide; ++i) numbers[i] = Input{};
  }
}

// The inputs in the order of the weight, [rows][padded inputs].
Inputs in_order(const Kernels& kernels, const Matrix& matrix, const Inputs& inputs, int rows) {
  if (matrix.order == nullptr) return inputs;
  static thread_local std::vector<char> ordered;
  const Size wide = size(padded(matrix.inputs, 2));
  ordered.resize(size(rows) * wide * size_of(kernels.inputs));
  if (kernels.inputs == Type::kFloat32)
    copy_in_order<float>(matrix, inputs.numbers, inputs.stride, rows, wide, ordered.data());
  else
    copy_in_order<std::uint16_t>(matrix, inputs.numbers, inputs.stride, rows, wide, ordered.data());
  return {ordered.data(), wide};
}

}  // namespace

void round_rows(const Kernels& kernels, const Matrix& matrix, const Inputs& inputs, int rows, char* to) {
  const Inputs ordered = in_order(kernels, matrix, inputs, rows);
  kernels.round_inputs(ordered.numbers, ordered.stride, rows, matrix.inputs, matrix.format, matrix.block, to);
}

void multiply_tiles(const Kernels& kernels, const Matrix& matrix, int first_tile, int num_tiles, const Inputs& inputs,
                    int rows, float* out, Size width) {
  static thread_local std::vector<char> scratch;
  const char* tile = static_cast<const char*>(matrix.weight) + size(first_tile) * tile_bytes(kernels, matrix);
  if (matrix.in_8_bits) {
    const char* rounded = inputs.rounded;
    if (rounded == nullptr) {
      static thread_local std::uint64_t key = 0;
      if (inputs.key == 0 || inputs.key != key) {
        scratch.resize(std::max(scratch.size(), size(rows) * rounded_bytes(kernels, matrix)));
        round_rows(kernels, matrix, inputs, rows, scratch.data());
        key = inputs.key;
      }
      rounded = scratch.data();
    }
    return kernels.multiply_rounded(rounded, rows, tile, num_tiles, matrix.inputs, matrix.format, matrix.block, out, width);
  }
  const Inputs ordered = in_order(kernels, matrix, inputs, rows);
  if (matrix.format != Format::kPlain) {
    return kernels.multiply_levels(ordered.numbers, ordered.stride, rows, tile, num_tiles, matrix.inputs, matrix.format,
                                   matrix.block, out, width);
  }
  const int wide = kernels.weights == Type::kFloat32 ? matrix.inputs : padded(matrix.inputs, 2);
  kernels.multiply(ordered.numbers, ordered.stride, rows, tile, num_tiles, wide, out, width, false);
}

void multiply_chunk(const Kernels& kernels, const Cut& cut, const Matrix& matrix, const Inputs& inputs, int chunk,
                    float* local) {
  const Size first = size(cut.first_row(chunk));
  Inputs rows = inputs;
  rows.numbers += first * inputs.stride * size_of(kernels.inputs);
  if (rows.rounded != nullptr) rows.rounded += first * rounded_bytes(kernels, matrix);
  multiply_tiles(kernels, matrix, cut.first_tile(chunk), cut.num_tiles(chunk), rows, cut.num_rows(chunk), local,
                 size(cut.width()));
}

namespace {

// Where the levels of an output are in a tile: its run, and its lane there.
struct Lane {
  Size run, lane;
  explicit Lane(int row) : run(size(row % kTile / kLanes)), lane(size(row % kLanes)) {}
};

// Where a level of a lane is in the words of a block: its word, and its place there in bits. With 5 and 6 bits these are the
// low 4 bits, and `high_word` has the others.
struct Place {
  int word, shift, high_word = 0, high_shift = 0;
  std::uint32_t low_mask = 255, high_mask = 0;
  Place(int input, Format format, int block) {
    const int bits = bits_of(format), in_word = levels_of_word(bits), at = input % in_word;
    word = input / in_word;
    shift = format == Format::kLevels8 ? 8 * at : 16 * (at % 2) + 32 / in_word * (at / 2);
    if (bits == 8) return;
    low_mask = 15;
    const int high = high_bits(bits);
    if (high == 0) return;
    const int words = 4 / high;  // whose further bits share a word
    high_word = block / in_word + word / words;
    high_shift = shift / 8 * 8 + high * (2 * (word % words) + shift / 4 % 2);
    high_mask = (1U << static_cast<unsigned>(high)) - 1;
  }
};

float level_of(std::uint32_t word, Format format) {
  if (format != Format::kLevels8 && format != Format::kFloat8) return static_cast<float>(word);
  if (format == Format::kLevels8) return static_cast<float>(static_cast<std::int8_t>(word));
  const int exponent = static_cast<int>(word >> 3 & 15U), mantissa = static_cast<int>(word & 7U);
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -2 - kFloat8Bias)
                                   : std::ldexp(static_cast<float>(8 + mantissa), exponent - 3 - kFloat8Bias);
  return std::ldexp((word & 128U) != 0 ? -size : size, -kFloat8Shift);
}

float from_half(std::uint16_t half) {
  const std::uint32_t bits = (half & 0x7fffU) << 13, sign = (half & 0x8000U) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 0x1p112F;
  std::uint32_t result;
  std::memcpy(&result, &value, 4);
  result |= sign;
  std::memcpy(&value, &result, 4);
  return value;
}

void unpack_levels(const Kernels& kernels, const Matrix& matrix, int row, float* to) {
  const auto [run, lane] = Lane(row);
  const Size tile = tile_bytes(kernels, matrix);
  const char* from = static_cast<const char*>(matrix.weight) + size(row / kTile) * tile + run * tile / 2;
  for (int i = 0; i < matrix.inputs; i += matrix.block, from += bytes_of_block(bits_of(matrix.format), matrix.block)) {
    const auto* halves = reinterpret_cast<const std::uint16_t*>(from);
    const auto* words = reinterpret_cast<const std::uint32_t*>(from + size(kLanes) * 4);
    const float scale = from_half(halves[lane]), offset = from_half(halves[size(kLanes) + lane]);
    for (int j = 0; j < matrix.block; ++j) {
      const Place place(j, matrix.format, matrix.block);
      const std::uint32_t low = words[size(place.word) * kLanes + lane] >> place.shift & place.low_mask;
      const std::uint32_t high = words[size(place.high_word) * kLanes + lane] >> place.high_shift & place.high_mask;
      const float level = level_of(low | high << 4U, matrix.format);
      to[matrix.order == nullptr ? i + j : matrix.order[i + j]] = scale * level + offset;
    }
  }
}

}  // namespace

void unpack_row(const Kernels& kernels, const Matrix& matrix, int row, float* to) {
  if (matrix.format != Format::kPlain) return unpack_levels(kernels, matrix, row, to);
  const bool wide = kernels.weights == Type::kFloat32;
  const int inputs = wide ? matrix.inputs : padded(matrix.inputs, 2);
  const Size tile = size(row / kTile) * size(kTile) * size(inputs), lane = size(row % kTile);
  if (wide) {
    const auto* from = static_cast<const float*>(matrix.weight) + tile + lane;
    for (int i = 0; i < inputs; ++i) to[i] = from[size(i) * kTile];
    return;
  }
  const auto* from = static_cast<const std::uint16_t*>(matrix.weight) + tile + 2 * lane;
  for (int i = 0; i < matrix.inputs; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(from[size(i / 2) * 2 * kTile + size(i % 2)]) << 16;
    std::memcpy(to + i, &bits, 4);
  }
}

}  // namespace cpu

using cpu::Cut;
using cpu::kTile;
using cpu::padded;
using cpu::Size;
using cpu::size;

CpuKernels::CpuKernels(const char* isa, Dtype weights)
    : weights_(weights),
      table_(cpu::find_kernels(isa, weights == Dtype::kFloat32 ? cpu::Type::kFloat32 : cpu::Type::kBFloat16)) {
  if (table_ == nullptr) {
    throw std::invalid_argument(std::string("this processor has no kernels of the instruction set '") + isa +
                                "'; known are plain, avx2, avx512, avx512_bf16, amx");
  }
}

const char* CpuKernels::isa() const { return table_->name; }

bool CpuKernels::has_8_bits() const { return table_->rounded_bytes != nullptr; }

Dtype CpuKernels::inputs() const {
  return table_->inputs == cpu::Type::kFloat32 ? Dtype::kFloat32 : Dtype::kBFloat16;
}

Size CpuKernels::packed_bytes(int outputs, int inputs) const {
  const int wide = weights_ == Dtype::kFloat32 ? inputs : padded(inputs, 2);
  return size(padded(outputs, kTile)) * size(wide) * cpu::size_of(table_->weights);
}

void CpuKernels::pack(const void* source, Size stride, int outputs, int inputs, void* packed) const {
  table_->pack(source, stride, outputs, inputs, packed);
}

void CpuKernels::unpack(const Matrix& matrix, const std::int64_t* rows, int count, float* to) const {
  for (int i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= matrix.outputs) throw std::invalid_argument("a row is outside of the weight");
  }
  // A row of bfloat16 may end in padding.
  std::vector<float> row(size(padded(matrix.inputs, 2)));
  for (int i = 0; i < count; ++i, to += matrix.inputs) {
    cpu::unpack_row(*table_, matrix, static_cast<int>(rows[i]), row.data());
    std::memcpy(to, row.data(), size(matrix.inputs) * 4);
  }
}

Size packed_levels_bytes(const Matrix& matrix) {
  if (matrix.format == Format::kPlain) throw std::invalid_argument("a plain weight has no levels");
  if (matrix.block < 16 || matrix.block > cpu::kMaxBlock || matrix.block % 16 != 0 || matrix.inputs % matrix.block != 0)
    throw std::invalid_argument("a block has 16 to 256 inputs, in 16s, and the inputs are whole blocks");
  if (matrix.format == Format::kLevels5 && matrix.block % 32 != 0)
    throw std::invalid_argument("a block of levels of 5 bits has whole 32 inputs");
  return size(padded(matrix.outputs, kTile)) / cpu::kLanes * size(matrix.inputs / matrix.block) *
         cpu::bytes_of_block(cpu::bits_of(matrix.format), matrix.block);
}

void pack_levels(const Matrix& matrix, const std::int8_t* levels, const std::uint16_t* scales,
                 const std::uint16_t* offsets, void* packed) {
  std::memset(packed, 0, packed_levels_bytes(matrix));
  const int blocks = matrix.inputs / matrix.block;
  const Size block_bytes = cpu::bytes_of_block(cpu::bits_of(matrix.format), matrix.block);
  for (int row = 0; row < matrix.outputs; ++row) {
    const auto [run, lane] = cpu::Lane(row);
    char* to = static_cast<char*>(packed) + (2 * size(row / kTile) + run) * size(blocks) * block_bytes;
    for (int b = 0; b < blocks; ++b, to += block_bytes, ++scales, ++offsets, levels += matrix.block) {
      auto* halves = reinterpret_cast<std::uint16_t*>(to);
      auto* words = reinterpret_cast<std::uint32_t*>(to + size(cpu::kLanes) * 4);
      halves[lane] = *scales;
      halves[size(cpu::kLanes) + lane] = *offsets;
      for (int i = 0; i < matrix.block; ++i) {
        const cpu::Place place(i, matrix.format, matrix.block);
        const std::uint32_t level = static_cast<std::uint8_t>(levels[i]);
        words[size(place.word) * cpu::kLanes + lane] |= (level & place.low_mask) << place.shift;
        words[size(place.high_word) * cpu::kLanes + lane] |= (level >> 4U & place.high_mask) << place.high_shift;
      }
    }
  }
}

namespace {

class Product : public Work {
 public:
  Product(const cpu::Kernels& kernels, const Matrix& matrix, Activation gate, const void* input, int rows, void* out,
          int outputs, bool wide, int threads)
      : kernels_(kernels),
        matrix_(matrix),
        gate_(gate),
        out_(static_cast<char*>(out)),
        outputs_(outputs),
        wide_(wide || kernels.weights == cpu::Type::kFloat32),
        cut_(kernels, {0, rows}, matrix, threads, gate != Activation::kNone),
        stride_(size(padded(matrix.inputs, 2))),
        input_(size(rows) * stride_ * cpu::size_of(kernels.inputs)) {
    // A copy: the caller may free its tensor while a thread that is late still reads it.
    std::vector<float> numbers(size(matrix.inputs));
    const auto* from = static_cast<const char*>(input);
    for (int row = 0; row < rows; ++row) {
      kernels.from_weight(from + size(row) * size(matrix.inputs) * cpu::size_of(kernels.weights), matrix.inputs,
                          numbers.data());
      kernels.to_input(numbers.data(), nullptr, matrix.inputs,
                       input_.data() + size(row) * stride_ * cpu::size_of(kernels.inputs));
    }
  }
  int num_stages() const override { return 1; }
  int num_chunks(int) const override { return cut_.chunks(); }
  Size local_bytes() const override { return cut_.bytes(); }

  void compute(int, int chunk, char* local) const override {
    auto* sums = reinterpret_cast<float*>(local);
    cpu::multiply_chunk(kernels_, cut_, matrix_, {input_.data(), stride_}, chunk, sums);
    for (int row = 0; row < cut_.num_rows(chunk); ++row, sums += cut_.width()) {
      if (matrix_.bias != nullptr) {
        const int first = cut_.first_tile(chunk) * kTile, count = std::min(cut_.width(), matrix_.outputs - first);
        for (int i = 0; i < count; ++i) sums[i] += matrix_.bias[first + i];
      }
      if (gate_ == Activation::kNone) continue;
      for (int t = 0; t < cut_.num_tiles(chunk); t += 2) {
        kernels_.gate(sums + t * kTile, sums + (t + 1) * kTile, kTile, gate_ == Activation::kGelu);
      }
    }
  }

  void commit(int, int chunk, const char* local) override {
    const int unit = gate_ == Activation::kNone ? 1 : 2;
    const Size bytes = wide_ ? 4 : 2;
    for (int row = 0; row < cut_.num_rows(chunk); ++row) {
      const auto* sums = reinterpret_cast<const float*>(local) + size(row) * size(cut_.width());
      for (int t = 0; t < cut_.num_tiles(chunk); t += unit) {
        const int first = (cut_.first_tile(chunk) + t) / unit * kTile, count = std::min(kTile, outputs_ - first);
        char* to = out_ + (size(cut_.first_row(chunk) + row) * size(outputs_) + size(first)) * bytes;
        if (wide_)
          std::memcpy(to, sums + t * kTile, size(count) * 4);
        else
          kernels_.to_weight(sums + t * kTile, count, to);
      }
    }
  }

 private:
  const cpu::Kernels& kernels_;
  const Matrix matrix_;
  const Activation gate_;
  char* const out_;
  const int outputs_;  // numbers of a row of the result
  const bool wide_;
  const Cut cut_;
  const Size stride_;
  std::vector<char> input_;
};

}  // namespace

void multiply(Team& team, const CpuKernels& kernels, const Matrix& matrix, Activation gate, const void* input, int rows,
              void* out, int outputs, bool wide) {
  if (rows == 0) return;
  team.run(std::make_shared<Product>(kernels.table(), matrix, gate, input, rows, out, outputs, wide, team.threads()));
}

}  // namespace sage
