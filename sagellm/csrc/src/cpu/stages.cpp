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

namespace {

class Planner {
 public:
  Planner(const Planned& step, Routes* routes) : step_(step), model_(step.model), routes_(routes) {}

  std::vector<Stage> plan() {
    const int num_layers = static_cast<int>(model_.layers.size()), last = num_layers - 1;
    const Rows whole{0, step_.num_tokens};
    add_rows(StageKind::kEmbed, 0, whole);
    for (int i = 0; i < num_layers; ++i) {
      const auto before = i == 0 ? std::vector<Rows>{} : parts_of(i - 1), parts = parts_of(i);
      const bool in_halves = parts.size() > 1, has_experts = model_.layers[size(i)].experts.top_k > 0;
      if (in_halves && before.size() != 1 && step_.attention.has_halves()) {
        for (const Rows& part : parts) {
          if (i > 0) end_layer(i - 1, part, true);
          begin_layer(i, part);
          add_attention(i, part);
          add_summed_product(StageKind::kOut, i, part, true);
        }
      } else {
        for (const Rows& part : before) end_layer(i - 1, part, before.size() > 1);
        begin_layer(i, whole);
        choose_blocks(i);
        add_attention(i, whole);
        for (const Rows& part : parts) add_summed_product(StageKind::kOut, i, part, in_halves);
      }
      for (const Rows& part : parts) {
        end_attention(i, part, in_halves);
        if (has_experts)
          feed_experts(i, part);
        else
          feed(i, part, in_halves);
      }
    }
    for (const Rows& part : parts_of(last)) {
      end_layer(last, part, parts_of(last).size() > 1);
      add_rows(StageKind::kLast, last, part);
    }
    if (!step_.samples) return std::move(stages_);
    add_product(StageKind::kLogits, last, model_.head, whole);
    if (is_split()) add(StageKind::kGather, last, 1);
    add(StageKind::kSample, last, step_.num_tokens);
    return std::move(stages_);
  }

 private:
  bool is_split() const { return model_.shape.ranks > 1; }

  std::vector<Rows> parts_of(int layer) const {
    const int rows = step_.num_tokens, half = half_of(rows);
    const bool in_halves = is_split() && step_.exchanges[size(layer)].pieces > 1 && rows > 1 &&
                           model_.layers[size(layer)].experts.top_k == 0;
    return in_halves ? std::vector<Rows>{{0, half}, {half, rows - half}} : std::vector<Rows>{{0, rows}};
  }

  void add(StageKind kind, int layer, int chunks) {
    if (chunks > 0) stages_.push_back({kind, layer, chunks, {0, step_.num_tokens}, 0, {}, kind});
  }
  void add_rows(StageKind kind, int layer, Rows rows) { add_rows(kind, layer, rows, kind); }
  void add_rows(StageKind kind, int layer, Rows rows, StageKind product) {
    stages_.push_back({kind, layer, divided(rows.count, kTokens), rows, 0, {}, product});
  }
  void add_cut(StageKind kind, int layer, Rows rows, const Cut& cut) {
    // One row is rounded by each chunk for itself.
    if (step_.num_tokens > 1 && matrix_of(model_, kind, layer).in_8_bits) add_rows(StageKind::kRound, layer, rows, kind);
    stages_.push_back({kind, layer, cut.chunks(), rows, 0, cut, kind});
  }
  void add_product(StageKind kind, int layer, const Matrix& matrix, Rows rows, bool pairs = false) {
    add_cut(kind, layer, rows, Cut(*model_.kernels, rows, matrix, step_.threads, pairs));
  }
  void add_exchange(StageKind kind, int layer, Rows rows, StageKind product) {
    stages_.push_back({kind, layer, 1, rows, 0, {}, product});
  }

  // A product whose outputs ranks add up. In halves its sum begins now, and ends before the rows are used.
  void add_summed_product(StageKind kind, int layer, Rows rows, bool in_halves) {
    add_product(kind, layer, matrix_of(model_, kind, layer), rows);
    if (in_halves) add_exchange(StageKind::kBeginSum, layer, rows, kind);
  }
  void end_sum(StageKind product, int layer, Rows rows, bool in_halves) {
    if (is_split()) add_exchange(in_halves ? StageKind::kEndSum : StageKind::kSum, layer, rows, product);
  }

  void begin_layer(int layer, Rows rows) {
    add_product(StageKind::kQkv, layer, model_.layers[size(layer)].qkv, rows);
    add_rows(StageKind::kRotate, layer, rows);
  }

  // Stages before attention that reads some blocks.
  void choose_blocks(int layer) {
    const AttentionWork& attention = step_.attention;
    add(StageKind::kEncode, layer, attention.num_encoded(layer));
    add(StageKind::kObserve, layer, attention.num_observed(layer));
    add(StageKind::kWeigh, layer, attention.num_weighed(layer));
    add(StageKind::kChooseBlocks, layer, attention.num_chosen(layer));
    add(StageKind::kEstimate, layer, attention.num_estimated(layer));
  }

  void add_attention(int layer, Rows rows) {
    const auto add_chunks = [&](StageKind kind, Chunks chunks) {
      if (chunks.count > 0) stages_.push_back({kind, layer, chunks.count, rows, chunks.first, {}, kind});
    };
    add_chunks(StageKind::kAttend, step_.attention.attended(layer, rows));
    add_chunks(StageKind::kMerge, step_.attention.merged(layer, rows));
  }

  void end_attention(int layer, Rows rows, bool in_halves) {
    end_sum(StageKind::kOut, layer, rows, in_halves);
    if (model_.layers[size(layer)].after_attention != nullptr)
      add_rows(StageKind::kAddAttended, layer, rows);
    else if (is_split())
      add_rows(StageKind::kAddSum, layer, rows, StageKind::kOut);
  }

  void feed(int layer, Rows rows, bool in_halves) {
    add_product(StageKind::kFeed, layer, model_.layers[size(layer)].gate_up, rows, true);
    add_summed_product(StageKind::kDown, layer, rows, in_halves);
  }

  void end_layer(int layer, Rows rows, bool in_halves) {
    if (model_.layers[size(layer)].experts.top_k > 0) return;  // they have ended
    end_sum(StageKind::kDown, layer, rows, in_halves);
    if (model_.layers[size(layer)].after_feed_forward != nullptr)
      add_rows(StageKind::kAddFed, layer, rows);
    else if (is_split())
      add_rows(StageKind::kAddSum, layer, rows, StageKind::kDown);
  }

  // Ranks add up the shared expert and the others at once, or, not fused, one after the other.
  void feed_experts(int layer, Rows rows) {
    const Experts& experts = model_.layers[size(layer)].experts;
    const bool is_shared = model_.layers[size(layer)].down.weight != nullptr;
    add_product(StageKind::kRoute, layer, experts.router, rows);
    add(StageKind::kChoose, layer, 1);
    if (is_shared) {
      feed(layer, rows, false);
      if (is_split() && !step_.exchanges[size(layer)].fused) end_sum(StageKind::kDown, layer, rows, false);
    }
    if (routes_->blocks.empty()) *routes_ = Routes(step_.num_tokens, experts);
    const auto cut = [&](const Matrix& matrix, bool pairs) {
      return cut_of_experts(*model_.kernels, *routes_, matrix, step_.threads, pairs);
    };
    add_cut(StageKind::kFeedExperts, layer, rows, cut(experts.gate_up[0], true));
    add_cut(StageKind::kDownExperts, layer, rows, cut(experts.down[0], false));
    add_rows(StageKind::kAddExperts, layer, rows, StageKind::kDownExperts);
    end_sum(StageKind::kDownExperts, layer, rows, false);
    if (is_split()) add_rows(StageKind::kAddSum, layer, rows, StageKind::kDownExperts);
  }

  const Planned& step_;
  const Decoder::Model& model_;
  Routes* const routes_;
  std::vector<Stage> stages_;
};

}  // namespace

std::vector<Stage> plan_stages(const Planned& step, Routes* routes) { return Planner(step, routes).plan(); }

}  // namespace sage::cpu
