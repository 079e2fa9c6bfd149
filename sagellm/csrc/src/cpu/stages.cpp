#include "stages.h"

#include <algorithm>

namespace sage::cpu {

const Matrix& matrix_of(const Decoder::Model& model, StageKind product, int layer_number) {
  const DecoderLayer& layer = model.layers[size(layer_number)];
  switch (product) {
    case StageKind::kQkv:
      return layer.qkv;
    case StageKind::kOut:
      return layer.out;
    case StageKind::kFeed:
      return layer.gate_up;
    case StageKind::kDown:
      return layer.down;
    case StageKind::kLogits:
      return model.head;
    default:
      return layer.experts.router;  // experts round the rows that they gather
  }
}

Piece piece_of(const Decoder::Model& model, const Matrix& whole, const Stage& at) {
  const int tiles = divided(model.shape.hidden, kTile);
  const auto begin_of = [&](int piece) { return tiles * piece / at.pieces; };
  const int tile = begin_of(at.piece), column = tile * kTile;
  Piece piece{whole, column, std::min(begin_of(at.piece + 1) * kTile, model.shape.hidden) - column};
  piece.matrix.outputs = piece.columns;
  piece.matrix.weight = static_cast<const char*>(whole.weight) + size(tile) * tile_bytes(*model.kernels, whole);
  if (whole.bias != nullptr) piece.matrix.bias = whole.bias + column;
  return piece;
}

std::vector<Stage> plan_stages(const Planned& step, Routes* routes) {
  const Decoder::Model& model = step.model;
  const AttentionWork& attention = step.attention;
  const Kernels& kernels = *model.kernels;
  const int num_tokens = step.num_tokens, threads = step.threads;
  const bool is_split = model.shape.ranks > 1;
  std::vector<Stage> stages;
  const int groups = divided(num_tokens, kTokens);
  const auto add = [&](StageKind kind, int layer, int chunks) { stages.push_back({kind, layer, chunks, {}}); };
  // One row is rounded by each chunk for itself.
  const auto add_rounding = [&](StageKind product, int layer) {
    if (num_tokens == 1 || !matrix_of(model, product, layer).in_8_bits) return;
    stages.push_back({StageKind::kRound, layer, groups, {}, product});
  };
  const auto add_product = [&](StageKind kind, int layer, const Cut& cut) {
    add_rounding(kind, layer);
    stages.push_back({kind, layer, cut.chunks(), cut});
  };
  const auto cut_of = [&](const Matrix& matrix, bool pairs) {
    return Cut(kernels, num_tokens, matrix, threads, pairs);
  };
  // Products whose outputs ranks add up, and then to the residual stream if they need no norm before.
  const auto add_summed_product = [&](StageKind kind, int layer, bool is_last) {
    const Matrix& matrix = matrix_of(model, kind, layer);
    const int tiles = divided(model.shape.hidden, kTile);
    const int pieces = is_split && is_last ? std::min(step.exchanges[size(layer)].pieces, tiles) : 1;
    add_rounding(kind, layer);
    for (int piece = 0; piece < pieces; ++piece) {
      Stage stage{kind, layer, 0, {}, kind, piece, pieces};
      stage.cut = cut_of(piece_of(model, matrix, stage).matrix, false);
      stage.chunks = stage.cut.chunks();
      stages.push_back(stage);
      if (pieces > 1) stages.push_back({StageKind::kBeginSum, layer, 1, {}, kind, piece, pieces});
    }
    return pieces;
  };
  const auto add_sum_of_ranks = [&](StageKind product, int layer, int pieces, bool is_last) {
    if (!is_split) return;
    stages.push_back({StageKind::kSum, layer, 1, {}, product, 0, pieces});
    if (is_last) stages.push_back({StageKind::kAddSum, layer, groups, {}, product, 0, pieces});
  };
  add(StageKind::kEmbed, 0, groups);
  for (int i = 0; i < static_cast<int>(model.layers.size()); ++i) {
    const DecoderLayer& layer = model.layers[size(i)];
    add_product(StageKind::kQkv, i, cut_of(layer.qkv, false));
    add(StageKind::kRotate, i, groups);
    const auto add_attention = [&](StageKind kind, int chunks) {
      if (chunks > 0) add(kind, i, chunks);
    };
    add_attention(StageKind::kEncode, attention.num_encoded(i));
    add_attention(StageKind::kObserve, attention.num_observed(i));
    add_attention(StageKind::kWeigh, attention.num_weighed(i));
    add_attention(StageKind::kChooseBlocks, attention.num_chosen(i));
    add_attention(StageKind::kEstimate, attention.num_estimated(i));
    add_attention(StageKind::kAttend, attention.num_attended(i));
    add_attention(StageKind::kMerge, attention.num_merged(i));
    const bool ends_attention = layer.after_attention == nullptr;
    add_sum_of_ranks(StageKind::kOut, i, add_summed_product(StageKind::kOut, i, ends_attention), ends_attention);
    if (layer.after_attention != nullptr) add(StageKind::kAddAttended, i, groups);
    const Experts& experts = layer.experts;
    if (experts.top_k > 0) {
      add_product(StageKind::kRoute, i, cut_of(experts.router, false));
      add(StageKind::kChoose, i, 1);
    }
    if (layer.down.weight != nullptr) {
      add_product(StageKind::kFeed, i, cut_of(layer.gate_up, true));
      const bool ends_layer = experts.top_k == 0 && layer.after_feed_forward == nullptr;
      const int pieces = add_summed_product(StageKind::kDown, i, ends_layer);
      if (experts.top_k == 0) add_sum_of_ranks(StageKind::kDown, i, pieces, ends_layer);
    }
    if (experts.top_k > 0) {
      if (routes->blocks.empty()) *routes = Routes(num_tokens, experts);
      add_product(StageKind::kFeedExperts, i, cut_of_experts(kernels, *routes, experts.gate_up[0], threads, true));
      add_product(StageKind::kDownExperts, i, cut_of_experts(kernels, *routes, experts.down[0], threads, false));
      add(StageKind::kAddExperts, i, groups);
      add_sum_of_ranks(StageKind::kDown, i, 1, true);
    }
    if (layer.after_feed_forward != nullptr) add(StageKind::kAddFed, i, groups);
  }
  const int last = static_cast<int>(model.layers.size()) - 1;
  add(StageKind::kLast, last, groups);
  if (!step.samples) return stages;
  add_product(StageKind::kLogits, last, cut_of(model.head, false));
  if (is_split) add(StageKind::kGather, last, 1);
  add(StageKind::kSample, last, num_tokens);
  return stages;
}

}  // namespace sage::cpu
