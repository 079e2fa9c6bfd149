// A step of a small model: the same numbers with one thread and with several, over a cache in blocks. Formulas are checked from
// Python.

#include "sagellm/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "expect.h"

namespace {

constexpr int kHidden = 48, kHeads = 4, kKeyHeads = 2, kHeadSize = 64, kFeed = 64, kVocabulary = 90, kLayers = 2;
constexpr int kBlock = 16, kBlocks = 200, kExperts = 5;

class Model {
 public:
  explicit Model(sage::Dtype dtype = sage::Dtype::kFloat32, sage::Format format = sage::Format::kPlain,
                 bool has_experts = false, bool in_8_bits = false, sage::Format cached = sage::Format::kPlain)
      : format_(format), cached_(cached), in_8_bits_(in_8_bits), dtype_(dtype), kernels_("", dtype) {
    std::vector<sage::DecoderLayer> layers(kLayers);
    for (auto& layer : layers) {
      layer.qkv = matrix((kHeads + 2 * kKeyHeads) * kHeadSize, kHidden);
      layer.out = matrix(kHidden, kHeads * kHeadSize);
      layer.gate_up = matrix(2 * kFeed, kHidden);
      layer.down = matrix(kHidden, kFeed);
      layer.attention_norm = norm();
      layer.feed_forward_norm = norm();
      if (!has_experts) continue;
      layer.experts.top_k = 2;
      layer.experts.router = matrix(kExperts + 1, kHidden);
      for (int expert = 0; expert < kExperts; ++expert) {
        layer.experts.gate_up.push_back(matrix(2 * kFeed, kHidden));
        layer.experts.down.push_back(matrix(kHidden, kFeed));
      }
    }
    sage::DecoderShape shape;
    shape.hidden = kHidden;
    shape.heads = kHeads;
    shape.kv_heads = kKeyHeads;
    shape.head_size = kHeadSize;
    shape.vocabulary = kVocabulary;
    shape.attention_scale = 0.25F;
    const sage::Matrix embedding = matrix(kVocabulary, kHidden);
    decoder_ = std::make_unique<sage::Decoder>(kernels_, shape, std::move(layers), embedding, norm(), embedding);
    for (int layer = 0; layer < 4 * kLayers; ++layer) {  // keys, values and their scales
      caches_.emplace_back(static_cast<std::size_t>(kBlocks * kBlock * kKeyHeads * kHeadSize), 0.F);
    }
  }

  // Decode steps from now on read some blocks, or read common ones once: the first `common` blocks of all sequences are those of
  // the first one.
  void choose(std::shared_ptr<const sage::Sparse> sparse) { sparse_ = std::move(sparse); }
  void choose_prompts(std::shared_ptr<const sage::SparsePrompts> sparse) { sparse_prompts_ = std::move(sparse); }
  // Looks at what the last `queries` of each sequence give to blocks.
  void observe(std::vector<int> queries) { observed_queries_ = std::move(queries); }
  // The new tokens of steps with as many are trees.
  void branch(std::vector<std::int64_t> parents) { parents_ = std::move(parents); }
  void share_where_it_pays() { sharing_ = sage::Sharing::kWhereItPays; }
  const std::vector<float>& observed() const { return observed_; }
  void share(std::size_t common, bool together) {
    common_ = common;
    together_ = together;
  }

  // Hidden states of `lengths[i]` tokens of each sequence, `queries[i]` of them new.
  // Then the tokens behind them, if `draws`.
  std::vector<float> run(sage::Team& team, const std::vector<std::int64_t>& queries,
                         const std::vector<std::int64_t>& lengths, std::int64_t first_token = 1, bool draws = false) {
    sage::PagedCache cache;
    const auto memory = [&](int number) { return reinterpret_cast<char*>(caches_[static_cast<std::size_t>(number)].data()); };
    for (int layer = 0; layer < kLayers; ++layer) {
      cache.keys.push_back(memory(4 * layer));
      cache.values.push_back(memory(4 * layer + 1));
      if (cached_ == sage::Format::kPlain) continue;
      cache.key_scales.push_back(memory(4 * layer + 2));
      cache.value_scales.push_back(memory(4 * layer + 3));
    }
    const std::size_t plain = dtype_ == sage::Dtype::kFloat32 ? 4 : 2;
    cache.format = cached_;
    cache.dtype = dtype_;
    cache.slot_stride = kKeyHeads * kHeadSize;
    if (cached_ == sage::Format::kPlain) cache.slot_stride *= plain;
    if (cached_ == sage::Format::kLevels4) cache.slot_stride /= 2;
    cache.block_stride = kBlock * cache.slot_stride;
    cache.scale_slot_stride = kKeyHeads * 2 * plain;
    cache.scale_block_stride = kBlock * cache.scale_slot_stride;
    cache.num_blocks = kBlocks;
    cache.block_size = kBlock;
    const auto num = std::accumulate(queries.begin(), queries.end(), std::int64_t{0});
    const std::size_t width = kBlocks / queries.size();
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(num)), tables(width * queries.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = (first_token + static_cast<std::int64_t>(i) * 7) % kVocabulary;
    }
    std::iota(tables.rbegin(), tables.rend(), 0);
    for (std::size_t row = 1; row < queries.size(); ++row) {
      std::copy_n(tables.begin(), common_, tables.begin() + static_cast<std::ptrdiff_t>(row * width));
    }
    bounds_.resize(kLayers * kBlocks * kKeyHeads * 2 * kHeadSize);
    cache.bounds = bounds_.data();
    key_sums_.resize(bounds_.size() / 2);
    cache.key_sums = key_sums_.data();
    codes_.resize(kLayers * kBlocks * kKeyHeads * kBlock * kHeadSize / 4);
    if (kHeadSize % 16 == 0) cache.codes = codes_.data();
    const std::vector<std::int64_t> positions(tokens.size(), 0);
    std::vector<float> angles(2 * kHeadSize, 0.6F);
    std::fill(angles.begin() + kHeadSize, angles.end(), 0.8F);
    std::vector<float> hidden(tokens.size() * kHidden);
    sage::DecoderStep step;
    step.num_tokens = static_cast<int>(num);
    step.is_decoding = queries != lengths;
    step.num_sequences = static_cast<int>(queries.size());
    step.table_width = static_cast<int>(width);
    step.tokens = tokens.data();
    step.query_lengths = queries.data();
    step.lengths = lengths.data();
    step.tables = tables.data();
    step.angles = angles.data();
    step.num_angles = 1;
    step.positions = positions.data();
    step.hidden = hidden.data();
    std::vector<sage::Sampled> sampled;
    if (draws) {
      sage::Sampling wishes;
      wishes.rows = step.num_tokens;
      wishes.vocabulary = kVocabulary;
      wishes.temperature.assign(tokens.size(), 0.7F);
      wishes.seeds.assign(tokens.size(), 5);
      wishes.offsets.assign(tokens.size(), first_token);
      step.sampling = std::make_shared<const sage::Sampling>(wishes);
      step.sampled = &sampled;
    }
    if (parents_.size() == tokens.size()) step.parents = parents_.data();
    if (step.is_decoding) step.sparse = sparse_;
    if (!step.is_decoding) step.sparse_prompts = sparse_prompts_;
    step.sharing = together_ ? sharing_ : sage::Sharing::kNever;
    if (observed_queries_.size() == queries.size()) {
      observed_.assign(queries.size() * kKeyHeads * width, 0.F);
      step.observed = std::make_shared<const sage::Observed>(sage::Observed{observed_queries_, observed_.data()});
    }
    failure_ = decoder_->run(team, cache, step).failure;
    for (const sage::Sampled& each : sampled) hidden.push_back(static_cast<float>(each.token));
    return hidden;
  }

  const std::string& failure() const { return failure_; }

 private:
  float draw() { return std::normal_distribution<float>(0, 0.3F)(random_); }

  const float* norm() {
    auto& values = kept_.emplace_back(kHidden);
    for (float& value : values) value = 1 + draw();
    return values.data();
  }

  sage::Matrix matrix(int outputs, int inputs) {
    if (format_ != sage::Format::kPlain) return levels(outputs, inputs);
    std::vector<float> values(static_cast<std::size_t>(outputs * inputs));
    for (float& value : values) value = draw();
    auto& packed = kept_.emplace_back(kernels_.packed_bytes(outputs, inputs) / sizeof(float));
    kernels_.pack(values.data(), static_cast<std::size_t>(inputs), outputs, inputs, packed.data());
    return {packed.data(), nullptr, outputs, inputs};
  }

  sage::Matrix levels(int outputs, int inputs) {
    sage::Matrix matrix;
    matrix.outputs = outputs;
    matrix.inputs = inputs;
    matrix.format = format_;
    matrix.block = 16;
    matrix.in_8_bits = in_8_bits_ && kernels_.has_8_bits();
    std::vector<std::int8_t> values(static_cast<std::size_t>(outputs * inputs));
    for (auto& value : values) value = static_cast<std::int8_t>(random_() % 16);
    const std::vector<std::uint16_t> scales(values.size() / 16, 0x2a66), offsets(values.size() / 16, 0xb266);
    auto& packed = kept_.emplace_back(sage::packed_levels_bytes(matrix) / sizeof(float));
    sage::pack_levels(matrix, values.data(), scales.data(), offsets.data(), packed.data());
    matrix.weight = packed.data();
    return matrix;
  }

  const sage::Format format_, cached_;
  const bool in_8_bits_;
  const sage::Dtype dtype_;
  std::mt19937 random_{1};
  sage::CpuKernels kernels_;
  std::vector<std::vector<float>> kept_, caches_;
  std::vector<float> bounds_;
  std::vector<std::int32_t> key_sums_;
  std::vector<std::uint8_t> codes_;
  std::shared_ptr<const sage::Sparse> sparse_;
  std::shared_ptr<const sage::SparsePrompts> sparse_prompts_;
  std::vector<int> observed_queries_;
  std::vector<std::int64_t> parents_;
  std::vector<float> observed_;
  std::size_t common_ = 0;
  bool together_ = false;
  sage::Sharing sharing_ = sage::Sharing::kAlways;
  std::string failure_;
  std::unique_ptr<sage::Decoder> decoder_;
};

// Bit by bit: two numbers of 16 bits may make one of 32 bits that equals nothing.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// One model with one thread and with three.
struct Both {
  template <class... Settings>
  explicit Both(Settings... settings) : one(settings...), several(settings...) {}

  std::vector<float> run(const std::vector<std::int64_t>& queries, const std::vector<std::int64_t>& lengths,
                         std::int64_t first_token = 1, bool draws = false) {
    auto found = one.run(alone, queries, lengths, first_token, draws);
    EXPECT(same(found, several.run(together, queries, lengths, first_token, draws)));
    return found;
  }

  Model one, several;
  sage::Team alone{1}, together{3};
};

void threads_change_nothing(bool has_experts) {
  const auto plain = sage::Format::kPlain;
  Both both(sage::Dtype::kFloat32, plain, has_experts);
  for (int round = 0; round < 20; ++round) {
    both.run({70, 9}, {70, 9}, round);
    both.run({1, 3}, {71, 12}, round);
    both.run({1, 1}, {72, 13}, round, true);
  }
  both.run({300}, {300});  // larger buffers
  both.run({2}, {302});    // splits of keys
}

void weights_of_few_bits_run() {
  struct Way {
    sage::Format format;
    bool in_8_bits;
  };
  const Way ways[] = {{sage::Format::kLevels4, false}, {sage::Format::kLevels4, true}, {sage::Format::kLevels8, false},
                      {sage::Format::kLevels8, true}, {sage::Format::kFloat8, false}, {sage::Format::kLevels6, false},
                      {sage::Format::kLevels6, true}};
  for (const auto& [format, in_8_bits] : ways) {
    for (const auto dtype : {sage::Dtype::kFloat32, sage::Dtype::kBFloat16}) {
      Both both(dtype, format, false, in_8_bits);
      both.run({70, 9}, {70, 9});
      both.run({1, 3}, {71, 12});
    }
  }
}

void caches_of_few_bits_run() {
  for (const auto cached : {sage::Format::kLevels4, sage::Format::kLevels8, sage::Format::kFloat8}) {
    for (const auto dtype : {sage::Dtype::kFloat32, sage::Dtype::kBFloat16}) {
      const auto weights = sage::Format::kLevels8;
      Both both(dtype, weights, false, false, cached);
      both.run({270, 9}, {270, 9});
      both.run({1, 3}, {271, 12});
    }
  }
}

void choices_of_blocks_run() {
  using Weights = sage::Sparse::Weights;
  for (const auto cached : {sage::Format::kPlain, sage::Format::kLevels8}) {
    for (const auto weights : {Weights::kNone, Weights::kBounds, Weights::kSpread, Weights::kCodes, Weights::kExact}) {
      for (const bool by_head : {false, true}) {
        const auto plain = sage::Format::kPlain;
        Both both(sage::Dtype::kFloat32, plain, false, false, cached);
        both.run({290, 40, 9}, {290, 40, 9});
        auto sparse = std::make_shared<sage::Sparse>();
        sparse->keep = {18, 2, 1};
        sparse->weights = weights;
        sparse->by_head = by_head;
        sparse->whole_layers = by_head ? 1 : 0;
        const auto whole = both.run({1, 1, 1}, {291, 41, 10});
        both.one.choose(sparse);
        both.several.choose(sparse);
        const auto found = both.run({1, 1, 1}, {291, 41, 10});
        EXPECT(both.one.failure().empty() && found != whole);
        sparse->choose = [](const sage::Sparse::View& view) {
          view.chosen[0] = 7;  // of 18 that rise
          return std::string();
        };
        both.one.run(both.alone, {1, 1, 1}, {291, 41, 10});
        EXPECT(!both.one.failure().empty());
      }
    }
  }
}

void choices_of_prompts_run() {
  for (const auto cached : {sage::Format::kPlain, sage::Format::kLevels8}) {
    for (const auto dtype : {sage::Dtype::kFloat32, sage::Dtype::kBFloat16}) {
      const auto weights = sage::Format::kLevels8;
      Both both(dtype, weights, false, false, cached);
      both.one.observe({20, 3});
      both.several.observe({20, 3});
      const auto whole = both.run({290, 40}, {290, 40});
      EXPECT(both.one.observed() == both.several.observed());
      auto sparse = std::make_shared<sage::SparsePrompts>();
      sparse->stride = 8;
      sparse->share = 0.4F;
      sparse->threshold = 0.9F;
      both.one.choose_prompts(sparse);
      both.several.choose_prompts(sparse);
      const auto found = both.run({290, 40}, {290, 40});
      EXPECT(!same(found, whole));
      EXPECT(both.one.observed() == both.several.observed());
    }
  }
}

void common_blocks_are_read_once() {
  for (const std::size_t sequences : {2, 8}) {  // few rows, and many
    Both both;
    std::vector<std::int64_t> prompts(sequences), queries(sequences, 1), lengths(sequences);
    for (std::size_t i = 0; i < sequences; ++i) lengths[i] = (prompts[i] = 260 + 5 * static_cast<std::int64_t>(i)) + 1;
    both.run(prompts, prompts);
    both.one.share(16, false);
    const auto apart = both.one.run(both.alone, queries, lengths);
    both.one.share(16, true);
    both.several.share(16, true);
    const auto shared = both.run(queries, lengths);
    for (std::size_t i = 0; i < apart.size(); ++i) EXPECT(std::abs(shared[i] - apart[i]) < 1e-4F);
    both.one.share_where_it_pays();
    const auto paid = both.one.run(both.alone, queries, lengths);
    EXPECT(paid == shared || paid == apart);
    EXPECT((shared == apart) == (sequences == 2));  // many rows are added up in another order
  }
}

// A tree beside a chain: its branches get the numbers that chains of their tokens get, since all positions are the same here.
void trees_run() {
  for (const auto dtype : {sage::Dtype::kFloat32, sage::Dtype::kBFloat16}) {
    const auto weights = sage::Format::kLevels8;
    Both both(dtype, weights);
    Model chain(dtype, weights);
    const std::vector<std::int64_t> parents{-1, 0, 1, 0, 3, 0, -1, 0, 1};
    for (Model* each : {&both.one, &both.several}) each->branch(parents);
    both.run({260, 9}, {260, 9});
    chain.run(both.alone, {260, 9}, {260, 9});
    const auto found = both.run({6, 3}, {266, 12});
    const auto plain = chain.run(both.alone, {6, 3}, {266, 12});
    const auto equal = [&](std::size_t token) {
      const std::size_t bytes = kHidden * (dtype == sage::Dtype::kFloat32 ? 4 : 2);
      const auto of = [&](const std::vector<float>& all) { return reinterpret_cast<const char*>(all.data()) + token * bytes; };
      return std::memcmp(of(found), of(plain), bytes) == 0;
    };
    for (const std::size_t token : {0, 1, 2, 6, 7, 8}) EXPECT(equal(token));  // no branch stands before them
    if (dtype == sage::Dtype::kBFloat16) continue;  // all tokens have the same numbers, rounded
    for (const std::size_t token : {3, 4, 5}) EXPECT(!equal(token));
  }
  Model odd;
  sage::Team team(1);
  odd.branch({-1, 0, 2});
  bool is_refused = false;
  try {
    odd.run(team, {3}, {5});
  } catch (const std::invalid_argument&) {
    is_refused = true;
  }
  EXPECT(is_refused);
}

void steps_that_cannot_be_are_refused() {
  Model model;
  sage::Team team(2);
  for (const std::int64_t length : {std::int64_t{3}, std::int64_t{kBlocks * kBlock + 1}}) {
    bool is_refused = false;
    try {
      model.run(team, {5}, {length});
    } catch (const std::invalid_argument&) {
      is_refused = true;
    }
    EXPECT(is_refused);
  }
}

}  // namespace

int main() {
  threads_change_nothing(false);
  threads_change_nothing(true);
  weights_of_few_bits_run();
  caches_of_few_bits_run();
  choices_of_blocks_run();
  choices_of_prompts_run();
  common_blocks_are_read_once();
  trees_run();
  steps_that_cannot_be_are_refused();
  std::puts("decoder: passed");
}
