// Kernels of a step on the CPU, compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sagellm/decoder.h"

namespace sage::cpu {

// Weights are packed in tiles of so many outputs. A tile of bfloat16 holds pairs: [inputs / 2][kTile][2], one of
// float32 [inputs][kTile]; padding is zero.
constexpr int kTile = 32;
constexpr int kMaxBlock = 256;  // inputs that share a scale, in whole 16s
constexpr int kLanes = 16;     // outputs of a run of levels: a tile that is not plain is two of them

// Levels of 5 and 6 bits lie as those of 4 bits do, in words of 8. Their further bits lie behind these, in words of 32 or 16
// levels: `2 * high_bits` adjacent bits of each byte belong to a word of 8.
constexpr int bits_of(Format format) {
  return format == Format::kLevels4 ? 4 : format == Format::kLevels5 ? 5 : format == Format::kLevels6 ? 6 : 8;
}
constexpr int high_bits(int bits) { return bits < 8 ? bits - 4 : 0; }
constexpr int levels_of_word(int bits) { return bits < 8 ? 8 : 4; }

// Bytes of a block of inputs in a run: its scales, offsets and levels.
inline std::size_t bytes_of_block(int bits, int block) {
  return static_cast<std::size_t>(kLanes) * static_cast<std::size_t>(4 + block * bits / 8);
}

// Floats of 8 bits, e4m3: a sign, 4 bits of exponent and 3 of mantissa. They are computed as 2^kFloat8Shift times less, so
// that their scales are in the range of half precision.
constexpr int kFloat8Bias = 7, kFloat8Shift = 8;

enum class Type { kFloat32, kBFloat16 };

inline std::size_t size_of(Type type) { return type == Type::kFloat32 ? 4 : 2; }
inline int padded(int count, int to) { return (count + to - 1) / to * to; }

// Codes of 4 and of 8 bits of so many adjacent keys lie together in a cache; see `PagedCache`.
constexpr int kKeyGroup = 16;
constexpr int kCodeGroup = 16;  // tokens and numbers of a vector of codes of 2 bits
inline std::size_t code_bytes(int block_size, int head_size) { return static_cast<std::size_t>(block_size * head_size) / 4; }
constexpr int kMaxHead = 1024;  // numbers of a head, in a cache of few bits
inline bool has_key_groups(Format format) { return format == Format::kLevels4 || format == Format::kLevels8; }

// Queries of adjacent tokens against a range of keys of adjacent key heads.
struct Attend {
  int heads;                 // key heads; above 1 only in decode steps
  std::size_t result_stride;  // floats from the results of a key head to those of the next
  const void* query;         // of the first token's first head, in the kernels' input type
  std::size_t query_stride;  // elements from token to token
  int tokens, share;         // query rows are [tokens][share]; `share` heads use the key head
  int head_size;
  const char *keys, *values;              // the layer's caches, moved to the key head
  std::size_t block_stride, slot_stride;  // bytes
  Format format;                          // of keys and values; see `PagedCache`
  const char *key_scales, *value_scales;  // of few bits: scales and zero points, moved to the key head
  std::size_t scale_block_stride, scale_slot_stride;
  const std::int64_t* table;              // the sequence's blocks
  int block_shift;                        // log2 of the block size
  int first_position;                     // of the first query token
  // Query tokens of a tree, each with its number of ancestors among the new tokens, and these with itself, by depth, as numbers
  // from `first_new` on: [tokens][path_stride]. Null: a token sees all before it.
  const int *depths, *paths;
  int first_new, path_stride;
  int begin, end;                         // keys; `begin` is a multiple of the block size or of kSplit
  bool few;                               // few rows that decode: keys are read as they lie, not packed first
  int window;                             // keys that a token sees, itself included; 0: all
  float scale, softcap;                   // softcap 0: none
};

// Summaries of the keys of a key head, block by block. Without bounds the keys themselves are read.
struct KeySummary {
  const float* bounds = nullptr;  // smallest and largest numbers, `bounds_stride` numbers from block to block
  std::size_t bounds_stride = 0;
  const std::int32_t* sums = nullptr;   // of the block's keys, `sums_stride` numbers from block to block; null: bounds alone
  std::size_t sums_stride = 0;
  const std::uint8_t* codes = nullptr;  // keys in 2 bits, `codes_stride` bytes from block to block; null: bounds alone
  std::size_t codes_stride = 0;
  float reach = 1.F;  // without codes; see `Sparse::reach`
};

struct Kernels {
  const char* name;
  Type weights, inputs;  // types of packed weights (and of the KV cache), and of what they are multiplied with

  // out[row][0..tiles * kTile) (+)= input[row] . tiles, adjacent ones, for `rows` rows of `inputs` numbers. Each sum
  // runs over the inputs in order, so a row's result does not depend on the other rows.
  void (*multiply)(const void* input, std::size_t input_stride, int rows, const void* tile, int tiles, int inputs,
                   float* out, std::size_t out_stride, bool accumulate);
  // The same, without `accumulate`, for weights of few bits; see `Matrix`.
  void (*multiply_levels)(const void* input, std::size_t input_stride, int rows, const void* tile, int tiles,
                          int inputs, Format format, int block, float* out, std::size_t out_stride);
  // Inputs that are rounded to 8 bits, for weights with whole levels. Null where the instruction set has no such products.
  std::size_t (*rounded_bytes)(int inputs, int block);  // of a row
  void (*round_inputs)(const void* input, std::size_t input_stride, int rows, int inputs, Format format, int block, char* to);
  void (*multiply_rounded)(const char* rounded, int rows, const void* tile, int tiles, int inputs, Format format, int block,
                           float* out, std::size_t out_stride);
  // [outputs][inputs] row-major, as stored, to packed tiles.
  void (*pack)(const void* source, std::size_t stride, int outputs, int inputs, void* packed);
  // to[i] = from[i] * by[i], rounded to the input type; `by` may be null. Pads with zeros to an even count.
  void (*to_input)(const float* from, const float* by, int count, void* to);
  // to[i] = from[i], rounded to the weights' type, which the KV cache has too.
  void (*to_weight)(const float* from, int count, void* to);
  void (*from_weight)(const void* from, int count, float* to);
  // Heads [count][size] of a token to a cache of few bits. `key_of_group`: the number of a key in its group; `codes` are those
  // of the group's first token. -1: a head's codes lie in one run.
  void (*encode_heads)(const float* from, int count, int size, Format format, int key_of_group, std::size_t slot_stride,
                       char* codes, char* scales);
  // gate[i] = act(gate[i]) * up[i]; `gelu`: its tanh form, else SiLU.
  void (*gate)(float* gate, const float* up, int count, bool gelu);
  // Result rows [tokens * share][head_size] of each key head, unscaled, with the largest score and the sum of the
  // weights of each row.
  void (*attend)(const Attend& task, float* out, float* max, float* sum, char* scratch);
  std::size_t (*attend_bytes)(int rows, int heads, int head_size, bool few);
  // The weight that the queries of a key head give to each block of its sequence, added up over the queries. By a summary it is
  // an estimate, for one token.
  void (*block_weights)(const Attend& task, const KeySummary& summary, float* weights, char* scratch);
  std::size_t (*block_weights_bytes)(int rows, int head_size, int count);
  // Keys of a full block, number `block` of the task's table, to 2 bits between their bounds.
  void (*encode_keys)(const Attend& task, int block, const float* bounds, std::uint8_t* codes);
  // An estimate of the same for adjacent tokens, from one key of each strip of `stride` keys a query (XAttention, Xu et al. 2025).
  void (*strip_weights)(const Attend& task, int stride, float* weights, char* scratch);
  std::size_t (*strip_weights_bytes)(int rows, int stride, int head_size, int strips);
  // Turns [heads][size] numbers of one token by cos and sin, [size] each: the two halves of a head are a pair.
  void (*rotate)(float* heads, int count, int size, const float* cos, const float* sin);
  void (*scale)(float* values, float by, const float* bias, int count);     // `bias` may be null
  void (*add)(float* to, const float* from, const float* bias, int count);  // to += from + bias
  float (*sum_of_squares)(const float* from, int count);
  float (*largest)(const float* from, int count);
  float (*sum_of_powers)(const float* from, int count, float top);  // of exp(from - top)
};

// Keys that one task of a decoding sequence reads; fixed, so that sums do not depend on the batch.
constexpr int kSplit = 256;

// The kernels of the best instruction set that this processor has, at most `isa` ("" for any). Null: `isa` is unknown,
// or the processor lacks it.
const Kernels* find_kernels(const char* isa, Type weights);
// Kernels of the same instruction set whose attention reads a cache of another type: queries are float32 then.
const Kernels& kernels_of_cache(const Kernels& kernels, Type cache);

const Kernels* plain_kernels(Type weights);
const Kernels* avx2_kernels(Type weights);
const Kernels* avx512_kernels(Type weights);
const Kernels* avx512_bf16_kernels(Type weights);
const Kernels* amx_kernels(Type weights);

}  // namespace sage::cpu
