// Which blocks the attention of a decode step reads, and the bounds of keys that they may be chosen by.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "product.h"

namespace sage::cpu {

// `PagedCache::bounds`, `codes` and `key_sums`. Does nothing without them.
class KeyBounds {
 public:
  KeyBounds(const PagedCache& cache, const DecoderShape& shape) : cache_(cache), shape_(shape) {}

  KeySummary of_head(int layer, int head) const;
  bool has_codes() const { return cache_.codes != nullptr; }
  Size code_bytes() const { return cpu::code_bytes(cache_.block_size, shape_.head_size); }  // of a key head in a block
  std::uint8_t* codes_of(int layer, std::int64_t block) const;                              // of all key heads
  // Forgets the bounds of the blocks that a step begins to write. Its keys may then come in any order.
  void begin(const std::vector<Sequence>& sequences, int layers);
  // `keys`: [key heads][head size] of a token. Any thread may call it.
  void add(int layer, std::int64_t block, const float* keys);

 private:
  Size stride() const { return size(2 * shape_.kv_heads * shape_.head_size); }

  const PagedCache& cache_;
  const DecoderShape& shape_;
  std::mutex mutex_;  // tokens of one block are committed by several threads
};

// The choice of the layer at work. There is no choice without a `Sparse`, or where every sequence reads all of its blocks.
class BlockChoice {
 public:
  BlockChoice(std::shared_ptr<const Sparse> sparse, const AttentionPlan& plan, const DecoderShape& shape, int table_width);

  bool exists() const { return !chosen_.empty(); }
  int num_whole() const { return exists() ? sparse_->whole_layers : 0; }  // layers that read all blocks
  bool has_weights() const { return !weights_.empty(); }
  // Whether there is a number for each key, to weigh it, and not for each block.
  bool weighs_keys() const {
    return sparse_->weights != Sparse::Weights::kBounds && sparse_->weights != Sparse::Weights::kSpread;
  }
  KeySummary summary(const KeyBounds& bounds, int layer, int head) const;
  bool wants_queries() const { return static_cast<bool>(sparse_->choose); }
  // Whether a choice depends on the queries of other ranks: one for all key heads, or for a key head that several ranks have.
  bool is_joint() const { return exists() && shape_.ranks > 1 && (!by_head() || shape_.replicas > 1); }
  // Ranks whose queries a choice depends on: so many from this one on.
  int first_rank() const { return by_head() ? shape_.rank / shape_.replicas * shape_.replicas : 0; }
  int num_ranks() const { return by_head() ? shape_.replicas : shape_.ranks; }
  Size weights_of_sequence() const { return size(heads_ * table_width_); }  // of this rank, [key heads][table width]
  float* weights_of(int sequence) {
    if (!is_joint()) return weights_.data() + size(sequence) * weights_of_sequence();
    return gathered_.data() + size(sequence * shape_.ranks + shape_.rank) * weights_of_sequence();
  }
  // Blocks to read, by number. A thread that is late may read those of any layer.
  const std::int64_t* table(int sequence, int head) const { return chosen_.data() + place(sequence, by_head() ? head : 0); }

  // `queries`: [sequences][heads][head size], if they are wanted. `ranks`: where the choice is joint, else null. Throws what
  // the exchange throws.
  void choose(int layer, const float* queries, Exchange* ranks);
  const std::string& failure() const { return failure_; }

 private:
  bool by_head() const { return sparse_->by_head; }
  int choices() const { return by_head() ? heads_ : 1; }
  Size place(int sequence, int choice) const { return size((sequence * choices() + choice) * most_); }
  void choose_most(int sequence, int choice, int keep, std::int64_t* positions);
  int num_rows() const { return is_joint() ? num_ranks() * heads_ / shape_.replicas : heads_; }  // of weights of a sequence
  void join_weights(Exchange& ranks);

  const std::shared_ptr<const Sparse> sparse_;
  const std::vector<Sequence>& sequences_;
  const DecoderShape& shape_;
  const int heads_, table_width_;
  int most_ = 0;
  std::vector<float> weights_, worth_;
  std::vector<float> gathered_;  // weights of all ranks, [sequences][ranks][key heads][table width]
  std::vector<std::int64_t> positions_, chosen_;
  std::vector<int> order_;
  std::string failure_;
};

}  // namespace sage::cpu
