// The stages of a step: which there are, in order, and into how many chunks each is cut.
#pragma once

#include <algorithm>
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
  kEndSum,
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
  Rows rows;                 // that it works on
  int first_chunk = 0;       // of attention: others may belong to another stage
  Cut cut;                   // of a product
  StageKind product = kind;  // whose inputs kRound rounds to 8 bits, or whose outputs ranks add up

  // Rows of a chunk of element-wise work.
  Rows rows_of(int chunk) const { return {rows.first + chunk * kTokens, std::min(kTokens, rows.count - chunk * kTokens)}; }
};

// The matrix of a product; of experts that of their router, since they round the rows that they gather.
const Matrix& matrix_of(const Decoder::Model& model, StageKind product, int layer);
// A step to plan. `samples`: whether it ends with the next tokens.
struct Planned {
  const Decoder::Model& model;
  const AttentionWork& attention;
  const std::vector<DecoderStep::LayerExchange>& exchanges;
  int num_tokens, threads;
  bool samples;
};

// The row at which the second half of a step's rows begins. Products compute whole 12 rows best.
inline int half_of(int num_tokens) {
  return num_tokens < 48 ? divided(num_tokens, 2) : padded(divided(num_tokens, 2), 12);
}

// Where a layer's sums are in two pieces, its rows are computed in two halves. The sum of one half is under way while the other
// half is computed. Attention that chooses blocks, or reads some for several sequences, is computed for all rows at once.
// `routes` gets room for the step's tokens where the model has experts; a layer with experts is in one piece.
std::vector<Stage> plan_stages(const Planned& step, Routes* routes);

}  // namespace sage::cpu
