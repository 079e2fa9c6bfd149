// Zhang et al.'s SIEVE (NSDI 2024): a hand moves from the oldest block to newer ones, forgives each visit once, and takes the
// first that was not visited.
#pragma once

#include "base.h"

namespace sage {

template <typename Host>
class Sieve : public PolicyBase<Host> {
 public:
  Sieve(Host& host, Settings& settings) : PolicyBase<Host>(host, settings), queue_(host) {}

  void insert(Slot slot, const BlockFacts&) {
    this->set_where(slot, 1);
    this->host_[slot].count = 0;
    queue_.push(slot);
  }
  void hit(Slot slot) { this->host_[slot].count = 1; }
  bool remove(Slot slot, bool) {
    if (hand_ == slot) hand_ = queue_.newer(slot);
    queue_.erase(slot);
    return true;
  }

  Slot choose(Slot) {
    Slot slot = wrapped(hand_);
    while (slot != kNoSlot && this->host_[slot].count != 0) {
      this->host_[slot].count = 0;
      slot = wrapped(queue_.newer(slot));
    }
    if (slot != kNoSlot) hand_ = queue_.newer(slot);
    return slot;
  }

  std::string reason(Slot) const { return "not visited"; }
  void set_evictable(Slot slot, bool evictable) { queue_.set_evictable(slot, evictable); }

 private:
  Slot wrapped(Slot slot) {
    const Slot found = queue_.first_from(slot);
    return found != kNoSlot ? found : queue_.first();
  }

  Queue<Host> queue_;
  Slot hand_ = kNoSlot;
};

}  // namespace sage
