// The block that was used least often goes; among equals the one that came to that frequency first.
#pragma once

#include <vector>

#include "scored.h"

namespace sage {

// With pins, a ranking by frequency and arrival.
template <typename Host>
class RankedLfu : public Scored<Host, Rank<std::uint64_t, std::uint64_t, char>> {
  using Base = Scored<Host, Rank<std::uint64_t, std::uint64_t, char>>;

 public:
  using Base::Base;

  void insert(Slot slot, const BlockFacts&) {
    this->set_where(slot, 1);
    this->ranking_.insert(slot, {1, ++arrivals_, 0});
  }
  void hit(Slot slot) { this->ranking_.update(slot, {this->ranking_.key(slot).first + 1, ++arrivals_, 0}); }
  std::string reason(Slot slot) const {
    return worded("used %llu times", static_cast<unsigned long long>(this->ranking_.key(slot).first));
  }

 private:
  std::uint64_t arrivals_ = 0;
};

// In a flat cache, a queue a frequency and the queues in their order: constant time. After "An O(1) algorithm for
// implementing the LFU cache eviction scheme", Shah, Mitra, Matani, 2010.
template <typename Host>
class FlatLfu : public PolicyBase<Host> {
 public:
  FlatLfu(Host& host, Settings& settings) : PolicyBase<Host>(host, settings) {}

  void insert(Slot slot, const BlockFacts&) {
    this->set_where(slot, 1);
    if (lowest_ == kNone || buckets_[lowest_].frequency != 1) lowest_ = add(1, kNone, lowest_);
    push(lowest_, slot);
  }

  void hit(Slot slot) {
    const std::uint32_t from = this->host_[slot].count;
    const std::uint64_t frequency = buckets_[from].frequency + 1;
    std::uint32_t to = buckets_[from].higher;
    const bool has_next = to != kNone && buckets_[to].frequency == frequency;
    if (!has_next && buckets_[from].oldest == buckets_[from].newest) {
      buckets_[from].frequency = frequency;  // it is alone there, so the queue goes with it
      return;
    }
    if (!has_next) to = add(frequency, from, to);
    erase(from, slot);
    push(to, slot);
  }

  bool remove(Slot slot, bool) {
    erase(this->host_[slot].count, slot);
    return true;
  }
  Slot choose(Slot) { return buckets_[lowest_].oldest; }
  std::string reason(Slot slot) const {
    return worded("used %llu times", static_cast<unsigned long long>(buckets_[this->host_[slot].count].frequency));
  }
  void set_evictable(Slot, bool) {}

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  struct Bucket {
    std::uint64_t frequency;
    std::uint32_t lower, higher;
    Slot oldest, newest;
  };

  std::uint32_t add(std::uint64_t frequency, std::uint32_t lower, std::uint32_t higher) {
    std::uint32_t bucket = free_;
    if (bucket != kNone) {
      free_ = buckets_[bucket].higher;
    } else {
      bucket = static_cast<std::uint32_t>(buckets_.size());
      buckets_.emplace_back();
    }
    buckets_[bucket] = Bucket{frequency, lower, higher, kNoSlot, kNoSlot};
    if (lower != kNone) buckets_[lower].higher = bucket;
    if (higher != kNone) buckets_[higher].lower = bucket;
    return bucket;
  }

  void push(std::uint32_t bucket, Slot slot) {
    Bucket& queue = buckets_[bucket];
    Node& node = this->host_[slot];
    node.count = bucket;
    node.prev = queue.newest;
    node.next = kNoSlot;
    (queue.newest == kNoSlot ? queue.oldest : this->host_[queue.newest].next) = slot;
    queue.newest = slot;
  }

  void erase(std::uint32_t bucket, Slot slot) {
    Bucket& queue = buckets_[bucket];
    const Node& node = this->host_[slot];
    (node.prev == kNoSlot ? queue.oldest : this->host_[node.prev].next) = node.next;
    (node.next == kNoSlot ? queue.newest : this->host_[node.next].prev) = node.prev;
    if (queue.oldest != kNoSlot) return;
    (queue.lower == kNone ? lowest_ : buckets_[queue.lower].higher) = queue.higher;
    if (queue.higher != kNone) buckets_[queue.higher].lower = queue.lower;
    queue.higher = free_;
    free_ = bucket;
  }

  std::vector<Bucket> buckets_;
  std::uint32_t lowest_ = kNone, free_ = kNone;
};

template <typename Host>
using Lfu = std::conditional_t<Host::kPinned, RankedLfu<Host>, FlatLfu<Host>>;

}  // namespace sage
