// The attention of a step: what each of its stages computes and commits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "block_choice.h"
#include "product.h"
#include "tile_choice.h"

namespace sage::cpu {

// Adjacent chunks of a stage's work.
struct Chunks {
  int first, count;
};

// Calls of `compute` functions are constant and write to `local` alone; see `Work`.
class AttentionWork {
 public:
  // Where a step keeps what its stages hand on.
  struct Memory {
    char* queries;    // [tokens][heads][head size] of the attention's type
    char* attended;   // [tokens][heads * head size, even] of the products' input type
    float* partials;  // [num_partials]
  };

  // `half`: a row; those before it and the others are attended apart, if the step `has_halves`. 0: none. Throws
  // std::invalid_argument for lengths or blocks outside of the step and the cache, and for choices that do not fit.
  AttentionWork(const PagedCache& cache, const DecoderStep& step, const DecoderShape& shape, const Kernels& kernels,
                const AttentionCosts* costs, std::vector<int> windows, int threads, int half);

  void use(const Memory& memory) { memory_ = memory; }
  Size num_partials() const { return static_cast<Size>(std::max(plan_.num_partials, whole_.num_partials)); }
  Size local_bytes() const;
  StepReport report() const { return {choice_.failure(), tiles_.blocks_read(static_cast<int>(windows_.size()))}; }

  // Chunks of each stage of a layer; 0: the layer has none.
  int num_encoded(int) const { return static_cast<int>(filled_.size()); }
  int num_observed(int) const { return static_cast<int>(observed_.size()) * shape_.kv_heads; }
  int num_weighed(int layer) const {
    return layer >= choice_.num_whole() && choice_.has_weights() ? static_cast<int>(plan_.sequences.size()) : 0;
  }
  int num_chosen(int layer) const { return layer >= choice_.num_whole() && choice_.exists() ? 1 : 0; }
  int num_estimated(int layer) const { return tiles_.is_estimated(layer) ? tiles_.count() * shape_.kv_heads : 0; }
  Chunks attended(int layer, Rows rows) const { return chunks_of(plan_of(layer).tasks, plan_of(layer).first_tasks, rows); }
  Chunks merged(int layer, Rows rows) const { return chunks_of(plan_of(layer).merged, plan_of(layer).first_merged, rows); }
  // Whether rows can be attended before later rows have keys, and without them.
  bool has_halves() const { return half_ > 0 && plan_.groups.empty(); }

  // Puts queries, keys and values of a token where attention reads them: [heads + 2 * key heads][head size], rotated.
  void store(int layer, int row, const float* rotated);

  // Keys of blocks that the step fills, in few bits.
  void encode(int layer, int chunk, char* local) const;
  void commit_encoded(int layer, int chunk, const char* local);
  // Weights that the last queries of some sequences give to blocks.
  void observe(int layer, int chunk, char* local) const;
  void commit_observed(int chunk, const char* local);
  // Blocks that decoding sequences read.
  void weigh(int layer, int chunk, char* local) const;
  void commit_weighed(int chunk, const char* local);
  bool chooses_jointly() const { return choice_.is_joint(); }
  void choose(int layer, Exchange* ranks);  // null where it chooses alone; throws what the exchange throws
  // Blocks that tiles of prompts read.
  void estimate(int layer, int chunk, char* local) const;
  void commit_estimated(int chunk, const char* local);
  void attend(int layer, int chunk, char* local) const;
  void commit_attended(int layer, int chunk, const char* local);
  void merge(int layer, int chunk, float* result) const;
  void commit_merged(int layer, int chunk, const float* result);

 private:
  // A half of the tasks, or all of them.
  Chunks chunks_of(const std::vector<AttentionTask>& tasks, int first_tasks, Rows rows) const {
    const int count = static_cast<int>(tasks.size());
    if (rows.count == num_tokens_) return {0, count};
    return rows.first == 0 ? Chunks{0, first_tasks} : Chunks{first_tasks, count - first_tasks};
  }
  static AttentionPlan plan_of_all(const PagedCache& cache, DecoderStep step, const DecoderShape& shape, int threads);
  const AttentionPlan& plan_of(int layer) const { return layer < choice_.num_whole() ? whole_ : plan_; }
  // Bytes of a head's numbers in the cache, and of its scale and zero point.
  Size head_bytes() const;
  Size scale_bytes() const { return 2 * size_of(kernels_.weights); }
  int share() const { return shape_.heads / shape_.kv_heads; }
  int head_numbers() const { return shape_.heads * shape_.head_size; }
  int key_numbers() const { return shape_.kv_heads * shape_.head_size; }
  Size result_bytes(int rows) const { return (size(rows) * size(shape_.head_size + 2) * 4 + 63) / 64 * 64; }
  Size weights_bytes() const { return (size(shape_.kv_heads * table_width_) * 4 + 63) / 64 * 64; }
  Size gathered_query_bytes(const AttentionTask& task) const;
  Attend attend_of(const AttentionTask& task, int layer) const;
  std::vector<float> queries_of_ranks(const std::vector<float>& own, Exchange& ranks) const;
  char* gather_queries(const AttentionPlan& plan, const AttentionTask& task, char* to) const;
  void commit_shared(const AttentionPlan& plan, const AttentionTask& task, const char* local);
  void store_attended(int row, int tokens, int head, const float* from);

  const PagedCache cache_;
  const DecoderShape& shape_;
  const Kernels& products_;  // of the products that take the results
  const Kernels& kernels_;   // of the cache's type
  const Size element_, query_element_;
  const std::vector<int> windows_;  // of each layer
  const int num_tokens_, table_width_, half_;
  const bool is_decoding_;
  int block_shift_ = 0;
  const AttentionPlan plan_;
  KeyBounds bounds_;
  BlockChoice choice_;
  const AttentionPlan whole_;  // of the layers that read all blocks where others choose
  TileChoice tiles_;
  struct Filled {
    int sequence, block;  // place in its table
  };
  std::vector<Filled> filled_;  // blocks that the step fills, where their keys are to be encoded
  const std::shared_ptr<const Observed> wanted_;
  std::vector<int> observed_;  // sequences of which some queries are observed
  Memory memory_{};
};

}  // namespace sage::cpu
