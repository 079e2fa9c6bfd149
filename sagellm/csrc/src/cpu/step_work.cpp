#include "step_work.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace sage::cpu {

StepWork::StepWork(std::shared_ptr<const Decoder::Model> model, std::shared_ptr<Decoder::Buffers> buffers,
         const PagedCache& cache, const DecoderStep& step, int threads)
    : model_(std::move(model)),
      buffers_(std::move(buffers)),
      shape_(model_->shape),
      kernels_(*model_->kernels),
      element_(size_of(kernels_.inputs)),
      num_tokens_(step.num_tokens),
      tokens_(step.tokens, step.tokens + step.num_tokens),
      hidden_(static_cast<char*>(step.hidden)),
      sampling_(step.sampling),
      sampled_(step.sampled),
      exchanges_(step.exchanges),
      attention_(cache, step, shape_, kernels_, buffers_->costs.get(), windows_of(*model_), threads,
                 half_of(step)),
      id_(next_id()) {
  for (const std::int64_t token : tokens_) {
    if (token < 0 || token >= shape_.vocabulary) throw std::invalid_argument("a token is outside of the vocabulary");
  }
  const Size head_size = size(shape_.head_size);
  angles_.reserve(size(num_tokens_) * 2 * head_size);
  for (int i = 0; i < num_tokens_; ++i) {
    const std::int64_t position = step.positions[i];
    if (position < 0 || position >= step.num_angles) throw std::invalid_argument("a position has no angles");
    const float* from = step.angles + static_cast<Size>(position) * 2 * head_size;
    angles_.insert(angles_.end(), from, from + 2 * head_size);
  }
  if (sampling_ != nullptr) {
    if (sampling_->rows != num_tokens_ || sampling_->vocabulary != model_->num_logits()) {
      throw std::invalid_argument("sampling is for another number of tokens, or another vocabulary");
    }
    sampled_->resize(size(num_tokens_));
  }
  attention_.use({buffers_->queries.data(), buffers_->attended.data(), buffers_->partials.data()});
  stages_ = plan_stages({*model_, attention_, exchanges_, num_tokens_, threads, sampling_ != nullptr}, &routes_);
}

Size StepWork::local_bytes() const {
  const int widest = std::max(shape_.hidden, (shape_.heads + 2 * shape_.kv_heads) * shape_.head_size);
  Size bytes = size(kTokens) * size(widest) * 4 + size(shape_.hidden) * 4;
  if (sampling_ != nullptr) bytes = std::max(bytes, size(model_->num_logits()) * 4);
  for (const Stage& stage : stages_) {
    bytes = std::max(bytes, stage.cut.bytes() + gathered_bytes(stage));
    if (stage.kind != StageKind::kRound) continue;
    bytes = std::max(bytes, size(kTokens) * rounded_bytes(kernels_, matrix_of(*model_, stage.product, stage.layer)));
  }
  return std::max(bytes, attention_.local_bytes());
}

void StepWork::compute(int stage, int chunk, char* local) const {
  const Stage& at = stages_[size(stage)];
  const DecoderLayer& layer = model_->layers[size(at.layer)];
  const Rows rows = at.rows_of(chunk);
  auto* result = reinterpret_cast<float*>(local);
  switch (at.kind) {
    case StageKind::kRound:
      return round(at, chunk, local);
    case StageKind::kEmbed:
      return embed(rows, result);
    case StageKind::kQkv:
      return multiply_normed(at, layer.qkv, chunk, result);
    case StageKind::kRotate:
      return rotate(layer, rows, result);
    case StageKind::kWeigh:
      return attention_.weigh(at.layer, chunk, local);
    case StageKind::kChooseBlocks:
      return;  // all of it is in the commit
    case StageKind::kEncode:
      return attention_.encode(at.layer, chunk, local);
    case StageKind::kObserve:
      return attention_.observe(at.layer, chunk, local);
    case StageKind::kEstimate:
      return attention_.estimate(at.layer, chunk, local);
    case StageKind::kAttend:
      return attention_.attend(at.layer, at.first_chunk + chunk, local);
    case StageKind::kMerge:
      return attention_.merge(at.layer, at.first_chunk + chunk, result);
    case StageKind::kOut:
      return multiply_chunk(kernels_, at.cut, layer.out, inputs_of(at), chunk, result);
    case StageKind::kBeginSum:
    case StageKind::kEndSum:
    case StageKind::kSum:
    case StageKind::kGather:
      return;  // all of it is in the commit
    case StageKind::kAddSum:
      return add_sum(at, rows, result);
    case StageKind::kAddAttended:
      return add_normed(layer.after_attention, rows, result);
    case StageKind::kRoute:
      return multiply_normed(at, layer.experts.router, chunk, result);
    case StageKind::kChoose:
      return;  // all of it is in the commit
    case StageKind::kFeed:
      return feed(at, layer, chunk, result);
    case StageKind::kDown:
      return multiply_chunk(kernels_, at.cut, layer.down, inputs_of(at), chunk, result);
    case StageKind::kFeedExperts:
      return feed_experts(at, layer.experts, chunk, result);
    case StageKind::kDownExperts:
      return down_experts(at, layer.experts, chunk, result);
    case StageKind::kAddExperts:
      return add_experts(at, rows, result);
    case StageKind::kAddFed:
      return add_normed(layer.after_feed_forward, rows, result);
    case StageKind::kLast:
      return last(rows, result);
    case StageKind::kLogits:
      return compute_logits(at, chunk, result);
    case StageKind::kSample:
      return sample(chunk, local);
  }
}

void StepWork::commit(int stage, int chunk, const char* local) {
  const Stage& at = stages_[size(stage)];
  const DecoderLayer& layer = model_->layers[size(at.layer)];
  const Rows rows = at.rows_of(chunk);
  const auto* result = reinterpret_cast<const float*>(local);
  switch (at.kind) {
    case StageKind::kRound:
      return commit_rounded(at, chunk, local);
    case StageKind::kEmbed:
      return commit_rows(rows, result, model_->layers[0].attention_norm);
    case StageKind::kQkv:
      return commit_product(at.cut, layer.qkv, chunk, result, buffers_->qkv.data(), layer.qkv.outputs);
    case StageKind::kRotate:
      return commit_rotated(at.layer, rows, result);
    case StageKind::kWeigh:
      return attention_.commit_weighed(chunk, local);
    case StageKind::kChooseBlocks:
      if (!attention_.chooses_jointly()) return attention_.choose(at.layer, nullptr);
      return exchange([&] { attention_.choose(at.layer, exchanges_[size(at.layer)].exchange); });
    case StageKind::kEncode:
      return attention_.commit_encoded(at.layer, chunk, local);
    case StageKind::kObserve:
      return attention_.commit_observed(chunk, local);
    case StageKind::kEstimate:
      return attention_.commit_estimated(chunk, local);
    case StageKind::kAttend:
      return attention_.commit_attended(at.layer, at.first_chunk + chunk, local);
    case StageKind::kMerge:
      return attention_.commit_merged(at.layer, at.first_chunk + chunk, result);
    case StageKind::kOut:
      return commit_sum(at, layer.out, chunk, result, is_split() || layer.after_attention != nullptr,
                        layer.feed_forward_norm);
    case StageKind::kBeginSum:
    case StageKind::kEndSum:
    case StageKind::kSum:
      return exchange_sums(at);
    case StageKind::kAddSum:
      return commit_rows(rows, result, at.product == StageKind::kOut ? layer.feed_forward_norm : next_norm(at.layer));
    case StageKind::kAddAttended:
      return commit_rows(rows, result, layer.feed_forward_norm);
    case StageKind::kRoute:
      return commit_product(at.cut, layer.experts.router, chunk, result, buffers_->routed.data(),
                            layer.experts.router.outputs);
    case StageKind::kChoose:
      return choose_experts(buffers_->routed.data(), num_tokens_, layer.experts, &routes_);
    case StageKind::kFeed:
      return commit_fed(at.cut, layer, chunk, result);
    case StageKind::kDown:
      return commit_sum(at, layer.down, chunk, result,
                        is_split() || layer.after_feed_forward != nullptr || layer.experts.top_k > 0,
                        next_norm(at.layer));
    case StageKind::kFeedExperts:
      return commit_fed_experts(at, layer.experts, chunk, result);
    case StageKind::kDownExperts:
      return commit_expert_sums(at, chunk, result);
    case StageKind::kAddExperts:
      return commit_experts(at, rows, result);
    case StageKind::kAddFed:
      return commit_rows(rows, result, next_norm(at.layer));
    case StageKind::kLast:
      return commit_last(rows, result);
    case StageKind::kLogits:
      return commit_product(at.cut, model_->head, chunk, result, buffers_->logits.data() + shape_.rank * model_->part(),
                            model_->num_logits());
    case StageKind::kGather:
      return exchange([&] {
        exchanges_.back().exchange->gather(buffers_->logits.data(), size(num_tokens_), size(shape_.logits),
                                           size(model_->part()));
      });
    case StageKind::kSample:
      return commit_sampled(chunk, local);
  }
}

std::vector<int> StepWork::windows_of(const Decoder::Model& model) {
  std::vector<int> windows;
  for (const DecoderLayer& layer : model.layers) windows.push_back(layer.window);
  return windows;
}

int StepWork::half_of(const DecoderStep& step) {
  const bool in_halves = std::any_of(step.exchanges.begin(), step.exchanges.end(), [](const auto& each) { return each.pieces > 1; });
  return in_halves && step.num_tokens > 1 ? cpu::half_of(step.num_tokens) : 0;
}

std::uint64_t StepWork::next_id() {
  static std::atomic<std::uint64_t> count{0};
  return ++count << 32U;
}

void StepWork::scales_of(int first, int count, float* scales) const {
  std::fill_n(scales, count, 0.F);
  for (int t = 0; t < hidden_tiles(); ++t) {
    const float* of_tile = &squares(first, t);
    for (int i = 0; i < count; ++i) scales[i] += of_tile[i];
  }
  for (int i = 0; i < count; ++i) {
    scales[i] = 1.F / std::sqrt(scales[i] / static_cast<float>(shape_.hidden) + shape_.epsilon);
  }
}

void StepWork::store_input(int row, int tile, const float* values, int count, const float* norm) {
  const Size first = size(tile) * kTile;
  kernels_.to_input(values, norm + first, count,
                    buffers_->input.data() + (size(row) * input_stride() + first) * element_);
  squares(row, tile) = kernels_.sum_of_squares(values, count);
}

void StepWork::embed(Rows rows, float* result) const {
  for (int row = rows.first; row < rows.end(); ++row, result += shape_.hidden) {
    unpack_row(kernels_, model_->embedding, static_cast<int>(tokens_[size(row)]), result);
    if (shape_.embedding_scale != 1.F) {
      for (int i = 0; i < shape_.hidden; ++i) result[i] *= shape_.embedding_scale;
    }
  }
}

void StepWork::commit_rows(Rows rows, const float* result, const float* norm) {
  for (int row = rows.first; row < rows.end(); ++row, result += shape_.hidden) {
    std::memcpy(buffers_->hidden.data() + size(row) * size(shape_.hidden), result, size(shape_.hidden) * 4);
    for (int tile = 0; tile < hidden_tiles(); ++tile) {
      store_input(row, tile, result + tile * kTile, std::min(kTile, shape_.hidden - tile * kTile), norm);
    }
  }
}

void StepWork::exchange_sums(const Stage& at) {
  Exchange& ranks = *exchanges_[size(at.layer)].exchange;
  const Size count = size(at.rows.count) * size(shape_.hidden);
  exchange([&] {
    if (at.kind == StageKind::kBeginSum) return ranks.begin_sum(sums_of(at, at.rows.first), count);
    if (at.kind == StageKind::kEndSum) return ranks.end_sum();
    ranks.add_up(sums_of(at, at.rows.first), count);
  });
}

void StepWork::add_sum(const Stage& at, Rows rows, float* result) const {
  const Size numbers = size(rows.count) * size(shape_.hidden);
  std::memcpy(result, buffers_->hidden.data() + size(rows.first) * size(shape_.hidden), numbers * 4);
  kernels_.add(result, sums_of(at, rows.first), nullptr, static_cast<int>(numbers));
  if (at.product != StageKind::kDownExperts || is_fused(at.layer)) return;
  const DecoderLayer& layer = model_->layers[size(at.layer)];
  if (layer.down.weight == nullptr) return;
  for (int row = rows.first; row < rows.end(); ++row, result += shape_.hidden) {
    const float* branch = buffers_->branch.data() + size(row) * size(shape_.hidden);
    const float share = share_of(layer.experts, row);
    for (int i = 0; i < shape_.hidden; ++i) result[i] += share * branch[i];
  }
}

void StepWork::add_normed(const float* norm, Rows rows, float* result) const {
  for (int row = rows.first; row < rows.end(); ++row, result += shape_.hidden) {
    const float* branch = buffers_->branch.data() + size(row) * size(shape_.hidden);
    const float* hidden = buffers_->hidden.data() + size(row) * size(shape_.hidden);
    const float squares = kernels_.sum_of_squares(branch, shape_.hidden);
    const float scale = 1.F / std::sqrt(squares / static_cast<float>(shape_.hidden) + shape_.epsilon);
    for (int i = 0; i < shape_.hidden; ++i) result[i] = hidden[i] + branch[i] * scale * norm[i];
  }
}

void StepWork::last(Rows rows, float* result) const {
  for (int row = rows.first; row < rows.end(); ++row, result += shape_.hidden) {
    const float* hidden = buffers_->hidden.data() + size(row) * size(shape_.hidden);
    const float scale = scale_of(row);
    for (int i = 0; i < shape_.hidden; ++i) result[i] = hidden[i] * scale * model_->last_norm[i];
    // Logits are those of the hidden states that a caller sees.
    void* narrow = result + size(rows.end() - row) * size(shape_.hidden);  // behind the last row
    kernels_.to_weight(result, shape_.hidden, narrow);
    kernels_.from_weight(narrow, shape_.hidden, result);
  }
}

void StepWork::commit_last(Rows rows, const float* result) {
  const Size row_bytes = size(shape_.hidden) * size_of(kernels_.weights);
  for (int row = rows.first; row < rows.end(); ++row, result += shape_.hidden) {
    if (hidden_ != nullptr) kernels_.to_weight(result, shape_.hidden, hidden_ + size(row) * row_bytes);
    if (sampling_ == nullptr) continue;
    kernels_.to_input(result, nullptr, shape_.hidden, buffers_->input.data() + size(row) * input_stride() * element_);
  }
}

void StepWork::compute_logits(const Stage& at, int chunk, float* result) const {
  const Matrix& head = model_->head;
  const Cut& cut = at.cut;
  multiply_chunk(kernels_, cut, head, inputs_of(at), chunk, result);
  const int first = cut.first_tile(chunk) * kTile,
            count = std::min(cut.num_tiles(chunk) * kTile, head.outputs - first);
  const float cap = shape_.logit_softcap;
  for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width()) {
    if (head.bias != nullptr) kernels_.add(result, head.bias + first, nullptr, count);
    if (cap == 0.F) continue;
    for (int i = 0; i < count; ++i) result[i] = cap * std::tanh(result[i] / cap);
  }
}

void StepWork::sample(int row, char* local) const {
  if (failure_) return;  // there are no logits
  const Size vocabulary = size(model_->num_logits());
  const float* logits = buffers_->logits.data() + size(row) * vocabulary;
  drawn() = sample_row(kernels_, logits, *sampling_, row, reinterpret_cast<float*>(local));
}

void StepWork::norm_heads(float* heads, int count, const float* norm) const {
  for (int head = 0; head < count; ++head, heads += shape_.head_size) {
    const float squares = kernels_.sum_of_squares(heads, shape_.head_size);
    const float scale = 1.F / std::sqrt(squares / static_cast<float>(shape_.head_size) + shape_.epsilon);
    for (int i = 0; i < shape_.head_size; ++i) heads[i] *= scale * norm[i];
  }
}

void StepWork::rotate(const DecoderLayer& layer, Rows rows, float* result) const {
  const int numbers = head_numbers() + 2 * key_numbers();
  for (int row = rows.first; row < rows.end(); ++row, result += numbers) {
    std::memcpy(result, buffers_->qkv.data() + size(row) * size(numbers), size(numbers) * 4);
    if (layer.query_norm != nullptr) norm_heads(result, shape_.heads, layer.query_norm);
    if (layer.key_norm != nullptr) norm_heads(result + head_numbers(), shape_.kv_heads, layer.key_norm);
    const float* angles = angles_.data() + size(row) * 2 * size(shape_.head_size);
    kernels_.rotate(result, shape_.heads + shape_.kv_heads, shape_.head_size, angles, angles + shape_.head_size);
  }
}

void StepWork::commit_rotated(int layer, Rows rows, const float* result) {
  const int numbers = head_numbers() + 2 * key_numbers();
  for (int row = rows.first; row < rows.end(); ++row, result += numbers) attention_.store(layer, row, result);
}

}  // namespace sage::cpu
