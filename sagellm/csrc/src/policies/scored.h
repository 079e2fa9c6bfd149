// Policies that order blocks by a score.
#pragma once

#include <cmath>
#include <vector>

#include "base.h"

namespace sage {

// A rank of three parts, the lowest goes first.
template <typename First, typename Second, typename Third>
struct Rank {
  First first;
  Second second;
  Third third;
  bool operator<(const Rank& other) const {
    if (first != other.first) return first < other.first;
    if (second != other.second) return second < other.second;
    return third < other.third;
  }
};

template <typename Host, typename Key>
class Scored : public PolicyBase<Host> {
 public:
  Scored(Host& host, Settings& settings) : PolicyBase<Host>(host, settings), ranking_(host) {}

  bool remove(Slot slot, bool) {
    ranking_.erase(slot);
    return true;
  }
  Slot choose(Slot) { return ranking_.first(); }
  void set_evictable(Slot slot, bool evictable) { ranking_.set_evictable(slot, evictable); }

 protected:
  // The record that a policy keeps of a slot beside its rank.
  template <typename T>
  static T& extra(std::vector<T>& values, Slot slot) {
    if (slot >= values.size()) values.resize(static_cast<std::size_t>(slot) + 1);
    return values[slot];
  }

  Ranking<Host, Key> ranking_;
};

// Cherkasova's GDSF (HP Labs, 1998): frequency times cost over size, aged by the priority of the last victim. A new block is
// as old as the cache was before the evictions that made room for it.
template <typename Host>
class Gdsf : public Scored<Host, Rank<double, std::uint64_t, char>> {
  using Base = Scored<Host, Rank<double, std::uint64_t, char>>;

 public:
  using Base::Base;

  void insert(Slot slot, const BlockFacts& facts) {
    this->set_where(slot, 1);
    Own& own = this->extra(own_, slot);
    own = Own{0.0, facts.cost_s > 0.0 ? facts.cost_s : 1.0, std::max(1.0, facts.size_bytes)};
    this->ranking_.insert(slot, {used(own), ++computed_, 0});
    age_ = latest_;
  }
  void hit(Slot slot) {
    age_ = latest_;
    this->ranking_.update(slot, {used(own_[slot]), ++computed_, 0});
  }
  Slot choose(Slot) {
    const Slot slot = this->ranking_.first();
    if (slot != kNoSlot) latest_ = this->ranking_.key(slot).first;
    return slot;
  }
  std::string reason(Slot slot) const { return worded("priority %.6g", this->ranking_.key(slot).first); }

 private:
  struct Own {
    double frequency, cost, size;
  };
  double used(Own& own) const {
    own.frequency += 1.0;
    return age_ + own.frequency * own.cost / own.size;
  }

  std::vector<Own> own_;
  double age_ = 0.0, latest_ = 0.0;
  std::uint64_t computed_ = 0;
};

// LRU of leaves, where a new block also renews what it continues; of equally old ones the deepest goes.
template <typename Host>
class PrefixLru : public Scored<Host, Rank<std::uint64_t, std::uint64_t, std::uint64_t>> {
  using Base = Scored<Host, Rank<std::uint64_t, std::uint64_t, std::uint64_t>>;

 public:
  using Base::Base;

  void insert(Slot slot, const BlockFacts& facts) {
    this->set_where(slot, 1);
    // Depths count from the far end, so that the deepest is the lowest.
    this->ranking_.insert(slot, {++tick_, kNever - facts.depth, ++insertions_});
    // Ends at a block that is not less deep than the one below it: wrong depths must not lead this in a circle.
    for (Slot below = slot, above; (above = this->host_.resident_parent(below)) != kNoSlot; below = above) {
      if (this->ranking_.key(above).second <= this->ranking_.key(below).second) break;
      renew(above);
    }
  }
  void hit(Slot slot) {
    ++tick_;
    renew(slot);
  }
  std::string reason(Slot) const { return "oldest leaf"; }

 private:
  void renew(Slot slot) {
    auto key = this->ranking_.key(slot);
    key.first = tick_;
    this->ranking_.update(slot, key);
  }

  std::uint64_t tick_ = 0, insertions_ = 0;
};

// The deepest block goes; of equally deep ones the least recently used.
template <typename Host>
class PrefixDepth : public Scored<Host, Rank<std::uint64_t, std::uint64_t, char>> {
  using Base = Scored<Host, Rank<std::uint64_t, std::uint64_t, char>>;

 public:
  using Base::Base;

  void insert(Slot slot, const BlockFacts& facts) {
    this->set_where(slot, 1);
    this->ranking_.insert(slot, {kNever - facts.depth, ++tick_, 0});
  }
  void hit(Slot slot) { this->ranking_.update(slot, {this->ranking_.key(slot).first, ++tick_, 0}); }
  std::string reason(Slot slot) const {
    return worded("depth %llu", static_cast<unsigned long long>(kNever - this->ranking_.key(slot).first));
  }

 private:
  std::uint64_t tick_ = 0;
};

// Recency and frequency as one number that halves every `half_life` events, after LRFU (Lee et al., IEEE Transactions on
// Computers 2001), less for what lies deep, because a shallow block is shared by more. Kept as a logarithm that needs no
// renewal as time goes by.
template <typename Host>
class PrefixReuse : public Scored<Host, Rank<double, std::uint64_t, char>> {
  using Base = Scored<Host, Rank<double, std::uint64_t, char>>;

 public:
  PrefixReuse(Host& host, Settings& settings)
      : Base(host, settings),
        half_life_(settings.number_or_none("half_life", 4.0 * static_cast<double>(settings.capacity()), 1e-9, 1e18)),
        depth_weight_(settings.number("depth_weight", 0.25, 0.0, 1e9)) {}

  void insert(Slot slot, const BlockFacts& facts) {
    this->set_where(slot, 1);
    Own& own = this->extra(own_, slot);
    own = Own{1.0, static_cast<double>(++tick_), depth_weight_ * std::log2(static_cast<double>(facts.depth))};
    this->ranking_.insert(slot, {score(own), tick_, 0});
  }
  void hit(Slot slot) {
    Own& own = own_[slot];
    const auto now = static_cast<double>(++tick_);
    own.uses = 1.0 + own.uses * std::pow(2.0, -(now - own.last) / half_life_);
    own.last = now;
    this->ranking_.update(slot, {score(own), tick_, 0});
  }
  std::string reason(Slot slot) const { return worded("score %.6g", this->ranking_.key(slot).first); }

 private:
  struct Own {
    double uses, last, depth_part;
  };
  double score(const Own& own) const { return own.last / half_life_ + std::log2(own.uses) - own.depth_part; }

  const double half_life_, depth_weight_;
  std::vector<Own> own_;
  std::uint64_t tick_ = 0;
};

// Belady's bound (IBM Systems Journal 1966): the block whose next use is farthest away goes.
template <typename Host>
class Belady : public Scored<Host, Rank<std::uint64_t, std::uint64_t, char>> {
  using Base = Scored<Host, Rank<std::uint64_t, std::uint64_t, char>>;

 public:
  Belady(Host& host, Settings& settings) : Base(host, settings), future_(settings.future()) {
    if (future_ == nullptr) throw PolicyError("policy belady needs the option future: the keys of all events in order.");
  }

  void expect(std::uint64_t key) const { future_->require(key); }
  void insert(Slot slot, const BlockFacts&) {
    const std::uint64_t next = future_->at(slot, this->host_[slot].key);
    this->set_where(slot, 1);
    this->ranking_.insert(slot, {kNever - next, ++insertions_, 0});
  }
  void hit(Slot slot) {
    auto key = this->ranking_.key(slot);
    key.first = kNever - future_->at(slot, this->host_[slot].key);
    this->ranking_.update(slot, key);
  }
  std::string reason(Slot slot) const {
    const std::uint64_t next = kNever - this->ranking_.key(slot).first;
    if (next == kNever) return "never used again";
    return worded("next use %llu", static_cast<unsigned long long>(next));
  }

 private:
  std::shared_ptr<NextUse> future_;
  std::uint64_t insertions_ = 0;
};

}  // namespace sage
