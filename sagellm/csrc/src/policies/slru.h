// Segmented LRU (Karedla, Love, Wherry, IEEE Computer 1994): a block that is hit on probation is protected, until others
// push it out of there again.
#pragma once

#include "base.h"

namespace sage {

// Two queues of one cache; also the main part of W-TinyLFU.
template <typename Host>
class Segments {
 public:
  enum : unsigned { kProbation = 1, kProtected = 2 };

  Segments(Host& host, std::size_t limit) : host_(host), probation_(host), protected_(host), limit_(limit) {}

  void push(Slot slot) {
    host_[slot].where = kProbation;
    probation_.push(slot);
  }

  void hit(Slot slot) {
    if (host_[slot].where == kProtected) {
      protected_.move_to_newest(slot);
      return;
    }
    probation_.erase(slot);
    host_[slot].where = kProtected;
    protected_.push(slot);
    while (protected_.size() > limit_) {
      const Slot oldest = protected_.oldest();
      protected_.erase(oldest);
      push(oldest);
    }
  }

  Queue<Host>& of(Slot slot) { return host_[slot].where == kProbation ? probation_ : protected_; }
  Slot first() {
    const Slot slot = probation_.first();
    return slot != kNoSlot ? slot : protected_.first();
  }

 private:
  Host& host_;
  Queue<Host> probation_, protected_;
  const std::size_t limit_;
};

template <typename Host>
class Slru : public PolicyBase<Host> {
 public:
  Slru(Host& host, Settings& settings)
      : PolicyBase<Host>(host, settings), segments_(host, settings.part(settings.number("protected_ratio", 0.8, 0.0, 1.0))) {}

  void insert(Slot slot, const BlockFacts&) { segments_.push(slot); }
  void hit(Slot slot) { segments_.hit(slot); }
  bool remove(Slot slot, bool) {
    segments_.of(slot).erase(slot);
    return true;
  }
  Slot choose(Slot) { return segments_.first(); }
  std::string reason(Slot slot) const {
    return this->host_[slot].where == Segments<Host>::kProbation ? "probation" : "protected";
  }
  void set_evictable(Slot slot, bool evictable) { segments_.of(slot).set_evictable(slot, evictable); }

 private:
  Segments<Host> segments_;
};

}  // namespace sage
