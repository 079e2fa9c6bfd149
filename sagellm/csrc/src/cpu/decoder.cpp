#include "sagellm/decoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "attention_work.h"
#include "experts.h"
#include "product.h"

namespace sage {

using cpu::Attend;
using cpu::Cut;
using cpu::divided;
using cpu::ExpertBlock;
using cpu::Kernels;
using cpu::kTile;
using cpu::padded;
using cpu::Size;
using cpu::size;

namespace {

constexpr int kTokens = 8;  // of a chunk of element-wise work

}  // namespace

struct Decoder::Model {
  const Kernels* kernels;
  DecoderShape shape;
  std::vector<DecoderLayer> layers;
  Matrix embedding;
  const float* last_norm;
  Matrix head;

  int num_logits() const { return shape.ranks > 1 ? shape.logits : head.outputs; }
  // Logits of each rank but the last, which may have less.
  int part() const { return shape.ranks > 1 ? padded(divided(shape.logits, shape.ranks), kTile) : 0; }
};

// Numbers that begin with a line of the cache, so that a tile of one thread shares no line with a tile of another.
template <class T>
class Lines {
 public:
  T* data() { return reinterpret_cast<T*>(lines_.data()); }
  T& operator[](Size at) { return data()[at]; }
  Size size() const { return size_; }
  void resize(Size count) {
    size_ = count;
    lines_.resize((count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line));
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
  Size size_ = 0;
};

// What stages hand on. They stay where they are while a thread may still read them.
struct Decoder::Buffers {
  int capacity = 0;  // tokens
  std::shared_ptr<const cpu::AttentionCosts> costs;  // of the cache, where sequences read keys together if that pays
  Size partial_capacity = 0;
  Lines<float> hidden, squares, qkv, branch, partials, logits;
  Lines<char> input, queries, attended, fed;
  Lines<float> routed, expert_branch;  // routers' outputs, and the results of each slot
  Lines<char> expert_fed;
  Lines<char> rounded;  // inputs of the next product in 8 bits

  void reserve(const Model& model, int tokens, Size partials_needed, Size logits_needed) {
    const auto& shape = model.shape;
    const Size element = cpu::size_of(model.kernels->inputs);
    if (tokens > capacity) {
      capacity = tokens;
      const Size n = size(tokens);
      hidden.resize(n * size(shape.hidden));
      branch.resize(n * size(shape.hidden));
      squares.resize(size(padded(tokens, 16)) * size(divided(shape.hidden, kTile)));
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
      }
    }
    if (partials_needed > partials.size()) partials.resize(partials_needed);
    if (logits_needed > logits.size()) logits.resize(logits_needed);
  }
};

namespace {

enum class Kind {
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
  Kind kind;
  int layer;
  int chunks;
  Cut cut;             // of a product
  Kind product = kind;  // whose inputs kRound rounds to 8 bits
  int piece = 0, pieces = 1;  // of the outputs of a product
};

class StepWork : public Work {
 public:
  StepWork(std::shared_ptr<const Decoder::Model> model, std::shared_ptr<Decoder::Buffers> buffers,
           const PagedCache& cache, const DecoderStep& step, int threads)
      : model_(std::move(model)),
        buffers_(std::move(buffers)),
        shape_(model_->shape),
        kernels_(*model_->kernels),
        element_(cpu::size_of(kernels_.inputs)),
        num_tokens_(step.num_tokens),
        tokens_(step.tokens, step.tokens + step.num_tokens),
        hidden_(static_cast<char*>(step.hidden)),
        sampling_(step.sampling),
        sampled_(step.sampled),
        exchanges_(step.exchanges),
        attention_(cache, step, shape_, kernels_, buffers_->costs.get(), windows_of(*model_), threads),
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
    plan_stages(threads);
  }

  StepReport report() const {
    if (failure_) std::rethrow_exception(failure_);
    return attention_.report();
  }
  Size num_logits() const {
    return sampling_ == nullptr ? 0 : size(num_tokens_) * size(model_->num_logits());
  }
  Size num_partials() const { return attention_.num_partials(); }
  int num_stages() const override { return static_cast<int>(stages_.size()); }
  int num_chunks(int stage) const override { return stages_[size(stage)].chunks; }

  Size local_bytes() const override {
    const int widest = std::max(shape_.hidden, (shape_.heads + 2 * shape_.kv_heads) * shape_.head_size);
    Size bytes = size(kTokens) * size(widest) * 4 + size(shape_.hidden) * 4;
    if (sampling_ != nullptr) bytes = std::max(bytes, size(model_->num_logits()) * 4);
    for (const Stage& stage : stages_) {
      bytes = std::max(bytes, stage.cut.bytes() + gathered_bytes(stage));
      if (stage.kind != Kind::kRound) continue;
      bytes = std::max(bytes, size(kTokens) * cpu::rounded_bytes(kernels_, matrix_of(stage.product, stage.layer)));
    }
    return std::max(bytes, attention_.local_bytes());
  }

  void compute(int stage, int chunk, char* local) const override {
    const Stage& at = stages_[size(stage)];
    const DecoderLayer& layer = model_->layers[size(at.layer)];
    auto* result = reinterpret_cast<float*>(local);
    switch (at.kind) {
      case Kind::kRound:
        return round(at, chunk, local);
      case Kind::kEmbed:
        return embed(chunk, result);
      case Kind::kQkv:
        return multiply_normed(at, layer.qkv, chunk, result);
      case Kind::kRotate:
        return rotate(layer, chunk, result);
      case Kind::kWeigh:
        return attention_.weigh(at.layer, chunk, local);
      case Kind::kChooseBlocks:
        return;  // all of it is in the commit
      case Kind::kEncode:
        return attention_.encode(at.layer, chunk, local);
      case Kind::kObserve:
        return attention_.observe(at.layer, chunk, local);
      case Kind::kEstimate:
        return attention_.estimate(at.layer, chunk, local);
      case Kind::kAttend:
        return attention_.attend(at.layer, chunk, local);
      case Kind::kMerge:
        return attention_.merge(at.layer, chunk, result);
      case Kind::kOut:
        return cpu::multiply_chunk(kernels_, at.cut, piece_of(layer.out, at).matrix, inputs_of(at), chunk, result);
      case Kind::kBeginSum:
      case Kind::kSum:
      case Kind::kGather:
        return;  // all of it is in the commit
      case Kind::kAddSum:
        return add_sum(at, chunk, result);
      case Kind::kAddAttended:
        return add_normed(layer.after_attention, chunk, result);
      case Kind::kRoute:
        return multiply_normed(at, layer.experts.router, chunk, result);
      case Kind::kChoose:
        return;  // all of it is in the commit
      case Kind::kFeed:
        return feed(at, layer, chunk, result);
      case Kind::kDown:
        return cpu::multiply_chunk(kernels_, at.cut, piece_of(layer.down, at).matrix, inputs_of(at), chunk, result);
      case Kind::kFeedExperts:
        return feed_experts(at, layer.experts, chunk, result);
      case Kind::kDownExperts:
        return down_experts(at, layer.experts, chunk, result);
      case Kind::kAddExperts:
        return add_experts(layer, chunk, result);
      case Kind::kAddFed:
        return add_normed(layer.after_feed_forward, chunk, result);
      case Kind::kLast:
        return last(chunk, result);
      case Kind::kLogits:
        return compute_logits(at, chunk, result);
      case Kind::kSample:
        return sample(chunk, local);
    }
  }

  void commit(int stage, int chunk, const char* local) override {
    const Stage& at = stages_[size(stage)];
    const DecoderLayer& layer = model_->layers[size(at.layer)];
    const auto* result = reinterpret_cast<const float*>(local);
    switch (at.kind) {
      case Kind::kRound:
        return commit_rounded(at, chunk, local);
      case Kind::kEmbed:
        return commit_rows(chunk, result, model_->layers[0].attention_norm);
      case Kind::kQkv:
        return commit_product(at.cut, layer.qkv, chunk, result, buffers_->qkv.data(), layer.qkv.outputs);
      case Kind::kRotate:
        return commit_rotated(at.layer, chunk, result);
      case Kind::kWeigh:
        return attention_.commit_weighed(chunk, local);
      case Kind::kChooseBlocks:
        if (!attention_.chooses_jointly()) return attention_.choose(at.layer, nullptr);
        return exchange([&] { attention_.choose(at.layer, exchanges_[size(at.layer)].exchange); });
      case Kind::kEncode:
        return attention_.commit_encoded(at.layer, chunk, local);
      case Kind::kObserve:
        return attention_.commit_observed(chunk, local);
      case Kind::kEstimate:
        return attention_.commit_estimated(chunk, local);
      case Kind::kAttend:
        return attention_.commit_attended(at.layer, chunk, local);
      case Kind::kMerge:
        return attention_.commit_merged(at.layer, chunk, result);
      case Kind::kOut:
        return commit_sum(at, layer.out, chunk, result, is_split() || layer.after_attention != nullptr,
                          layer.feed_forward_norm);
      case Kind::kSum:
        return sum_of_ranks(at);
      case Kind::kBeginSum: {
        const Piece piece = piece_of(layer.out, at);
        return exchange([&] {
          exchanges_[size(at.layer)].exchange->begin_sum(branch_of(piece), size(num_tokens_) * size(piece.columns));
        });
      }
      case Kind::kAddSum:
        return commit_rows(chunk, result, at.product == Kind::kOut ? layer.feed_forward_norm : next_norm(at.layer));
      case Kind::kAddAttended:
        return commit_rows(chunk, result, layer.feed_forward_norm);
      case Kind::kRoute:
        return commit_product(at.cut, layer.experts.router, chunk, result, buffers_->routed.data(),
                              layer.experts.router.outputs);
      case Kind::kChoose:
        return cpu::choose_experts(buffers_->routed.data(), num_tokens_, layer.experts, &routes_);
      case Kind::kFeed:
        return commit_fed(at.cut, layer, chunk, result);
      case Kind::kDown:
        return commit_sum(at, layer.down, chunk, result,
                          is_split() || layer.after_feed_forward != nullptr || layer.experts.top_k > 0,
                          next_norm(at.layer));
      case Kind::kFeedExperts:
        return commit_fed_experts(at, layer.experts, chunk, result);
      case Kind::kDownExperts:
        return commit_expert_sums(at, chunk, result);
      case Kind::kAddExperts:
        return commit_experts(chunk, result, next_norm(at.layer));
      case Kind::kAddFed:
        return commit_rows(chunk, result, next_norm(at.layer));
      case Kind::kLast:
        return commit_last(chunk, result);
      case Kind::kLogits:
        return commit_product(at.cut, model_->head, chunk, result, buffers_->logits.data() + shape_.rank * model_->part(),
                              model_->num_logits());
      case Kind::kGather:
        return exchange([&] {
          exchanges_.back().exchange->gather(buffers_->logits.data(), size(num_tokens_), size(shape_.logits),
                                             size(model_->part()));
        });
      case Kind::kSample:
        return commit_sampled(chunk, local);
    }
  }

 private:
  static std::vector<int> windows_of(const Decoder::Model& model) {
    std::vector<int> windows;
    for (const DecoderLayer& layer : model.layers) windows.push_back(layer.window);
    return windows;
  }

  bool is_split() const { return shape_.ranks > 1; }
  int head_numbers() const { return shape_.heads * shape_.head_size; }
  int key_numbers() const { return shape_.kv_heads * shape_.head_size; }
  int hidden_tiles() const { return divided(shape_.hidden, kTile); }
  Size input_stride() const { return size(padded(shape_.hidden, 2)); }
  const float* next_norm(int layer) const {
    return size(layer) + 1 < model_->layers.size() ? model_->layers[size(layer) + 1].attention_norm : model_->last_norm;
  }

  // A number that no other step has, with room for the numbers of its stages.
  static std::uint64_t next_id() {
    static std::atomic<std::uint64_t> count{0};
    return ++count << 32U;
  }

  // ---- planning

  void plan_stages(int threads) {
    const int groups = divided(num_tokens_, kTokens);
    const auto add = [&](Kind kind, int layer, int chunks) { stages_.push_back({kind, layer, chunks, {}}); };
    const auto add_product = [&](Kind kind, int layer, const Cut& cut) {
      // One row is rounded by each chunk for itself.
      if (num_tokens_ > 1 && matrix_of(kind, layer).in_8_bits) stages_.push_back({Kind::kRound, layer, groups, {}, kind});
      stages_.push_back({kind, layer, cut.chunks(), cut});
    };
    const auto cut_of = [&](const Matrix& matrix, bool pairs) {
      return Cut(kernels_, num_tokens_, matrix, threads, pairs);
    };
    // Products whose outputs ranks add up, and then to the residual stream if they need no norm before.
    const auto add_summed_product = [&](Kind kind, int layer, bool is_last) {
      const Matrix& matrix = matrix_of(kind, layer);
      const int pieces = is_split() && is_last ? std::min(exchanges_[size(layer)].pieces, hidden_tiles()) : 1;
      if (num_tokens_ > 1 && matrix.in_8_bits) stages_.push_back({Kind::kRound, layer, groups, {}, kind});
      for (int piece = 0; piece < pieces; ++piece) {
        Stage stage{kind, layer, 0, {}, kind, piece, pieces};
        stage.cut = cut_of(piece_of(matrix, stage).matrix, false);
        stage.chunks = stage.cut.chunks();
        stages_.push_back(stage);
        if (pieces > 1) stages_.push_back({Kind::kBeginSum, layer, 1, {}, kind, piece, pieces});
      }
      return pieces;
    };
    const auto add_sum_of_ranks = [&](Kind product, int layer, int pieces, bool is_last) {
      if (!is_split()) return;
      stages_.push_back({Kind::kSum, layer, 1, {}, product, 0, pieces});
      if (is_last) stages_.push_back({Kind::kAddSum, layer, groups, {}, product, 0, pieces});
    };
    add(Kind::kEmbed, 0, groups);
    for (int i = 0; i < static_cast<int>(model_->layers.size()); ++i) {
      const DecoderLayer& layer = model_->layers[size(i)];
      add_product(Kind::kQkv, i, cut_of(layer.qkv, false));
      add(Kind::kRotate, i, groups);
      const auto add_attention = [&](Kind kind, int chunks) {
        if (chunks > 0) add(kind, i, chunks);
      };
      add_attention(Kind::kEncode, attention_.num_encoded(i));
      add_attention(Kind::kObserve, attention_.num_observed(i));
      add_attention(Kind::kWeigh, attention_.num_weighed(i));
      add_attention(Kind::kChooseBlocks, attention_.num_chosen(i));
      add_attention(Kind::kEstimate, attention_.num_estimated(i));
      add_attention(Kind::kAttend, attention_.num_attended(i));
      add_attention(Kind::kMerge, attention_.num_merged(i));
      const bool ends_attention = layer.after_attention == nullptr;
      add_sum_of_ranks(Kind::kOut, i, add_summed_product(Kind::kOut, i, ends_attention), ends_attention);
      if (layer.after_attention != nullptr) add(Kind::kAddAttended, i, groups);
      const Experts& experts = layer.experts;
      if (experts.top_k > 0) {
        add_product(Kind::kRoute, i, cut_of(experts.router, false));
        add(Kind::kChoose, i, 1);
      }
      if (layer.down.weight != nullptr) {
        add_product(Kind::kFeed, i, cut_of(layer.gate_up, true));
        const bool ends_layer = experts.top_k == 0 && layer.after_feed_forward == nullptr;
        const int pieces = add_summed_product(Kind::kDown, i, ends_layer);
        if (experts.top_k == 0) add_sum_of_ranks(Kind::kDown, i, pieces, ends_layer);
      }
      if (experts.top_k > 0) {
        if (routes_.blocks.empty()) routes_ = cpu::Routes(num_tokens_, experts);
        add_product(Kind::kFeedExperts, i, cpu::cut_of_experts(kernels_, routes_, experts.gate_up[0], threads, true));
        add_product(Kind::kDownExperts, i, cpu::cut_of_experts(kernels_, routes_, experts.down[0], threads, false));
        add(Kind::kAddExperts, i, groups);
        add_sum_of_ranks(Kind::kDown, i, 1, true);
      }
      if (layer.after_feed_forward != nullptr) add(Kind::kAddFed, i, groups);
    }
    const int last = static_cast<int>(model_->layers.size()) - 1;
    add(Kind::kLast, last, groups);
    if (sampling_ == nullptr) return;
    add_product(Kind::kLogits, last, cut_of(model_->head, false));
    if (is_split()) add(Kind::kGather, last, 1);
    add(Kind::kSample, last, num_tokens_);
  }

  // ---- rows of the residual stream

  int first_of(int chunk) const { return chunk * kTokens; }
  int end_of(int chunk) const { return std::min(num_tokens_, first_of(chunk) + kTokens); }

  // Sum of squares of a tile of a row. The rows of a tile lie side by side, since one thread writes them.
  float& squares(int row, int tile) const {
    return buffers_->squares[size(tile) * size(padded(num_tokens_, 16)) + size(row)];
  }

  // 1 / root mean square of rows [first, first + count) of the residual stream, from the sums of squares of their tiles.
  void scales_of(int first, int count, float* scales) const {
    std::fill_n(scales, count, 0.F);
    for (int t = 0; t < hidden_tiles(); ++t) {
      const float* of_tile = &squares(first, t);
      for (int i = 0; i < count; ++i) scales[i] += of_tile[i];
    }
    for (int i = 0; i < count; ++i) {
      scales[i] = 1.F / std::sqrt(scales[i] / static_cast<float>(shape_.hidden) + shape_.epsilon);
    }
  }
  float scale_of(int row) const {
    float scale;
    scales_of(row, 1, &scale);
    return scale;
  }

  // Numbers [first, first + count) of a row are known: what the next product needs of them. The row's scale, which
  // needs all of the row, is applied to the product's result.
  void store_input(int row, int tile, const float* values, int count, const float* norm) {
    const Size first = size(tile) * kTile;
    kernels_.to_input(values, norm + first, count,
                      buffers_->input.data() + (size(row) * input_stride() + first) * element_);
    squares(row, tile) = kernels_.sum_of_squares(values, count);
  }

  void embed(int chunk, float* result) const {
    for (int row = first_of(chunk); row < end_of(chunk); ++row, result += shape_.hidden) {
      cpu::unpack_row(kernels_, model_->embedding, static_cast<int>(tokens_[size(row)]), result);
      if (shape_.embedding_scale != 1.F) {
        for (int i = 0; i < shape_.hidden; ++i) result[i] *= shape_.embedding_scale;
      }
    }
  }

  void commit_rows(int chunk, const float* result, const float* norm) {
    for (int row = first_of(chunk); row < end_of(chunk); ++row, result += shape_.hidden) {
      std::memcpy(buffers_->hidden.data() + size(row) * size(shape_.hidden), result, size(shape_.hidden) * 4);
      for (int tile = 0; tile < hidden_tiles(); ++tile) {
        store_input(row, tile, result + tile * kTile, std::min(kTile, shape_.hidden - tile * kTile), norm);
      }
    }
  }

  // A piece of a product's outputs.
  struct Piece {
    Matrix matrix;
    int column, columns;
  };
  Piece piece_of(const Matrix& whole, const Stage& at) const {
    const auto begin_of = [&](int piece) { return hidden_tiles() * piece / at.pieces; };
    const int tile = begin_of(at.piece), column = tile * kTile;
    Piece piece{whole, column, std::min(begin_of(at.piece + 1) * kTile, shape_.hidden) - column};
    piece.matrix.outputs = piece.columns;
    piece.matrix.weight = static_cast<const char*>(whole.weight) + size(tile) * cpu::tile_bytes(kernels_, whole);
    if (whole.bias != nullptr) piece.matrix.bias = whole.bias + column;
    return piece;
  }
  // [tokens][columns]; the pieces follow each other.
  float* branch_of(const Piece& piece) const { return buffers_->branch.data() + size(num_tokens_) * size(piece.column); }

  void sum_of_ranks(const Stage& at) {
    Exchange& ranks = *exchanges_[size(at.layer)].exchange;
    exchange([&] {
      if (at.pieces == 1) return ranks.add_up(buffers_->branch.data(), size(num_tokens_) * size(shape_.hidden));
      for (int piece = 0; piece < at.pieces; ++piece) ranks.end_sum();
    });
  }

  // hidden += branch
  void add_sum(const Stage& at, int chunk, float* result) const {
    const Size first = size(first_of(chunk)), hidden = size(shape_.hidden);
    std::memcpy(result, buffers_->hidden.data() + first * hidden, size(end_of(chunk)) * hidden * 4 - first * hidden * 4);
    Stage of_piece = at;
    for (of_piece.piece = 0; of_piece.piece < at.pieces; ++of_piece.piece) {
      const Piece piece = piece_of({}, of_piece);
      const float* branch = branch_of(piece) + first * size(piece.columns);
      float* to = result + piece.column;
      for (int row = first_of(chunk); row < end_of(chunk); ++row, to += hidden, branch += piece.columns) {
        kernels_.add(to, branch, nullptr, piece.columns);
      }
    }
  }

  // hidden += norm(branch)
  void add_normed(const float* norm, int chunk, float* result) const {
    for (int row = first_of(chunk); row < end_of(chunk); ++row, result += shape_.hidden) {
      const float* branch = buffers_->branch.data() + size(row) * size(shape_.hidden);
      const float* hidden = buffers_->hidden.data() + size(row) * size(shape_.hidden);
      const float squares = kernels_.sum_of_squares(branch, shape_.hidden);
      const float scale = 1.F / std::sqrt(squares / static_cast<float>(shape_.hidden) + shape_.epsilon);
      for (int i = 0; i < shape_.hidden; ++i) result[i] = hidden[i] + branch[i] * scale * norm[i];
    }
  }

  void last(int chunk, float* result) const {
    for (int row = first_of(chunk); row < end_of(chunk); ++row, result += shape_.hidden) {
      const float* hidden = buffers_->hidden.data() + size(row) * size(shape_.hidden);
      const float scale = scale_of(row);
      for (int i = 0; i < shape_.hidden; ++i) result[i] = hidden[i] * scale * model_->last_norm[i];
      // Logits are those of the hidden states that a caller sees.
      void* narrow = result + size(end_of(chunk) - row) * size(shape_.hidden);  // behind the last row
      kernels_.to_weight(result, shape_.hidden, narrow);
      kernels_.from_weight(narrow, shape_.hidden, result);
    }
  }

  void commit_last(int chunk, const float* result) {
    const Size row_bytes = size(shape_.hidden) * cpu::size_of(kernels_.weights);
    for (int row = first_of(chunk); row < end_of(chunk); ++row, result += shape_.hidden) {
      if (hidden_ != nullptr) kernels_.to_weight(result, shape_.hidden, hidden_ + size(row) * row_bytes);
      if (sampling_ == nullptr) continue;
      kernels_.to_input(result, nullptr, shape_.hidden, buffers_->input.data() + size(row) * input_stride() * element_);
    }
  }

  // ---- the next tokens

  void compute_logits(const Stage& at, int chunk, float* result) const {
    const Matrix& head = model_->head;
    const Cut& cut = at.cut;
    cpu::multiply_chunk(kernels_, cut, head, inputs_of(at), chunk, result);
    const int first = cut.first_tile(chunk) * kTile,
              count = std::min(cut.num_tiles(chunk) * kTile, head.outputs - first);
    const float cap = shape_.logit_softcap;
    for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width()) {
      if (head.bias != nullptr) kernels_.add(result, head.bias + first, nullptr, count);
      if (cap == 0.F) continue;
      for (int i = 0; i < count; ++i) result[i] = cap * std::tanh(result[i] / cap);
    }
  }

  // After the first failure the rest of the step runs without exchanges, and its results are not used.
  template <typename Call>
  void exchange(const Call& call) noexcept {
    if (failure_) return;
    try {
      call();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

  // A thread keeps what it drew until it commits it, or draws again.
  void sample(int row, char* local) const {
    if (failure_) return;  // there are no logits
    const Size vocabulary = size(model_->num_logits());
    const float* logits = buffers_->logits.data() + size(row) * vocabulary;
    drawn() = sample_row(kernels_, logits, *sampling_, row, reinterpret_cast<float*>(local));
  }

  void commit_sampled(int row, const char*) { (*sampled_)[size(row)] = std::move(drawn()); }

  static Sampled& drawn() {
    static thread_local Sampled sampled;
    return sampled;
  }

  // ---- products

  const Matrix& matrix_of(Kind product, int layer_number) const {
    const DecoderLayer& layer = model_->layers[size(layer_number)];
    switch (product) {
      case Kind::kQkv:
        return layer.qkv;
      case Kind::kOut:
        return layer.out;
      case Kind::kFeed:
        return layer.gate_up;
      case Kind::kDown:
        return layer.down;
      case Kind::kLogits:
        return model_->head;
      default:
        return layer.experts.router;  // experts round the rows that they gather
    }
  }

  // Inputs of a product, or of that which a stage rounds them for.
  cpu::Inputs inputs_of(const Stage& at) const {
    const Matrix& matrix = matrix_of(at.product, at.layer);
    auto& rows = at.product == Kind::kOut    ? buffers_->attended
                 : at.product == Kind::kDown ? buffers_->fed
                                             : buffers_->input;
    const bool is_rounded = num_tokens_ > 1 && matrix.in_8_bits && at.kind != Kind::kRound;
    const auto stage = static_cast<std::uint64_t>(&at - stages_.data());
    return {rows.data(), size(padded(matrix.inputs, 2)), is_rounded ? buffers_->rounded.data() : nullptr, id_ + stage};
  }

  void round(const Stage& at, int chunk, char* local) const {
    cpu::Inputs inputs = inputs_of(at);
    inputs.numbers += size(first_of(chunk)) * inputs.stride * element_;
    cpu::round_rows(kernels_, matrix_of(at.product, at.layer), inputs, end_of(chunk) - first_of(chunk), local);
  }

  void commit_rounded(const Stage& at, int chunk, const char* local) {
    const Size bytes = cpu::rounded_bytes(kernels_, matrix_of(at.product, at.layer));
    std::memcpy(buffers_->rounded.data() + size(first_of(chunk)) * bytes, local, size(end_of(chunk) - first_of(chunk)) * bytes);
  }

  // The product of normed rows: their scales come last.
  void multiply_normed(const Stage& at, const Matrix& matrix, int chunk, float* result) const {
    const Cut& cut = at.cut;
    cpu::multiply_chunk(kernels_, cut, matrix, inputs_of(at), chunk, result);
    const int first = cut.first_tile(chunk) * kTile;
    const int count = std::min(cut.num_tiles(chunk) * kTile, padded(matrix.outputs, kTile) - first);
    float scales[cpu::kPanel];
    scales_of(cut.first_row(chunk), cut.num_rows(chunk), scales);
    for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width()) {
      const float scale = scales[row];
      const int biased = matrix.bias == nullptr ? 0 : std::min(count, matrix.outputs - first);
      if (biased > 0) kernels_.scale(result, scale, matrix.bias + first, biased);
      kernels_.scale(result + biased, scale, nullptr, count - biased);
    }
  }

  // `to`: [tokens][stride]
  void commit_product(const Cut& cut, const Matrix& matrix, int chunk, const float* result, float* to, int stride) {
    const int first = cut.first_tile(chunk) * kTile,
              count = std::min(cut.num_tiles(chunk) * kTile, matrix.outputs - first);
    to += size(cut.first_row(chunk)) * size(stride) + size(first);
    for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width(), to += stride) {
      std::memcpy(to, result, size(count) * 4);
    }
  }

  void gate(float* result, int tiles) const {
    for (int t = 0; t < tiles; t += 2) {
      kernels_.gate(result + t * kTile, result + (t + 1) * kTile, kTile, shape_.activation == Activation::kGelu);
    }
  }

  void feed(const Stage& at, const DecoderLayer& layer, int chunk, float* result) const {
    const Cut& cut = at.cut;
    multiply_normed(at, layer.gate_up, chunk, result);
    for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width()) gate(result, cut.num_tiles(chunk));
  }

  // Gated numbers of a row, as input of the matrix after them.
  void store_fed(const Cut& cut, const Matrix& down, int chunk, const float* result, char* row) {
    for (int t = 0; t < cut.num_tiles(chunk); t += 2) {
      const int first = (cut.first_tile(chunk) + t) / 2 * kTile, count = std::min(kTile, down.inputs - first);
      kernels_.to_input(result + t * kTile, nullptr, count, row + size(first) * element_);
    }
  }

  void commit_fed(const Cut& cut, const DecoderLayer& layer, int chunk, const float* result) {
    const Size row_bytes = size(padded(layer.down.inputs, 2)) * element_;
    for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width()) {
      store_fed(cut, layer.down, chunk, result, buffers_->fed.data() + size(cut.first_row(chunk) + row) * row_bytes);
    }
  }

  // The result of a part of the layer goes to the residual stream, or waits for other ranks, for its own norm or for experts.
  void commit_sum(const Stage& at, const Matrix& whole, int chunk, const float* result, bool waits, const float* norm) {
    const Cut& cut = at.cut;
    const Piece piece = piece_of(whole, at);
    for (int row = 0; row < cut.num_rows(chunk); ++row, result += cut.width()) {
      const Size token = size(cut.first_row(chunk) + row);
      for (int t = 0; t < cut.num_tiles(chunk); ++t) {
        const int tile = cut.first_tile(chunk) + t, first = tile * kTile, count = std::min(kTile, piece.columns - first);
        float* to = waits ? branch_of(piece) + token * size(piece.columns) + first
                          : buffers_->hidden.data() + token * size(shape_.hidden) + first;
        if (waits) std::fill_n(to, count, 0.F);
        kernels_.add(to, result + t * kTile, piece.matrix.bias == nullptr ? nullptr : piece.matrix.bias + first, count);
        if (!waits) store_input(static_cast<int>(token), tile, to, count, norm);
      }
    }
  }

  // ---- experts

  // Inputs of an expert's rows, which are gathered behind the result if there are several.
  static int gathered_inputs(const Kind kind, const Experts& experts) {
    return kind == Kind::kFeedExperts ? experts.gate_up[0].inputs : experts.down[0].inputs;
  }

  Size gathered_bytes(const Stage& stage) const {
    if (stage.kind != Kind::kFeedExperts && stage.kind != Kind::kDownExperts) return 0;
    const DecoderLayer& layer = model_->layers[size(stage.layer)];
    return size(stage.cut.panel) * size(padded(gathered_inputs(stage.kind, layer.experts), 2)) * element_;
  }

  void multiply_block(const Stage& at, const Matrix& matrix, const ExpertBlock& block, const int* slots,
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
    cpu::multiply_tiles(kernels_, matrix, at.cut.first_tile(chunk), at.cut.num_tiles(chunk), {from, stride}, block.count,
                        result, size(at.cut.width()));
  }

  void feed_experts(const Stage& at, const Experts& experts, int chunk, float* result) const {
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

  void commit_fed_experts(const Stage& at, const Experts& experts, int chunk, const float* result) {
    const int number = chunk % at.cut.panels, count = routes_.blocks[size(number)].count;
    const Matrix& down = experts.down[0];
    const Size row_bytes = size(padded(down.inputs, 2)) * element_;
    for (int i = 0; i < count; ++i, result += at.cut.width()) {
      store_fed(at.cut, down, chunk, result, buffers_->expert_fed.data() + size(routes_.slots_of(number)[i]) * row_bytes);
    }
  }

  void down_experts(const Stage& at, const Experts& experts, int chunk, float* result) const {
    const int number = chunk % at.cut.panels;
    const ExpertBlock block = routes_.blocks[size(number)];
    if (block.count == 0) return;
    const int* slots = routes_.slots_of(number);
    multiply_block(at, experts.down[size(block.expert)], block, slots, 1, buffers_->expert_fed.data(), chunk, result);
    for (int i = 0; i < block.count; ++i, result += at.cut.width()) {
      kernels_.scale(result, routes_.weights[size(slots[i])], nullptr, at.cut.num_tiles(chunk) * kTile);
    }
  }

  void commit_expert_sums(const Stage& at, int chunk, const float* result) {
    const int number = chunk % at.cut.panels, count = routes_.blocks[size(number)].count;
    const int first = at.cut.first_tile(chunk) * kTile,
              width = std::min(at.cut.num_tiles(chunk) * kTile, shape_.hidden - first);
    for (int i = 0; i < count; ++i, result += at.cut.width()) {
      const Size slot = size(routes_.slots_of(number)[i]);
      std::memcpy(buffers_->expert_branch.data() + slot * size(shape_.hidden) + size(first), result, size(width) * 4);
    }
  }

  // hidden += experts of the row, in the order of their weights, and its shared expert. Where ranks split them, this rank's part
  // is their sum alone.
  void add_experts(const DecoderLayer& layer, int chunk, float* result) const {
    const int top_k = layer.experts.top_k, outputs = layer.experts.router.outputs;
    for (int row = first_of(chunk); row < end_of(chunk); ++row, result += shape_.hidden) {
      const float* hidden = buffers_->hidden.data() + size(row) * size(shape_.hidden);
      const float* expert = buffers_->expert_branch.data() + size(row * top_k) * size(shape_.hidden);
      std::fill_n(result, shape_.hidden, 0.F);
      for (int k = 0; k < top_k; ++k, expert += shape_.hidden) kernels_.add(result, expert, nullptr, shape_.hidden);
      if (layer.down.weight != nullptr) {
        const float* branch = buffers_->branch.data() + size(row) * size(shape_.hidden);
        const float logit = buffers_->routed[size(row + 1) * size(outputs) - 1], share = 1.F / (1.F + std::exp(-logit));
        for (int i = 0; i < shape_.hidden; ++i) result[i] += share * branch[i];
      }
      if (!is_split()) kernels_.add(result, hidden, nullptr, shape_.hidden);
    }
  }

  void commit_experts(int chunk, const float* result, const float* norm) {
    if (!is_split()) return commit_rows(chunk, result, norm);
    const Size rows = size(end_of(chunk) - first_of(chunk)), hidden = size(shape_.hidden);
    std::memcpy(buffers_->branch.data() + size(first_of(chunk)) * hidden, result, rows * hidden * 4);
  }

  // ---- attention

  void norm_heads(float* heads, int count, const float* norm) const {
    for (int head = 0; head < count; ++head, heads += shape_.head_size) {
      const float squares = kernels_.sum_of_squares(heads, shape_.head_size);
      const float scale = 1.F / std::sqrt(squares / static_cast<float>(shape_.head_size) + shape_.epsilon);
      for (int i = 0; i < shape_.head_size; ++i) heads[i] *= scale * norm[i];
    }
  }

  void rotate(const DecoderLayer& layer, int chunk, float* result) const {
    const int numbers = head_numbers() + 2 * key_numbers();
    for (int row = first_of(chunk); row < end_of(chunk); ++row, result += numbers) {
      std::memcpy(result, buffers_->qkv.data() + size(row) * size(numbers), size(numbers) * 4);
      if (layer.query_norm != nullptr) norm_heads(result, shape_.heads, layer.query_norm);
      if (layer.key_norm != nullptr) norm_heads(result + head_numbers(), shape_.kv_heads, layer.key_norm);
      const float* angles = angles_.data() + size(row) * 2 * size(shape_.head_size);
      kernels_.rotate(result, shape_.heads + shape_.kv_heads, shape_.head_size, angles, angles + shape_.head_size);
    }
  }

  void commit_rotated(int layer, int chunk, const float* result) {
    const int numbers = head_numbers() + 2 * key_numbers();
    for (int row = first_of(chunk); row < end_of(chunk); ++row, result += numbers) attention_.store(layer, row, result);
  }

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
  cpu::AttentionWork attention_;
  const std::uint64_t id_;
  std::vector<Stage> stages_;
  cpu::Routes routes_;  // of the layer at work
};

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
  auto work = std::make_shared<StepWork>(model_, buffers_, cache, step, team.threads());
  if (step.num_tokens > buffers_->capacity || work->num_partials() > buffers_->partials.size() ||
      work->num_logits() > buffers_->logits.size()) {
    // A thread that is late may still read the old buffers.
    const std::shared_ptr<const Buffers> old = buffers_;
    buffers_ = std::make_shared<Buffers>();
    buffers_->costs = old->costs;
    buffers_->reserve(*model_, std::max({step.num_tokens, old->capacity, 64}),
                      std::max(work->num_partials(), old->partials.size()),
                      std::max(work->num_logits(), old->logits.size()));
    work = std::make_shared<StepWork>(model_, buffers_, cache, step, team.threads());
  }
  team.run(work);
  return work->report();
}

}  // namespace sage
