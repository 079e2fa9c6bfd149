// Johnson and Shasha's 2Q, full version (VLDB 1994): what comes waits in A1in; what leaves that is remembered in A1out; what
// comes back from there goes to Am, an LRU queue.
#pragma once

#include "base.h"

namespace sage {

template <typename Host>
class TwoQ : public PolicyBase<Host> {
 public:
  TwoQ(Host& host, Settings& settings)
      : PolicyBase<Host>(host, settings),
        in_(host),
        main_(host),
        out_(host),
        returning_(host, settings.capacity()),
        in_size_(std::max<std::size_t>(1, settings.part(settings.number("in_ratio", 0.25, 0.0, 1.0)))),
        out_size_(std::max<std::size_t>(1, settings.part(settings.number("out_ratio", 0.5, 0.0, 16.0)))) {}

  void insert(Slot slot, const BlockFacts&) {
    notice(slot);
    const bool to_main = returning_.pop(slot) != 0;
    this->set_where(slot, to_main ? kMain : kIn);
    (to_main ? main_ : in_).push(slot);
  }

  void hit(Slot slot) {
    if (this->host_[slot].where == kMain) main_.move_to_newest(slot);
  }

  bool remove(Slot slot, bool evicted) {
    const bool is_in = this->host_[slot].where == kIn;
    (is_in ? in_ : main_).erase(slot);
    if (!evicted || !is_in) return true;
    this->set_where(slot, kGhost);
    out_.push(slot);
    if (out_.size() > out_size_) {
      const Slot oldest = out_.oldest();
      out_.erase(oldest);
      this->host_.forget(oldest);
    }
    return false;
  }

  void notice(Slot slot) {
    if (this->host_[slot].where != kGhost) return;
    out_.erase(slot);
    returning_.push(slot, kMain);
  }

  Slot choose(Slot) {
    const bool of_in = in_.size() > in_size_;
    const Slot victim = (of_in ? in_ : main_).first();
    return victim != kNoSlot ? victim : (of_in ? main_ : in_).first();
  }

  std::string reason(Slot slot) const { return this->host_[slot].where == kIn ? "A1in" : "Am"; }
  void set_evictable(Slot slot, bool evictable) {
    (this->host_[slot].where == kIn ? in_ : main_).set_evictable(slot, evictable);
  }

 private:
  enum : unsigned { kIn = 1, kMain = 2 };

  Queue<Host> in_, main_;
  List<Host> out_;
  Returning<Host> returning_;
  const std::size_t in_size_, out_size_;
};

}  // namespace sage
