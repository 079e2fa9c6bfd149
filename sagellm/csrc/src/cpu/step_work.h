// A step of a decoder: what each of its stages computes and commits.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "attention_work.h"
#include "decoder_model.h"
#include "experts.h"
#include "stages.h"

namespace sage::cpu {

class StepWork : public Work {
 public:
  // Throws std::invalid_argument for tokens, positions and sampling that do not fit.
  StepWork(std::shared_ptr<const Decoder::Model> model, std::shared_ptr<Decoder::Buffers> buffers,
           const PagedCache& cache, const DecoderStep& step, int threads);

  StepReport report() const {
    if (failure_) std::rethrow_exception(failure_);
    StepReport report = attention_.report();
    report.exchange_s = exchange_s_;
    return report;
  }
  Size num_logits() const {
    return sampling_ == nullptr ? 0 : size(num_tokens_) * size(model_->num_logits());
  }
  Size num_partials() const { return attention_.num_partials(); }
  int num_stages() const override { return static_cast<int>(stages_.size()); }
  int num_chunks(int stage) const override { return stages_[size(stage)].chunks; }

  Size local_bytes() const override;
  void compute(int stage, int chunk, char* local) const override;
  void commit(int stage, int chunk, const char* local) override;

 private:
  static std::vector<int> windows_of(const Decoder::Model& model);
  // The row at which the second half begins; 0 if no layer is computed in halves.
  static int half_of(const DecoderStep& step);

  bool is_split() const { return shape_.ranks > 1; }
  int head_numbers() const { return shape_.heads * shape_.head_size; }
  int key_numbers() const { return shape_.kv_heads * shape_.head_size; }
  int hidden_tiles() const { return divided(shape_.hidden, kTile); }
  Size input_stride() const { return size(padded(shape_.hidden, 2)); }
  const float* next_norm(int layer) const {
    return size(layer) + 1 < model_->layers.size() ? model_->layers[size(layer) + 1].attention_norm : model_->last_norm;
  }

  // A number that no other step has, with room for the numbers of its stages.
  static std::uint64_t next_id();

  // ---- rows of the residual stream

  // Sum of squares of a tile of a row. The rows of a tile lie side by side, since one thread writes them.
  float& squares(int row, int tile) const {
    return buffers_->squares[size(tile) * size(padded(num_tokens_, 16)) + size(row)];
  }

  // 1 / root mean square of rows [first, first + count) of the residual stream, from the sums of squares of their tiles.
  void scales_of(int first, int count, float* scales) const;
  float scale_of(int row) const {
    float scale;
    scales_of(row, 1, &scale);
    return scale;
  }

  // Numbers [first, first + count) of a row are known: what the next product needs of them. The row's scale, which
  // needs all of the row, is applied to the product's result.
  void store_input(int row, int tile, const float* values, int count, const float* norm);
  void embed(Rows rows, float* result) const;
  void commit_rows(Rows rows, const float* result, const float* norm);

  // The numbers that ranks add up, from a row on.
  float* sums_of(const Stage& at, int row) const {
    auto& sums = at.product == StageKind::kDownExperts && !is_fused(at.layer) ? buffers_->expert_sums : buffers_->branch;
    return sums.data() + size(row) * size(shape_.hidden);
  }
  bool is_fused(int layer) const { return exchanges_.empty() || exchanges_[size(layer)].fused; }
  // The share of a layer's shared expert in a row.
  float share_of(const Experts& experts, int row) const;
  void exchange_sums(const Stage& at);

  // hidden += branch
  void add_sum(const Stage& at, Rows rows, float* result) const;

  // hidden += norm(branch)
  void add_normed(const float* norm, Rows rows, float* result) const;
  void last(Rows rows, float* result) const;
  void commit_last(Rows rows, const float* result);

  // ---- the next tokens

  void compute_logits(const Stage& at, int chunk, float* result) const;

  // After the first failure the rest of the step runs without exchanges, and its results are not used.
  template <typename Call>
  void exchange(const Call& call) noexcept {
    if (failure_) return;
    const auto begin = std::chrono::steady_clock::now();
    try {
      call();
    } catch (...) {
      failure_ = std::current_exception();
    }
    exchange_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  // A thread keeps what it drew until it commits it, or draws again.
  void sample(int row, char* local) const;
  void commit_sampled(int row, const char*) { (*sampled_)[size(row)] = std::move(drawn()); }
  static Sampled& drawn() {
    static thread_local Sampled sampled;
    return sampled;
  }

  // ---- products

  // Inputs of a product, or of that which a stage rounds them for.
  Inputs inputs_of(const Stage& at) const;
  void round(const Stage& at, int chunk, char* local) const;
  void commit_rounded(const Stage& at, int chunk, const char* local);

  // The product of normed rows: their scales come last.
  void multiply_normed(const Stage& at, const Matrix& matrix, int chunk, float* result) const;

  // `to`: [tokens][stride]
  void commit_product(const Cut& cut, const Matrix& matrix, int chunk, const float* result, float* to, int stride);
  void gate(float* result, int tiles) const;
  void feed(const Stage& at, const DecoderLayer& layer, int chunk, float* result) const;

  // Gated numbers of a row, as input of the matrix after them.
  void store_fed(const Cut& cut, const Matrix& down, int chunk, const float* result, char* row);
  void commit_fed(const Cut& cut, const DecoderLayer& layer, int chunk, const float* result);

  // The result of a part of the layer goes to the residual stream, or waits for other ranks, for its own norm or for experts.
  void commit_sum(const Stage& at, const Matrix& matrix, int chunk, const float* result, bool waits, const float* norm);

  // ---- experts

  // Inputs of an expert's rows, which are gathered behind the result if there are several.
  static int gathered_inputs(StageKind kind, const Experts& experts);
  Size gathered_bytes(const Stage& stage) const;
  void multiply_block(const Stage& at, const Matrix& matrix, const ExpertBlock& block, const int* slots,
                      int slots_of_input, const char* inputs, int chunk, float* result) const;
  void feed_experts(const Stage& at, const Experts& experts, int chunk, float* result) const;
  void commit_fed_experts(const Stage& at, const Experts& experts, int chunk, const float* result);
  void down_experts(const Stage& at, const Experts& experts, int chunk, float* result) const;
  void commit_expert_sums(const Stage& at, int chunk, const float* result);

  // hidden += experts of the row, in the order of their weights, and its shared expert. Where ranks split them, this rank's
  // part is their sum alone, without the shared expert if that one is added up by itself.
  void add_experts(const Stage& at, Rows rows, float* result) const;
  void commit_experts(const Stage& at, Rows rows, const float* result);

  // ---- attention

  void norm_heads(float* heads, int count, const float* norm) const;
  void rotate(const DecoderLayer& layer, Rows rows, float* result) const;
  void commit_rotated(int layer, Rows rows, const float* result);

  const std::shared_ptr<const Decoder::Model> model_;
  const std::shared_ptr<Decoder::Buffers> buffers_;
  const DecoderShape& shape_;
  const Kernels& kernels_;
  const Size element_;
  const int num_tokens_;
  const std::vector<std::int64_t> tokens_;
  std::vector<float> angles_;  // cos and sin of each token
  char* const hidden_;
  const std::shared_ptr<const Sampling> sampling_;
  std::vector<Sampled>* const sampled_;
  const std::vector<DecoderStep::LayerExchange> exchanges_;
  std::exception_ptr failure_;  // of the exchange
  double exchange_s_ = 0;
  AttentionWork attention_;
  const std::uint64_t id_;
  std::vector<Stage> stages_;
  Routes routes_;  // of the layer at work
};

}  // namespace sage::cpu
