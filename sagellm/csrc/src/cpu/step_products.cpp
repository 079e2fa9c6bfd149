// The products of a step, and its experts.
#include <cmath>
#include <cstring>

#include "step_work.h"

namespace sage::cpu {

Inputs StepWork::inputs_of(const Stage& at) const {
  const Matrix& matrix = matrix_of(*model_, at.product, at.layer);
  auto& rows = at.product == StageKind::kOut    ? buffers_->attended
               : at.product == StageKind::kDown ? buffers_->fed
                                                : buffers_->input;
  const bool is_rounded = num_tokens_ > 1 && matrix.in_8_bits && at.kind != StageKind::kRound;
  const auto stage = static_cast<std::uint64_t>(&at - stages_.data());
  return {rows.data(), size(padded(matrix.inputs, 2)), is_rounded ? buffers_->rounded.data() : nullptr, id_ + stage};
}

void StepWork::round(const Stage& at, int chunk, char* local) const {
  const Rows rows = at.rows_of(chunk);
  Inputs inputs = inputs_of(at);
  inputs.numbers += size(rows.first) * inputs.stride * element_;
  round_rows(kernels_, matrix_of(*model_, at.product, at.layer), inputs, rows.count, local);
}

void StepWork::commit_rounded(const Stage& at, int chunk, const char* local) {
  const Rows rows = at.rows_of(chunk);
  const Size bytes = rounded_bytes(kernels_, matrix_of(*model_, at.product, at.layer));
  std::memcpy(buffers_->rounded.data() + size(rows.first) * bytes, local, size(rows.count) * bytes);
}

void StepWork::multiply_normed(const Stage& at, const Matrix& matrix, int chunk, float* result) const {
  const Cut& cut = at.cut;
  multiply_chunk(kernels_, cut, matrix, inputs_of(at), chunk, result);
  const int first = cut.first_tile(chunk) * kTile;
  const int count = std::min(cut.num_tiles(chunk) * kTile, padded(matrix.outputs, kTile) - first);
  float scales[kPanel];
  scales_of(cut.first_row(chunk), cut.num_rows(chunk), scales);
  for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width()) {
    const float scale = scales[row];
    const int biased = matrix.bias == nullptr ? 0 : std::min(count, matrix.outputs - first);
    if (biased > 0) kernels_.scale(result, scale, matrix.bias + first, biased);
    kernels_.scale(result + biased, scale, nullptr, count - biased);
  }
}

void StepWork::commit_product(const Cut& cut, const Matrix& matrix, int chunk, const float* result, float* to, int stride) {
  const int first = cut.first_tile(chunk) * kTile,
            count = std::min(cut.num_tiles(chunk) * kTile, matrix.outputs - first);
  to += size(cut.first_row(chunk)) * size(stride) + size(first);
  for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width(), to += stride) {
    std::memcpy(to, result, size(count) * 4);
  }
}

void StepWork::gate(float* result, int tiles) const {
  for (int t = 0; t < tiles; t += 2) {
    kernels_.gate(result + t * kTile, result + (t + 1) * kTile, kTile, shape_.activation == Activation::kGelu);
  }
}

void StepWork::feed(const Stage& at, const DecoderLayer& layer, int chunk, float* result) const {
  const Cut& cut = at.cut;
  multiply_normed(at, layer.gate_up, chunk, result);
  for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width()) gate(result, cut.num_tiles(chunk));
}

void StepWork::store_fed(const Cut& cut, const Matrix& down, int chunk, const float* result, char* row) {
  for (int t = 0; t < cut.num_tiles(chunk); t += 2) {
    const int first = (cut.first_tile(chunk) + t) / 2 * kTile, count = std::min(kTile, down.inputs - first);
    kernels_.to_input(result + t * kTile, nullptr, count, row + size(first) * element_);
  }
}

void StepWork::commit_fed(const Cut& cut, const DecoderLayer& layer, int chunk, const float* result) {
  const Size row_bytes = size(padded(layer.down.inputs, 2)) * element_;
  for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width()) {
    store_fed(cut, layer.down, chunk, result, buffers_->fed.data() + size(cut.first_row(chunk) + row) * row_bytes);
  }
}

void StepWork::commit_sum(const Stage& at, const Matrix& matrix, int chunk, const float* result, bool waits,
                          const float* norm) {
  const Cut& cut = at.cut;
  for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width()) {
    const int token = cut.first_row(chunk) + row;
    float* to_row = (waits ? buffers_->branch : buffers_->hidden).data() + size(token) * size(shape_.hidden);
    for (int t = 0; t < cut.num_tiles(chunk); ++t) {
      const int tile = cut.first_tile(chunk) + t, first = tile * kTile, count = std::min(kTile, shape_.hidden - first);
      float* to = to_row + first;
      if (waits) std::fill_n(to, count, 0.F);
      kernels_.add(to, result + t * kTile, matrix.bias == nullptr ? nullptr : matrix.bias + first, count);
      if (!waits) store_input(token, tile, to, count, norm);
    }
  }
}

int StepWork::gathered_inputs(const StageKind kind, const Experts& experts) {
  return kind == StageKind::kFeedExperts ? experts.gate_up[0].inputs : experts.down[0].inputs;
}

Size StepWork::gathered_bytes(const Stage& stage) const {
  if (stage.kind != StageKind::kFeedExperts && stage.kind != StageKind::kDownExperts) return 0;
  const DecoderLayer& layer = model_->layers[size(stage.layer)];
  return size(stage.cut.panel) * size(padded(gathered_inputs(stage.kind, layer.experts), 2)) * element_;
}

void StepWork::multiply_block(const Stage& at, const Matrix& matrix, const ExpertBlock& block, const int* slots,
                    int slots_of_input, const char* inputs, int chunk, float* result) const {
  const Size stride = size(padded(matrix.inputs, 2)), row_bytes = stride * element_;
  const char* from = inputs + size(slots[0] / slots_of_input) * row_bytes;
  if (block.count > 1) {
    char* gathered = reinterpret_cast<char*>(result) + at.cut.bytes();
    for (int i = 0; i < block.count; ++i) {
      std::memcpy(gathered + size(i) * row_bytes, inputs + size(slots[i] / slots_of_input) * row_bytes, row_bytes);
    }
    from = gathered;
  }
  multiply_tiles(kernels_, matrix, at.cut.first_tile(chunk), at.cut.num_tiles(chunk), {from, stride}, block.count,
                      result, size(at.cut.width()));
}

void StepWork::feed_experts(const Stage& at, const Experts& experts, int chunk, float* result) const {
  const int number = chunk % at.cut.panels;
  const ExpertBlock block = routes_.blocks[size(number)];
  if (block.count == 0) return;
  const int* slots = routes_.slots_of(number);
  multiply_block(at, experts.gate_up[size(block.expert)], block, slots, experts.top_k, buffers_->input.data(), chunk,
                 result);
  for (int i = 0; i < block.count; ++i, result += at.cut.width()) {
    kernels_.scale(result, scale_of(slots[i] / experts.top_k), nullptr, at.cut.num_tiles(chunk) * kTile);
    gate(result, at.cut.num_tiles(chunk));
  }
}

void StepWork::commit_fed_experts(const Stage& at, const Experts& experts, int chunk, const float* result) {
  const int number = chunk % at.cut.panels, count = routes_.blocks[size(number)].count;
  const Matrix& down = experts.down[0];
  const Size row_bytes = size(padded(down.inputs, 2)) * element_;
  for (int i = 0; i < count; ++i, result += at.cut.width()) {
    store_fed(at.cut, down, chunk, result, buffers_->expert_fed.data() + size(routes_.slots_of(number)[i]) * row_bytes);
  }
}

void StepWork::down_experts(const Stage& at, const Experts& experts, int chunk, float* result) const {
  const int number = chunk % at.cut.panels;
  const ExpertBlock block = routes_.blocks[size(number)];
  if (block.count == 0) return;
  const int* slots = routes_.slots_of(number);
  multiply_block(at, experts.down[size(block.expert)], block, slots, 1, buffers_->expert_fed.data(), chunk, result);
  for (int i = 0; i < block.count; ++i, result += at.cut.width()) {
    kernels_.scale(result, routes_.weights[size(slots[i])], nullptr, at.cut.num_tiles(chunk) * kTile);
  }
}

void StepWork::commit_expert_sums(const Stage& at, int chunk, const float* result) {
  const int number = chunk % at.cut.panels, count = routes_.blocks[size(number)].count;
  const int first = at.cut.first_tile(chunk) * kTile,
            width = std::min(at.cut.num_tiles(chunk) * kTile, shape_.hidden - first);
  for (int i = 0; i < count; ++i, result += at.cut.width()) {
    const Size slot = size(routes_.slots_of(number)[i]);
    std::memcpy(buffers_->expert_branch.data() + slot * size(shape_.hidden) + size(first), result, size(width) * 4);
  }
}

float StepWork::share_of(const Experts& experts, int row) const {
  return 1.F / (1.F + std::exp(-buffers_->routed[size(row + 1) * size(experts.router.outputs) - 1]));
}

void StepWork::add_experts(const Stage& at, Rows rows, float* result) const {
  const DecoderLayer& layer = model_->layers[size(at.layer)];
  const int top_k = layer.experts.top_k;
  const bool has_shared = layer.down.weight != nullptr && is_fused(at.layer);
  for (int row = rows.first; row < rows.end(); ++row, result += shape_.hidden) {
    const float* hidden = buffers_->hidden.data() + size(row) * size(shape_.hidden);
    const float* expert = buffers_->expert_branch.data() + size(row * top_k) * size(shape_.hidden);
    std::fill_n(result, shape_.hidden, 0.F);
    for (int k = 0; k < top_k; ++k, expert += shape_.hidden) kernels_.add(result, expert, nullptr, shape_.hidden);
    if (has_shared) {
      const float* branch = buffers_->branch.data() + size(row) * size(shape_.hidden);
      const float share = share_of(layer.experts, row);
      for (int i = 0; i < shape_.hidden; ++i) result[i] += share * branch[i];
    }
    if (!is_split()) kernels_.add(result, hidden, nullptr, shape_.hidden);
  }
}

void StepWork::commit_experts(const Stage& at, Rows rows, const float* result) {
  if (!is_split()) return commit_rows(rows, result, next_norm(at.layer));
  std::memcpy(sums_of(at, rows.first), result, size(rows.count) * size(shape_.hidden) * 4);
}

}  // namespace sage::cpu
