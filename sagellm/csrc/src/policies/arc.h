// Megiddo and Modha's ARC (FAST 2003), request by request as libCacheSim 0.3.5 has it: the target is a real number, and
// the ghost lists are trimmed when a victim is chosen.
#pragma once

#include "base.h"

namespace sage {

template <typename Host>
class Arc : public PolicyBase<Host> {
 public:
  Arc(Host& host, Settings& settings)
      : PolicyBase<Host>(host, settings), recent_(host), frequent_(host), recent_ghosts_(host), frequent_ghosts_(host),
        returning_(host, settings.capacity()) {}

  void insert(Slot slot, const BlockFacts&) {
    notice(slot);
    const bool comes_back = returning_.pop(slot) != 0;
    this->host_[slot].has_no_ghost = false;  // of the block that had the slot before
    this->set_where(slot, comes_back ? kFrequent : kRecent);
    (comes_back ? frequent_ : recent_).push(slot);
  }

  void hit(Slot slot) {
    if (this->host_[slot].where == kFrequent) {
      frequent_.move_to_newest(slot);
    } else {
      recent_.erase(slot);
      this->set_where(slot, kFrequent);
      frequent_.push(slot);
    }
  }

  bool remove(Slot slot, bool evicted) {
    const bool is_recent = this->host_[slot].where == kRecent;
    (is_recent ? recent_ : frequent_).erase(slot);
    if (!evicted || this->host_[slot].has_no_ghost) return true;
    this->set_where(slot, is_recent ? kRecentGhost : kFrequentGhost);
    (is_recent ? recent_ghosts_ : frequent_ghosts_).push(slot);
    return false;
  }

  void notice(Slot slot) {
    const unsigned where = this->host_[slot].where;
    if (where != kRecentGhost && where != kFrequentGhost) return;
    const auto recent = static_cast<double>(recent_ghosts_.size()), frequent = static_cast<double>(frequent_ghosts_.size());
    if (where == kRecentGhost) {
      target_ = std::min(target_ + std::max(frequent / recent, 1.0), static_cast<double>(this->capacity_));
      recent_ghosts_.erase(slot);
    } else {
      target_ = std::max(target_ - std::max(recent / frequent, 1.0), 0.0);
      frequent_ghosts_.erase(slot);
    }
    returning_.push(slot, where == kRecentGhost ? 1u : 2u);
  }

  Slot choose(Slot incoming) {
    const unsigned came_from = this->noticed(incoming);
    const bool leaves_no_ghost = came_from == 0 && trim();
    const std::size_t size = recent_.size();
    const auto exact = static_cast<double>(size);
    const bool of_recent = leaves_no_ghost || frequent_.size() == 0 ||
                           (size > 0 && (exact > target_ || (exact == target_ && came_from == 2)));
    Slot victim = (of_recent ? recent_ : frequent_).first();
    if (victim == kNoSlot) victim = (of_recent ? frequent_ : recent_).first();
    if (victim != kNoSlot) {
      Node& node = this->host_[victim];
      node.has_no_ghost = leaves_no_ghost && node.where == kRecent;
    }
    return victim;
  }

  std::string reason(Slot slot) const {
    return worded(this->host_[slot].where == kRecent ? "recent list, target %.3f" : "frequent list, target %.3f", target_);
  }
  void set_evictable(Slot slot, bool evictable) {
    (this->host_[slot].where == kRecent ? recent_ : frequent_).set_evictable(slot, evictable);
  }

 private:
  enum : unsigned { kRecent = 1, kFrequent = 2, kRecentGhost = kGhost, kFrequentGhost = kGhost + 1 };

  // Makes room in the ghost lists for a victim whose room is for a block that is in none of them. True: the recent list
  // fills the cache by itself, and its victim leaves no ghost.
  bool trim() {
    const std::size_t recent = recent_.size() + recent_ghosts_.size();
    if (recent + 1 > this->capacity_) {
      if (recent_ghosts_.size() == 0) return true;
      drop(recent_ghosts_);
    } else if (recent + frequent_.size() + frequent_ghosts_.size() >= 2 * this->capacity_ && frequent_ghosts_.size() > 0) {
      drop(frequent_ghosts_);
    }
    return false;
  }

  void drop(List<Host>& ghosts) {
    const Slot oldest = ghosts.oldest();
    ghosts.erase(oldest);
    this->host_.forget(oldest);
  }

  Queue<Host> recent_, frequent_;
  List<Host> recent_ghosts_, frequent_ghosts_;
  Returning<Host> returning_;
  double target_ = 0.0;
};

}  // namespace sage
