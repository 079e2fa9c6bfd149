// The block that was used least recently goes.
#pragma once

#include "base.h"

namespace sage {

template <typename Host>
class Lru : public PolicyBase<Host> {
 public:
  Lru(Host& host, Settings& settings) : PolicyBase<Host>(host, settings), queue_(host) {}

  void insert(Slot slot, const BlockFacts&) {
    this->set_where(slot, 1);
    queue_.push(slot);
  }
  void hit(Slot slot) { queue_.move_to_newest(slot); }
  bool remove(Slot slot, bool) {
    queue_.erase(slot);
    return true;
  }
  Slot choose(Slot) { return queue_.first(); }
  std::string reason(Slot) const { return "least recently used"; }
  void set_evictable(Slot slot, bool evictable) { queue_.set_evictable(slot, evictable); }

 private:
  Queue<Host> queue_;
};

}  // namespace sage
