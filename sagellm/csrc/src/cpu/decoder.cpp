#include "sagellm/decoder.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "decoder_model.h"
#include "step_work.h"

namespace sage {

using cpu::kTile;
using cpu::padded;
using cpu::Size;
using cpu::size;

void Decoder::Buffers::reserve(const Model& model, int tokens, Size partials_needed, Size logits_needed) {
  const auto& shape = model.shape;
  const Size element = cpu::size_of(model.kernels->inputs);
  if (tokens > capacity) {
    capacity = tokens;
    const Size n = size(tokens);
    hidden.resize(n * size(shape.hidden));
    branch.resize(n * size(shape.hidden));
    squares.resize(size(padded(tokens, 16)) * size(cpu::divided(shape.hidden, kTile)));
    qkv.resize(n * size((shape.heads + 2 * shape.kv_heads) * shape.head_size));
    input.resize(n * size(padded(shape.hidden, 2)) * element);
    queries.resize(n * size(shape.heads * shape.head_size) * 4);  // of the attention's type
    attended.resize(n * size(padded(shape.heads * shape.head_size, 2)) * element);
    const auto grow = [](auto* buffer, Size needed) { buffer->resize(std::max(buffer->size(), needed)); };
    grow(&rounded, n * cpu::rounded_bytes(*model.kernels, model.head));
    for (const DecoderLayer& layer : model.layers) {
      const Experts& experts = layer.experts;
      for (const Matrix* each : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) {
        grow(&rounded, n * cpu::rounded_bytes(*model.kernels, *each));
      }
      if (layer.down.weight != nullptr) grow(&fed, n * size(padded(layer.down.inputs, 2)) * element);
      if (experts.top_k == 0) continue;
      const Size slots = n * size(experts.top_k);
      grow(&routed, n * size(experts.router.outputs));
      grow(&expert_fed, slots * size(padded(experts.down[0].inputs, 2)) * element);
      grow(&expert_branch, slots * size(shape.hidden));
      if (shape.ranks > 1) grow(&expert_sums, n * size(shape.hidden));
    }
  }
  if (partials_needed > partials.size()) partials.resize(partials_needed);
  if (logits_needed > logits.size()) logits.resize(logits_needed);
}

namespace {

void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

void check_feed_forward(const Matrix& gate_up, const Matrix& down, int hidden) {
  require(gate_up.inputs == hidden && down.outputs == hidden && gate_up.outputs == 2 * padded(down.inputs, kTile),
          "a feed-forward part does not fit the hidden size");
}

void check_layer(const DecoderLayer& layer, const Experts& others, const DecoderShape& shape) {
  const Experts& experts = layer.experts;
  const int attended = shape.heads * shape.head_size, keys = shape.kv_heads * shape.head_size;
  require(layer.qkv.inputs == shape.hidden && layer.qkv.outputs == attended + 2 * keys && layer.out.inputs == attended &&
              layer.out.outputs == shape.hidden,
          "an attention part does not fit the hidden size and the heads");
  const bool is_shared = layer.down.weight != nullptr;
  if (is_shared) check_feed_forward(layer.gate_up, layer.down, shape.hidden);
  require(is_shared || experts.top_k != 0, "a layer needs a feed-forward part or experts");
  if (experts.top_k == 0) return;
  const int num_experts = static_cast<int>(experts.down.size());
  require(experts.top_k > 0 && experts.top_k <= num_experts, "a token goes through between 1 and all experts");
  require(experts.router.inputs == shape.hidden && experts.router.outputs == num_experts + (is_shared ? 1 : 0),
          "a router has an output for each expert, and one for a shared expert");
  require(experts.gate_up.size() == experts.down.size(), "an expert has two matrices");
  for (Size i = 0; i < experts.down.size(); ++i) {
    check_feed_forward(experts.gate_up[i], experts.down[i], shape.hidden);
    require(experts.down[i].inputs == experts.down[0].inputs && experts.down[i].format == experts.down[0].format &&
                experts.gate_up[i].format == experts.gate_up[0].format,
            "experts of a layer have one size and type");
  }
  require(experts.top_k == others.top_k && experts.down.size() == others.down.size(),
          "all layers with experts have as many");
  require(layer.after_feed_forward == nullptr, "the sum of experts has no norm");
}

}  // namespace

Decoder::Decoder(const CpuKernels& kernels, const DecoderShape& shape, std::vector<DecoderLayer> layers,
                 Matrix embedding, const float* last_norm, Matrix head)
    : model_(std::make_shared<Model>(Model{&kernels.table(), shape, std::move(layers), embedding, last_norm, head})),
      buffers_(std::make_shared<Buffers>()) {
  if (model_->layers.empty()) throw std::invalid_argument("a decoder needs a layer");
  if (shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0)
    throw std::invalid_argument("heads do not divide by key heads");
  require(shape.ranks == 1 || head.outputs <= model_->part(), "the output layer has more than this rank's part");
  require(head.inputs == shape.hidden && embedding.inputs == shape.hidden && embedding.outputs >= shape.vocabulary,
          "the embedding or the output layer does not fit the hidden size and the vocabulary");
  const Experts* first = nullptr;
  for (const DecoderLayer& layer : model_->layers) {
    if (first == nullptr && layer.experts.top_k != 0) first = &layer.experts;
    check_layer(layer, first == nullptr ? layer.experts : *first, shape);
  }
}

Decoder::~Decoder() = default;

bool Decoder::takes_trees(const PagedCache& cache) const {
  const auto& shape = model_->shape;
  return cache.format == Format::kPlain && shape.heads / shape.kv_heads <= cpu::kFewRows;
}

void Decoder::move(const PagedCache& cache, const std::vector<std::pair<std::int64_t, std::int64_t>>& slots) const {
  require(cache.format == Format::kPlain, "keys and values of few bits stay where they are");
  const Size bytes = size(model_->shape.kv_heads * model_->shape.head_size) * (cache.dtype == Dtype::kFloat32 ? 4 : 2);
  const auto place = [&](std::int64_t slot) {
    require(slot >= 0 && slot / cache.block_size < cache.num_blocks, "a slot is outside of the cache");
    return static_cast<Size>(slot / cache.block_size) * cache.block_stride +
           static_cast<Size>(slot % cache.block_size) * cache.slot_stride;
  };
  std::vector<std::pair<Size, Size>> places;
  for (const auto& [from, to] : slots) places.emplace_back(place(from), place(to));
  for (const auto* caches : {&cache.keys, &cache.values}) {
    for (char* const layer : *caches) {
      for (const auto& [from, to] : places) std::memmove(layer + to, layer + from, bytes);
    }
  }
}

int Decoder::prompt_tile() const { return cpu::prompt_tile(model_->shape); }

StepReport Decoder::run(Team& team, const PagedCache& cache, const DecoderStep& given) {
  DecoderStep step = given;
  for (const DecoderLayer& layer : model_->layers) {
    if (layer.window != 0) step.sharing = Sharing::kNever;
  }
  require(step.exchanges.size() == (model_->shape.ranks > 1 ? model_->layers.size() : 0),
          "ranks that split a model need an exchange for each layer, others have none");
  for (const auto& each : step.exchanges) {
    require(each.exchange != nullptr && each.pieces >= 1 && each.pieces <= Exchange::kMostBegun,
            "a sum of ranks has 1 or 2 pieces");
  }
  if (cache.keys.size() != model_->layers.size() || cache.values.size() != model_->layers.size()) {
    throw std::invalid_argument("the cache has another number of layers than the model");
  }
  if (cache.block_size < 1 || (cache.block_size & (cache.block_size - 1)) != 0) {
    throw std::invalid_argument("the block size is not a power of two");
  }
  require(cache.format != Format::kLevels5 && cache.format != Format::kLevels6, "keys and values of few bits have 4 or 8");
  const Size scaled = cache.format == Format::kPlain ? 0 : cache.keys.size();
  if (cache.key_scales.size() != scaled || cache.value_scales.size() != scaled) {
    throw std::invalid_argument("keys and values of few bits have scales for each layer, others have none");
  }
  const int head_size = model_->shape.head_size, of_word = cache.format == Format::kLevels4 ? 8 : 4;
  if (cpu::has_key_groups(cache.format) && (head_size % of_word != 0 || cache.block_size % cpu::kKeyGroup != 0)) {
    throw std::invalid_argument("keys of 4 or 8 bits need blocks of whole 16 tokens, and heads of whole words of 4 bytes");
  }
  if (cache.format != Format::kPlain && head_size > cpu::kMaxHead) throw std::invalid_argument("a head is too large");
  if (step.sharing == Sharing::kWhereItPays && !(buffers_->costs && buffers_->costs->is_of(cache))) {
    buffers_->costs = std::make_shared<const cpu::AttentionCosts>(*model_->kernels, model_->shape, cache);
  }
  require(step.parents == nullptr || (step.is_decoding && step.sparse == nullptr && takes_trees(cache)),
          "trees of guesses need a decode step that reads all blocks, a plain cache, and at most 15 heads to a key head");
  auto work = std::make_shared<cpu::StepWork>(model_, buffers_, cache, step, team.threads());
  if (step.num_tokens > buffers_->capacity || work->num_partials() > buffers_->partials.size() ||
      work->num_logits() > buffers_->logits.size()) {
    // A thread that is late may still read the old buffers.
    const std::shared_ptr<const Buffers> old = buffers_;
    buffers_ = std::make_shared<Buffers>();
    buffers_->costs = old->costs;
    buffers_->reserve(*model_, std::max({step.num_tokens, old->capacity, 64}),
                      std::max(work->num_partials(), old->partials.size()),
                      std::max(work->num_logits(), old->logits.size()));
    work = std::make_shared<cpu::StepWork>(model_, buffers_, cache, step, team.threads());
  }
  team.run(work);
  return work->report();
}

}  // namespace sage
