// The stages of a step: which there are, in order, and into how many chunks each is cut.
#pragma once

#include <vector>

#include "attention_work.h"
#include "decoder_model.h"
#include "experts.h"
#include "product.h"

namespace sage::cpu {

constexpr int kTokens = 8;  // of a chunk of element-wise work

enum class StageKind {
  kRound,
  kEmbed,
  kQkv,
  kRotate,
  kEncode,
  kObserve,
  kWeigh,
  kChooseBlocks,
  kEstimate,
  kAttend,
  kMerge,
  kOut,
  kBeginSum,
  kSum,
  kAddSum,
  kAddAttended,
  kRoute,
  kChoose,
  kFeed,
  kDown,
  kFeedExperts,
  kDownExperts,
  kAddExperts,
  kAddFed,
  kLast,
  kLogits,
  kGather,
  kSample
};

struct Stage {
  StageKind kind;
  int layer;
  int chunks;
  Cut cut;                    // of a product
  StageKind product = kind;   // whose inputs kRound rounds to 8 bits
  int piece = 0, pieces = 1;  // of the outputs of a product
};

// A piece of a product's outputs.
struct Piece {
  Matrix matrix;
  int column, columns;
};

// The matrix of a product; of experts that of their router, since they round the rows that they gather.
const Matrix& matrix_of(const Decoder::Model& model, StageKind product, int layer);
// The piece of `whole` that a stage computes.
Piece piece_of(const Decoder::Model& model, const Matrix& whole, const Stage& at);

// A step to plan. `samples`: whether it ends with the next tokens.
struct Planned {
  const Decoder::Model& model;
  const AttentionWork& attention;
  const std::vector<DecoderStep::LayerExchange>& exchanges;
  int num_tokens, threads;
  bool samples;
};

// `routes` gets room for the step's tokens where the model has experts.
std::vector<Stage> plan_stages(const Planned& step, Routes* routes);

}  // namespace sage::cpu
