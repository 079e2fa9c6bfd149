#include "tile_choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

namespace sage::cpu {

TileChoice::TileChoice(std::shared_ptr<const SparsePrompts> sparse, const AttentionPlan& plan, const DecoderShape& shape,
                       int block_size)
    : sparse_(std::move(sparse)), sequences_(plan.sequences), block_size_(block_size) {
  if (sparse_ == nullptr) return;
  const auto fail = [](const char* words) { throw std::invalid_argument(words); };
  is_estimated_ = sparse_->counts.empty();
  if (is_estimated_ && (sparse_->stride < 1 || block_size % sparse_->stride != 0)) fail("a stride does not divide the block size");
  for (const AttentionTask& task : plan.tasks) {
    if (task.head != 0) continue;
    const Sequence& one = sequences_[size(task.sequence)];
    const int position = one.seen - one.tokens + task.first;
    tiles_.push_back({task.sequence, task.first, task.tokens, position / block_size,
                      divided(position + task.tokens, block_size)});
    width_ = std::max(width_, size(tiles_.back().blocks));
  }
  choices_ = is_estimated_ ? shape.kv_heads : 1;
  counts_.resize(tiles_.size() * size(choices_));
  tables_.resize(counts_.size() * width_);
  if (!is_estimated_ && sparse_->counts.size() != tiles_.size()) fail("a choice for prompts has another number of tiles");
  const std::int64_t* positions = sparse_->positions.data();
  std::int64_t left = static_cast<std::int64_t>(sparse_->positions.size());
  for (int t = 0; t < count(); ++t) {
    const Tile& tile = tiles_[size(t)];
    const auto& all = sequences_[size(tile.sequence)].table;
    if (is_estimated_) {  // blocks of the cache at any time
      for (int choice = 0; choice < choices_; ++choice) {
        counts_[size(t * choices_ + choice)] = tile.before;
        std::copy_n(all.begin(), tile.blocks, tables_.begin() + static_cast<std::ptrdiff_t>(size(t * choices_ + choice) * width_));
      }
      continue;
    }
    const int chosen = sparse_->counts[size(t)];
    if (chosen < 0 || chosen > std::min<std::int64_t>(left, tile.before)) fail("a tile reads more blocks than lie before it");
    std::int64_t* to = tables_.data() + size(t) * width_;
    for (int i = 0; i < chosen; ++i, ++positions) {
      if (*positions < (i == 0 ? 0 : positions[-1] + 1) || *positions >= tile.before) {
        fail("positions of a tile's blocks do not rise, or do not lie before it");
      }
      *to++ = all[static_cast<Size>(*positions)];
    }
    std::copy(all.begin() + tile.before, all.begin() + tile.blocks, to);
    counts_[size(t)] = chosen;
    left -= chosen;
  }
}

void TileChoice::choose(int number, const float* weights, std::int64_t* chosen) const {
  const Tile& tile = tiles_[size(number)];
  const int before = tile.before, own = tile.blocks - before;
  const int budget = std::max(sparse_->min_blocks, static_cast<int>(std::nearbyint(sparse_->share * static_cast<float>(tile.blocks))));
  const int most = std::clamp(budget - own, 0, before), least = std::clamp(sparse_->min_blocks - own, 0, most);
  std::vector<int> order(size(before));
  std::iota(order.begin(), order.end(), 0);
  // NaN has no place in an order.
  const auto worth = [&](int block) { return std::isnan(weights[block]) ? 0.F : weights[block]; };
  const auto is_end = [&](int block) { return block < sparse_->first || block >= before - sparse_->last; };
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    if (is_end(a) != is_end(b)) return is_end(a);
    return worth(a) != worth(b) ? worth(a) > worth(b) : a > b;
  });
  const float total = std::accumulate(weights, weights + tile.blocks, 0.F);
  float sum = std::accumulate(weights + before, weights + tile.blocks, 0.F);
  int count = 0;
  for (; count < most; ++count) {
    const int block = order[size(count)];
    if (count >= least && !is_end(block) && sum >= sparse_->threshold * total) break;
    sum += weights[block];
  }
  std::sort(order.begin(), order.begin() + count);
  const auto& all = sequences_[size(tile.sequence)].table;
  *chosen++ = count;
  for (int i = 0; i < count; ++i) *chosen++ = all[size(order[size(i)])];
  std::copy(all.begin() + before, all.begin() + tile.blocks, chosen);
}

void TileChoice::commit(int tile, int head, const std::int64_t* chosen) {
  const Size place = size(tile * choices_ + head);
  const int count = static_cast<int>(*chosen), read = count + tiles_[size(tile)].blocks - tiles_[size(tile)].before;
  counts_[place] = count;
  num_read_.fetch_add(read, std::memory_order_relaxed);
  std::copy_n(chosen + 1, read, tables_.data() + place * width_);
}

double TileChoice::blocks_read(int layers) const {
  double found = 0;
  for (int t = 0; t < count(); ++t) {
    const Tile& tile = tiles_[size(t)];
    if (is_estimated_)
      found += static_cast<double>(std::min(layers, sparse_->whole_layers)) / layers * tile.blocks;
    else
      found += counts_[size(t)] + tile.blocks - tile.before;
  }
  return found + static_cast<double>(num_read_.load(std::memory_order_relaxed)) / (layers * choices_);
}

}  // namespace sage::cpu
