// The block that came first goes; hits change nothing.
#pragma once

#include "base.h"

namespace sage {

template <typename Host>
class Fifo : public PolicyBase<Host> {
 public:
  Fifo(Host& host, Settings& settings) : PolicyBase<Host>(host, settings), queue_(host) {}

  void insert(Slot slot, const BlockFacts&) {
    this->set_where(slot, 1);
    queue_.push(slot);
  }
  void hit(Slot) {}
  bool remove(Slot slot, bool) {
    queue_.erase(slot);
    return true;
  }
  Slot choose(Slot) { return queue_.first(); }
  std::string reason(Slot) const { return "inserted first"; }
  void set_evictable(Slot slot, bool evictable) { queue_.set_evictable(slot, evictable); }

 protected:
  Queue<Host> queue_;
};

}  // namespace sage
