// Yang et al.'s S3-FIFO (SOSP 2023), request by request as libCacheSim 0.3.5 has it. Sizes: the small queue has
// int(small_ratio * capacity) places, the ghost queue int(ghost_ratio * capacity), the main queue what the small one leaves.
// Until the first victim is chosen, blocks that find the small queue full go to the main queue.
#pragma once

#include "base.h"

namespace sage {

template <typename Host>
class S3Fifo : public PolicyBase<Host> {
 public:
  S3Fifo(Host& host, Settings& settings)
      : PolicyBase<Host>(host, settings),
        small_(host),
        main_(host),
        ghosts_(host),
        returning_(host, settings.capacity()),
        small_size_(settings.part(settings.number("small_ratio", 0.1, 0.0, 1.0))),
        ghost_size_(settings.part(settings.number("ghost_ratio", 0.9, 0.0, 16.0))),
        main_size_(settings.capacity() - small_size_),
        move_to_main_(settings.whole("move_to_main", 2, 1, 1e6)) {}

  void insert(Slot slot, const BlockFacts&) {
    notice(slot);
    const bool to_main = returning_.pop(slot) != 0 || (!has_evicted_ && small_.size() >= small_size_);
    this->host_[slot].count = 0;
    this->set_where(slot, to_main ? kMain : kSmall);
    (to_main ? main_ : small_).push(slot);
  }

  void hit(Slot slot) { ++this->host_[slot].count; }

  bool remove(Slot slot, bool evicted) {
    const bool is_small = this->host_[slot].where == kSmall;
    (is_small ? small_ : main_).erase(slot);
    if (!evicted || !is_small || ghost_size_ == 0) return true;
    if (ghosts_.size() >= ghost_size_) {
      const Slot oldest = ghosts_.oldest();
      ghosts_.erase(oldest);
      this->host_.forget(oldest);
    }
    this->set_where(slot, kGhost);
    ghosts_.push(slot);
    return false;
  }

  void notice(Slot slot) {
    if (this->host_[slot].where != kGhost) return;
    ghosts_.erase(slot);
    returning_.push(slot, kMain);
  }

  Slot choose(Slot) {
    has_evicted_ = true;
    Slot victim = kNoSlot;
    if (main_.size() > main_size_ || small_.size() == 0) victim = of_main();
    if (victim == kNoSlot) victim = of_small();
    return victim != kNoSlot ? victim : of_main();
  }

  std::string reason(Slot slot) const { return this->host_[slot].where == kSmall ? "small queue" : "main queue"; }
  void set_evictable(Slot slot, bool evictable) {
    (this->host_[slot].where == kSmall ? small_ : main_).set_evictable(slot, evictable);
  }

 private:
  enum : unsigned { kSmall = 1, kMain = 2 };

  // On the way, slots that were used often enough go to the main queue.
  Slot of_small() {
    Slot slot;
    while ((slot = small_.first()) != kNoSlot && this->host_[slot].count >= move_to_main_) {
      small_.erase(slot);
      this->host_[slot].count = 0;
      this->set_where(slot, kMain);
      main_.push(slot);
    }
    return slot;
  }

  // On the way, slots that were used go to the newest end, for at most three rounds.
  Slot of_main() {
    Slot slot;
    while ((slot = main_.first()) != kNoSlot && this->host_[slot].count > 0) {
      this->host_[slot].count = std::min(this->host_[slot].count, 3u) - 1;
      main_.move_to_newest(slot);
    }
    return slot;
  }

  Queue<Host> small_, main_;
  List<Host> ghosts_;
  Returning<Host> returning_;
  const std::size_t small_size_, ghost_size_, main_size_;
  const std::uint32_t move_to_main_;
  bool has_evicted_ = false;
};

}  // namespace sage
