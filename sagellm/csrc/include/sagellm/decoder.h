// A decoder-only transformer, one call a step: embedding, layers and last norm over LMDeploy's KV blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sagellm/exchange.h"
#include "sagellm/sampling.h"
#include "sagellm/team.h"

namespace sage {

namespace cpu {
struct Kernels;
}

enum class Dtype { kFloat32, kBFloat16 };

// Format of a packed weight. A weight that is not plain is scale * level + offset. Each block of inputs of an output has a
// scale and an offset in half precision.
enum class Format {
  kPlain,    // numbers of the kernels' type
  kLevels4,  // levels 0 to 15
  kLevels5,  // levels 0 to 31, in blocks of whole 32s
  kLevels6,  // levels 0 to 63
  kLevels8,  // levels -128 to 127
  kFloat8,   // levels are floats of 8 bits (e4m3), divided by 256
};

// A packed weight [outputs, inputs] and its bias; the memory is the caller's.
struct Matrix {
  const void* weight = nullptr;
  const float* bias = nullptr;
  int outputs = 0, inputs = 0;
  Format format = Format::kPlain;
  int block = 0;           // inputs that share a scale, except in a plain weight
  bool in_8_bits = false;  // with whole levels: inputs are rounded to 8 bits, each block of a row with its own scale
  // Input `order[i]` belongs to the weight's number i; null: they are in order. [inputs]
  const std::int32_t* order = nullptr;
};

// Kernels of one instruction set and dtype of weights.
class CpuKernels {
 public:
  // `isa`: plain, avx2, avx512, avx512_bf16, amx, or "" for the best of this processor.
  // Throws std::invalid_argument if it is unknown or the processor lacks it.
  CpuKernels(const char* isa, Dtype weights);

  const char* isa() const;
  Dtype inputs() const;  // what weights are multiplied with
  bool has_8_bits() const;  // whether `Matrix::in_8_bits` may be set
  Dtype weights() const { return weights_; }
  std::size_t packed_bytes(int outputs, int inputs) const;
  // `source`: [outputs, inputs] with `stride` numbers from row to row.
  void pack(const void* source, std::size_t stride, int outputs, int inputs, void* packed) const;
  // to[i] = number `rows[i]` of the weight, in float32, [count][inputs].
  void unpack(const Matrix& matrix, const std::int64_t* rows, int count, float* to) const;
  const cpu::Kernels& table() const { return *table_; }

 private:
  Dtype weights_;
  const cpu::Kernels* table_;
};

std::size_t packed_levels_bytes(const Matrix& matrix);
// `levels`: [outputs, inputs], `scales` and `offsets`: [outputs, inputs / block]. The matrix says sizes, format and block,
// and `weight` is not read. Throws std::invalid_argument for a plain format, or inputs that are no whole blocks.
void pack_levels(const Matrix& matrix, const std::int8_t* levels, const std::uint16_t* scales,
                 const std::uint16_t* offsets, void* packed);

enum class Activation { kNone, kSilu, kGelu };

// out = input weight^T + bias, for [rows, inputs] to [rows, outputs]. With a gate the weight holds tiles of the gate
// and of the other half in turn, and the result has half of the outputs: act(gate) * up. `input` has the weights'
// dtype; `out` is float32 with `wide`.
void multiply(Team& team, const CpuKernels& kernels, const Matrix& matrix, Activation gate, const void* input, int rows,
              void* out, int outputs, bool wide);

struct DecoderShape {
  int hidden = 0, heads = 0, kv_heads = 0, head_size = 0, vocabulary = 0;
  float epsilon = 1e-6F, attention_scale = 1.F, softcap = 0.F, logit_softcap = 0.F, embedding_scale = 1.F;
  Activation activation = Activation::kSilu;
  // Ranks that split the layers. Heads and matrices are this rank's: `out` and `down` have a part of the inputs, and the other
  // matrices a part of the outputs. Each rank has `head.outputs` of the logits, one part after the other; the last may have less.
  int ranks = 1, rank = 0;
  int replicas = 1;  // adjacent ranks that have the same key head, where there are fewer key heads than ranks
  int logits = 0;    // of all ranks
};

// A mixture of experts. Each token goes through the `top_k` ones that the softmax of the router's outputs prefers, and
// the results are added up, weighted by it.
struct Experts {
  Matrix router;                      // an output for each expert, and one for the gate of a shared expert
  std::vector<Matrix> gate_up, down;  // of each expert
  int top_k = 0;                      // 0: the layer has no experts
  bool renormalize = false;           // the weights of a token's experts add up to 1
};

struct DecoderLayer {
  Matrix qkv, out;
  Matrix gate_up, down;  // gate_up in tiles in turn; beside experts: of the shared one, or without weights
  Experts experts;
  const float *attention_norm = nullptr, *feed_forward_norm = nullptr;    // before each part
  const float *after_attention = nullptr, *after_feed_forward = nullptr;  // norms of their outputs, or null
  const float *query_norm = nullptr, *key_norm = nullptr;                 // of each head, or null
  int window = 0;  // tokens that a token sees, itself included; 0: all
};

// The KV cache: each layer's keys and values are [blocks][block size][key heads][head size].
//
// A number of few bits is scale * (code - zero). Codes are 0 to 15 (kLevels4), with numbers i and head size / 2 + i in one
// byte; 0 to 255 (kLevels8); or e4m3 floats without a zero point (kFloat8). Scale and zero point of each head of a token have the
// type of the weights, [blocks][block size][key heads][2]. Codes of keys of 4 and 8 bits lie in groups of 16 tokens: a head's
// words of 4 bytes, [16 tokens][words], are [words][16 tokens] in the group's slots, one slot after the other.
struct PagedCache {
  std::vector<char*> keys, values;                // by layer
  std::size_t block_stride = 0, slot_stride = 0;  // bytes
  int num_blocks = 0, block_size = 0;
  Format format = Format::kPlain;
  Dtype dtype = Dtype::kFloat32;              // of plain numbers; it may differ from that of the weights
  std::vector<char*> key_scales, value_scales;  // by layer, where numbers are of few bits
  std::size_t scale_block_stride = 0, scale_slot_stride = 0;
  // Smallest and largest numbers of the keys of each block, [layers][blocks][key heads][2][head size], kept up to date as keys
  // are written; null: no policy wants them.
  float* bounds = nullptr;
  // Keys of full blocks in 2 bits a number, between their bounds, [layers][blocks][key heads][`code_bytes`]; null: not wanted.
  std::uint8_t* codes = nullptr;
  // Sums of the keys of each block in units of 2^-`kKeySumBits`, [layers][blocks][key heads][head size]; null: not wanted. They
  // are whole numbers, so it does not matter which thread adds first.
  std::int32_t* key_sums = nullptr;
};
constexpr int kKeySumBits = 12;

// Decode steps whose attention reads some blocks of a sequence. Each sequence has one new token.
struct Sparse {
  enum class Weights {
    kNone,
    kBounds,  // estimates from the bounds of the block's keys
    kSpread,  // the same, around their mean
    kCodes,   // estimates from its keys in 2 bits; a block that is not full is estimated by its bounds
    kExact,   // of attention to all keys
  };
  // Facts by which blocks of a layer are chosen. Where ranks split the model, a choice for all key heads gets those of all
  // ranks, and a choice for a key head gets all of its queries.
  struct View {
    int layer;
    const float* queries;         // [sequences][heads][head size]
    const float* weights;         // [sequences][key heads][table width], what a key head's queries give to each block
    std::int64_t* chosen;         // result, [sequences][choices][most]: positions of blocks in the table, rising
  };
  std::vector<int> keep;  // blocks that each sequence reads; not fewer than it has: it reads all
  Weights weights = Weights::kNone;
  // With bounds: a block's estimate is the product with the middle of its bounds, and so much of the way to the largest
  // product that a key inside of them can have. With a spread: the product with the mean key, and so many times the root of
  // the summed squares of the query's products with half of each range: a key's numbers go their own ways.
  float reach = 1.F;
  int whole_layers = 0;   // so many layers, the first ones, read all blocks
  bool by_head = false;   // a choice for each key head, else one for all of them
  int first = 1, last = 1;  // so many blocks at each end are chosen whatever their weight is
  // Chooses, and returns what is wrong with the choice, or nothing. Empty: the blocks with the most weight are chosen. The last
  // block of a sequence, which takes its new token, must be among them.
  std::function<std::string(const View&)> choose;
};

// Prompts whose attention reads some blocks. Adjacent tokens are computed together, in tiles of `Decoder::prompt_tile`. A tile
// reads the blocks of its own tokens, and those of the blocks before them that are chosen.
struct SparsePrompts {
  // Blocks before each tile that all layers read, sequence by sequence, tile by tile: positions in the table, rising. No counts:
  // each key head of a layer chooses for itself, by the weights that XAttention estimates (Xu et al. 2025, arXiv:2503.16428).
  std::vector<int> counts;
  std::vector<std::int64_t> positions;
  int stride = 16;         // tokens of a strip: an estimate takes one key of each strip for each query
  float share = 1.F;       // a tile reads at most so much of the blocks up to its own
  float threshold = 1.F;   // and not more than have so much of the estimated weight
  int min_blocks = 0;      // and not less than so many
  int first = 1, last = 1;  // so many blocks at the beginning, and before the tile's own, are chosen first
  int whole_layers = 0;    // so many layers, the first ones, read all blocks
};

// Attention weights that are added up: what the last queries of a sequence give to each of its blocks.
struct Observed {
  std::vector<int> queries;  // of each sequence
  float* weights = nullptr;  // result, [sequences][key heads][table width], added to by each layer, query and head
};

// When sequences read common keys together. It pays where the kernels, which are measured once for a cache, take less time.
enum class Sharing { kNever, kWhereItPays, kAlways };

// Sequences of a step, their new tokens one after the other.
struct DecoderStep {
  int num_tokens = 0, num_sequences = 0, table_width = 0;
  bool is_decoding = false;  // each sequence has its last token, and maybe guesses; else tokens of prompts
  const std::int64_t* tokens = nullptr;
  const std::int64_t *query_lengths = nullptr, *lengths = nullptr;  // new tokens; tokens with the new ones, 0: no cache
  const std::int64_t* tables = nullptr;                             // [sequences][table_width], block numbers
  const float* angles = nullptr;                                    // [num_angles][cos and sin][head size]
  int num_angles = 0;
  const std::int64_t* positions = nullptr;  // rows of the angles, [tokens]
  // Guesses in trees: the parent of each new token among its sequence's new tokens, which comes before it; -1 of the first one. A
  // token sees the tokens before the step and its ancestors, and `positions` count these. Keys lie in the order of the tokens.
  // Null: a token sees all tokens before it. [tokens]
  const std::int64_t* parents = nullptr;
  void* hidden = nullptr;                   // result, [tokens][hidden] of the weights' dtype
  // Wishes by which a token is drawn for each token of the step, if any; the result then has as many entries.
  std::shared_ptr<const Sampling> sampling;
  std::vector<Sampled>* sampled = nullptr;
  std::shared_ptr<const Sparse> sparse;  // null: attention reads all blocks
  std::shared_ptr<const SparsePrompts> sparse_prompts;  // as `sparse`, for a step of prompts
  std::shared_ptr<const Observed> observed;             // null: not wanted
  // For a model that ranks split: the exchange that adds up the parts of each layer. The last one gathers the logits.
  struct LayerExchange {
    Exchange* exchange = nullptr;
    int pieces = 1;     // 2: half of the rows is computed while what the other half has computed is added up
    bool fused = true;  // what experts and a shared expert have computed is one sum
  };
  std::vector<LayerExchange> exchanges;
  // Whether keys that decoding sequences have in common, by their first blocks, are read once for all of them. Not where a
  // layer has a window, or with `sparse`.
  Sharing sharing = Sharing::kNever;
};

// Results of a step beside its tokens.
struct StepReport {
  std::string failure;       // what was wrong with a choice of blocks; the results are then not to be used
  double prompt_blocks = 0;  // that the tiles of `sparse_prompts` read, in the mean of layers and key heads
  double exchange_s = 0;     // in which the step did nothing but exchange numbers with other ranks
};

// Sums run in an order that does not depend on the batch, so a sequence gets the same numbers beside any others.
class Decoder {
 public:
  // `embedding`: packed; row i is token i's. `head`: the output layer. Throws std::invalid_argument for matrices that do
  // not fit together.
  Decoder(const CpuKernels& kernels, const DecoderShape& shape, std::vector<DecoderLayer> layers, Matrix embedding,
          const float* last_norm, Matrix head);
  ~Decoder();

  // Throws std::invalid_argument for tokens, lengths, positions or blocks outside of the model and the cache, and what the
  // exchange throws. A step whose choice of blocks failed may be run again.
  StepReport run(Team& team, const PagedCache& cache, const DecoderStep& step);
  // Whether sequences may have trees of guesses: numbers in the cache are plain, and the queries of a token are few.
  bool takes_trees(const PagedCache& cache) const;
  // Copies keys and values of tokens to other slots of a plain cache, in order. Slot s of block b is b * block_size + s. Throws
  // std::invalid_argument for slots outside of the cache.
  void move(const PagedCache& cache, const std::vector<std::pair<std::int64_t, std::int64_t>>& slots) const;
  int prompt_tile() const;  // tokens of a tile of a prompt; the last one of a sequence may have fewer

  struct Model;
  struct Buffers;

 private:
  std::shared_ptr<Model> model_;
  std::shared_ptr<Buffers> buffers_;
};

}  // namespace sage
