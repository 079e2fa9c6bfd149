// Which blocks the attention of a prompt reads, for each tile of its tokens.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "product.h"

namespace sage::cpu {

// Without a `SparsePrompts` there are no tiles. A tile reads the blocks of its own tokens, and those before them that are
// chosen. Both make a table of its own: keys that are left out do not count as positions there.
class TileChoice {
 public:
  struct Tile {
    int sequence, first, tokens;  // tokens of the step, in the sequence
    int before, blocks;           // blocks before the first one of its own, and all
  };
  // A table that a task reads: `skipped` keys of the sequence are not in it.
  struct Table {
    const std::int64_t* blocks;
    int skipped;
  };

  // Throws std::invalid_argument for positions that are not those of blocks before a tile, rising.
  TileChoice(std::shared_ptr<const SparsePrompts> sparse, const AttentionPlan& plan, const DecoderShape& shape, int block_size);

  bool exists() const { return !tiles_.empty(); }
  int count() const { return static_cast<int>(tiles_.size()); }
  const Tile& operator[](int tile) const { return tiles_[size(tile)]; }
  // Whether a layer's blocks are chosen by what its queries look at.
  bool is_estimated(int layer) const { return exists() && is_estimated_ && layer >= sparse_->whole_layers; }
  bool is_whole(int layer) const { return !exists() || (is_estimated_ && layer < sparse_->whole_layers); }
  int stride() const { return sparse_->stride; }
  Size width() const { return width_; }  // blocks of the longest table

  Table table(int tile, int head) const {
    const Size place = size(tile) * size(choices_) + (choices_ == 1 ? 0 : size(head));
    const Tile& of = tiles_[size(tile)];
    return {tables_.data() + place * width_, (of.before - counts_[place]) * block_size_};
  }
  // Chooses by weight, [blocks]; writes how many blocks before the tile are chosen, then the table.
  void choose(int tile, const float* weights, std::int64_t* chosen) const;
  void commit(int tile, int head, const std::int64_t* chosen);
  // Once the step is over: blocks that all tiles read, in the mean of layers and key heads.
  double blocks_read(int layers) const;

 private:
  const std::shared_ptr<const SparsePrompts> sparse_;
  const std::vector<Sequence>& sequences_;
  const int block_size_;
  bool is_estimated_ = false;
  int choices_ = 1;  // a tile's tables: one for each key head, or one for all
  Size width_ = 0;
  std::vector<Tile> tiles_;
  std::vector<int> counts_;
  std::atomic<std::int64_t> num_read_{0};  // of the tables that were committed
  std::vector<std::int64_t> tables_;
};

}  // namespace sage::cpu
