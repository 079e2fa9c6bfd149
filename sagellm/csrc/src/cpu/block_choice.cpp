#include "block_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace sage::cpu {

namespace {

constexpr float kEnd = 1e30F;  // more than any weight

bool is_partly_read(const Sequence& one) { return one.seen < one.length; }

std::string wrong_with(const std::int64_t* positions, int keep, int blocks) {
  for (int i = 0; i < keep; ++i) {
    if (positions[i] < (i == 0 ? 0 : positions[i - 1] + 1)) return "positions of blocks do not rise";
  }
  return positions[keep - 1] == blocks - 1 ? "" : "the last block of a sequence is not the last one chosen";
}

// A sum of numbers that are too large for it stays at its end.
std::int32_t added(std::int32_t sum, float key) {
  using Limits = std::numeric_limits<std::int32_t>;
  const double found = sum + std::nearbyint(std::ldexp(static_cast<double>(key), kKeySumBits));
  return static_cast<std::int32_t>(std::clamp<double>(found, Limits::min(), Limits::max()));
}

}  // namespace

KeySummary KeyBounds::of_head(int layer, int head) const {
  KeySummary found;
  const Size blocks = size(layer) * size(cache_.num_blocks);
  found.bounds = cache_.bounds + blocks * stride() + size(2 * head * shape_.head_size);
  found.bounds_stride = stride();
  if (cache_.key_sums != nullptr) {
    found.sums = cache_.key_sums + blocks * stride() / 2 + size(head * shape_.head_size);
    found.sums_stride = stride() / 2;
  }
  if (has_codes()) {
    found.codes = codes_of(layer, 0) + size(head) * code_bytes();
    found.codes_stride = size(shape_.kv_heads) * code_bytes();
  }
  return found;
}

std::uint8_t* KeyBounds::codes_of(int layer, std::int64_t block) const {
  const Size number = size(layer) * size(cache_.num_blocks) + size(static_cast<int>(block));
  return cache_.codes + number * size(shape_.kv_heads) * code_bytes();
}

void KeyBounds::begin(const std::vector<Sequence>& sequences, int layers) {
  if (cache_.bounds == nullptr && cache_.key_sums == nullptr) return;
  const Size numbers = size(shape_.head_size);
  for (const Sequence& one : sequences) {
    for (int position = one.length - one.tokens; position < one.length; ++position) {
      if (position % cache_.block_size != 0) continue;
      const Size block = size(static_cast<int>(one.table[size(position / cache_.block_size)]));
      for (int layer = 0; layer < layers; ++layer) {
        const Size of_layer = size(layer) * size(cache_.num_blocks) + block;
        if (cache_.key_sums != nullptr) std::fill_n(cache_.key_sums + of_layer * stride() / 2, stride() / 2, 0);
        if (cache_.bounds == nullptr) continue;
        float* to = cache_.bounds + of_layer * stride();
        for (int head = 0; head < shape_.kv_heads; ++head, to += 2 * numbers) {
          std::fill_n(to, numbers, std::numeric_limits<float>::infinity());
          std::fill_n(to + numbers, numbers, -std::numeric_limits<float>::infinity());
        }
      }
    }
  }
}

void KeyBounds::add(int layer, std::int64_t block, const float* keys) {
  if (cache_.bounds == nullptr && cache_.key_sums == nullptr) return;
  const std::lock_guard lock(mutex_);
  const Size number = size(layer) * size(cache_.num_blocks) + size(static_cast<int>(block));
  if (cache_.key_sums != nullptr) {
    std::int32_t* sums = cache_.key_sums + number * stride() / 2;
    for (int i = 0; i < shape_.kv_heads * shape_.head_size; ++i) sums[i] = added(sums[i], keys[i]);
  }
  if (cache_.bounds == nullptr) return;
  float* low = cache_.bounds + number * stride();
  for (int head = 0; head < shape_.kv_heads; ++head, low += 2 * shape_.head_size, keys += shape_.head_size) {
    float* high = low + shape_.head_size;
    for (int i = 0; i < shape_.head_size; ++i) {
      low[i] = std::min(low[i], keys[i]);
      high[i] = std::max(high[i], keys[i]);
    }
  }
}

BlockChoice::BlockChoice(std::shared_ptr<const Sparse> sparse, const AttentionPlan& plan, const DecoderShape& shape,
                         int table_width)
    : sparse_(std::move(sparse)), sequences_(plan.sequences), shape_(shape), heads_(shape.kv_heads), table_width_(table_width) {
  if (sparse_ == nullptr || std::none_of(sequences_.begin(), sequences_.end(), is_partly_read)) return;
  most_ = *std::max_element(sparse_->keep.begin(), sparse_->keep.end());
  chosen_.assign(sequences_.size() * size(choices() * most_), 0);  // blocks of the cache at any time
  positions_.resize(chosen_.size());
  if (sparse_->weights == Sparse::Weights::kNone) return;
  weights_.resize(sequences_.size() * size(num_rows() * table_width_));
  if (is_joint()) gathered_.resize(sequences_.size() * size(shape_.ranks) * weights_of_sequence());
}

KeySummary BlockChoice::summary(const KeyBounds& bounds, int layer, int head) const {
  KeySummary found;
  if (sparse_->weights == Sparse::Weights::kExact) return found;
  found = bounds.of_head(layer, head);
  found.reach = sparse_->reach;
  if (sparse_->weights != Sparse::Weights::kCodes) found.codes = nullptr;
  if (sparse_->weights != Sparse::Weights::kSpread) found.sums = nullptr;
  return found;
}

// Weights that ranks give to the same key head are added up in their order.
void BlockChoice::join_weights(Exchange& ranks) {
  const int own = heads_ * table_width_, rows = num_rows(), replicas = shape_.replicas;
  ranks.gather(gathered_.data(), sequences_.size(), size(own * shape_.ranks), size(own));
  for (int s = 0; s < static_cast<int>(sequences_.size()); ++s) {
    const float* from = gathered_.data() + size(s * shape_.ranks + first_rank()) * size(own);
    float* to = weights_.data() + size(s * rows * table_width_);
    for (int row = 0; row < rows; ++row, to += table_width_) {
      std::copy_n(from, table_width_, to);
      for (int other = 1; other < replicas; ++other) {
        from += table_width_;
        for (int i = 0; i < table_width_; ++i) to[i] += from[i];
      }
      from += table_width_;
    }
  }
}

void BlockChoice::choose(int layer, const float* queries, Exchange* ranks) {
  if (ranks != nullptr && has_weights()) join_weights(*ranks);
  if (sparse_->choose && failure_.empty()) {
    failure_ = sparse_->choose({layer, queries, weights_.data(), positions_.data()});
  }
  for (int s = 0; s < static_cast<int>(sequences_.size()); ++s) {
    const Sequence& one = sequences_[size(s)];
    if (!is_partly_read(one)) continue;
    const int keep = sparse_->keep[size(s)], blocks = static_cast<int>(one.table.size());
    for (int choice = 0; choice < choices(); ++choice) {
      std::int64_t* positions = positions_.data() + place(s, choice);
      if (sparse_->choose && failure_.empty()) failure_ = wrong_with(positions, keep, blocks);
      if (!sparse_->choose || !failure_.empty()) choose_most(s, choice, keep, positions);
      for (int i = 0; i < keep; ++i) {
        chosen_[place(s, choice) + size(i)] = one.table[size(static_cast<int>(positions[i]))];
      }
    }
  }
}

// Those at both ends first. Without weights the latest ones.
void BlockChoice::choose_most(int sequence, int choice, int keep, std::int64_t* positions) {
  const int blocks = static_cast<int>(sequences_[size(sequence)].table.size());
  worth_.assign(size(blocks), 0.F);
  for (int head = 0; head < num_rows() && has_weights(); ++head) {
    if (by_head() && head != choice) continue;
    const float* weights = weights_.data() + size((sequence * num_rows() + head) * table_width_);
    for (int i = 0; i < blocks; ++i) worth_[size(i)] += weights[i];
  }
  for (float& each : worth_) each = std::isnan(each) ? 0.F : each;  // NaN has no place in an order
  std::fill_n(worth_.begin(), std::min(blocks, sparse_->first), kEnd);
  const int last = std::min(blocks, std::max(1, sparse_->last));
  std::fill_n(worth_.end() - last, last, 2 * kEnd);
  order_.resize(size(blocks));
  std::iota(order_.begin(), order_.end(), 0);
  const auto comes_first = [&](int a, int b) {
    return worth_[size(a)] != worth_[size(b)] ? worth_[size(a)] > worth_[size(b)] : a > b;
  };
  std::nth_element(order_.begin(), order_.begin() + keep - 1, order_.end(), comes_first);
  std::sort(order_.begin(), order_.begin() + keep);
  std::copy_n(order_.begin(), keep, positions);
}

}  // namespace sage::cpu
