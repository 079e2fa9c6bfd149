// The record that a policy keeps of each slot, and the two hosts that policies are compiled for.
#pragma once

#include <cstdint>
#include <vector>

#include "key_map.h"
#include "sagellm/policy.h"

namespace sage {

// Where a slot is, as each policy names its queues: below kGhost on the tier, from there on a ghost, from kNoticed on a
// ghost that was noticed, which will be inserted at that less kNoticed.
enum : std::uint8_t { kGhost = 8, kNoticed = 16, kNowhere = 255 };

struct Node {
  std::uint64_t key = 0;
  Slot prev = kNoSlot, next = kNoSlot;  // the older and the newer one of its queue
  std::uint32_t count = 0;              // uses, or whatever a policy counts
  std::uint32_t place = 0;              // in a PinnedQueue
  std::uint8_t where = kNowhere;
  bool is_evictable = true;
  bool has_no_ghost = false;  // of arc: leaves without a trace
};

// Blocks that may be pinned, owned by Books.
class PinnedHost {
 public:
  static constexpr bool kPinned = true;
  explicit PinnedHost(Books& books) : books_(books) {}

  Node& operator[](Slot slot) { return nodes_[slot]; }
  const Node& operator[](Slot slot) const { return nodes_[slot]; }
  std::size_t size() const { return nodes_.size(); }
  bool knows(Slot slot) const { return slot < nodes_.size(); }
  void ensure(Slot slot) {
    if (slot >= nodes_.size()) nodes_.resize(static_cast<std::size_t>(slot) + 1);
  }
  bool confirm(Slot slot) { return books_.confirm(slot); }
  Slot resident_parent(Slot slot) { return books_.resident_parent(slot); }
  void forget(Slot slot) {
    nodes_[slot].where = kNowhere;
    books_.forget(slot);
  }

 private:
  Books& books_;
  std::vector<Node> nodes_;
};

// A flat cache: nothing is pinned. It owns the slots and finds them by key.
class FlatHost {
 public:
  static constexpr bool kPinned = false;

  Node& operator[](Slot slot) { return nodes_[slot]; }
  const Node& operator[](Slot slot) const { return nodes_[slot]; }
  std::size_t size() const { return nodes_.size(); }
  static constexpr bool confirm(Slot) { return true; }
  static constexpr Slot resident_parent(Slot) { return kNoSlot; }

  Slot find(std::uint64_t key) const { return map_.find(key); }
  void prefetch(std::uint64_t key) const { map_.prefetch(key); }
  void prefetch_node(std::uint64_t key) const {
    const Slot slot = map_.find(key);
    if (slot != kNoSlot) sage::prefetch(&nodes_[slot]);
  }
  // Beyond the processor's nearer caches.
  bool is_large() const { return nodes_.size() > kLarge; }
  Slot add(std::uint64_t key) {
    Slot slot = free_;
    if (slot != kNoSlot) {
      free_ = nodes_[slot].next;
    } else {
      slot = static_cast<Slot>(nodes_.size());
      nodes_.emplace_back();
    }
    nodes_[slot].key = key;
    nodes_[slot].where = kNowhere;
    map_.insert(key, slot);
    return slot;
  }
  void forget(Slot slot) {
    map_.erase(nodes_[slot].key);
    nodes_[slot].where = kNowhere;
    nodes_[slot].next = free_;
    free_ = slot;
  }

 private:
  static constexpr std::size_t kLarge = 8192;

  KeyMap map_;
  std::vector<Node> nodes_;
  Slot free_ = kNoSlot;
};

}  // namespace sage
