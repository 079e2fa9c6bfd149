// Slots ordered by a key that changes: a heap of four children, of those that may go, that knows where each slot is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "nodes.h"

namespace sage {

// `Key` has operator<; the lowest goes first. Keys of pinned slots are kept too, but not in order.
template <typename Host, typename Key>
class Ranking {
 public:
  explicit Ranking(Host& host) : host_(host) {}

  const Key& key(Slot slot) const { return keys_[slot]; }

  void insert(Slot slot, const Key& key) {
    if (slot >= keys_.size()) {
      keys_.resize(static_cast<std::size_t>(slot) + 1);
      at_.resize(static_cast<std::size_t>(slot) + 1, kNoSlot);
    }
    keys_[slot] = key;
    if (!Host::kPinned || host_[slot].is_evictable) add(slot);
  }

  void update(Slot slot, const Key& key) {
    keys_[slot] = key;
    const Slot at = at_[slot];
    if (at == kNoSlot) return;
    heap_[at].first = key;
    if (!up(at)) down(at);
  }

  void erase(Slot slot) {
    const Slot at = at_[slot];
    if (at == kNoSlot) return;
    at_[slot] = kNoSlot;
    const auto last = heap_.back();
    heap_.pop_back();
    if (at == heap_.size()) return;
    put(at, last);
    if (!up(at)) down(at);
  }

  void set_evictable(Slot slot, bool evictable) {
    if (host_[slot].is_evictable == evictable) return;
    host_[slot].is_evictable = evictable;
    if (evictable) {
      add(slot);
    } else {
      erase(slot);
    }
  }

  // The evictable slot with the lowest key, or kNoSlot.
  Slot first() {
    while (!heap_.empty()) {
      const Slot slot = heap_.front().second;
      if (host_.confirm(slot)) return slot;
      set_evictable(slot, false);
    }
    return kNoSlot;
  }

 private:
  using Item = std::pair<Key, Slot>;

  void add(Slot slot) {
    heap_.emplace_back(keys_[slot], slot);
    at_[slot] = static_cast<Slot>(heap_.size() - 1);
    up(heap_.size() - 1);
  }

  void put(std::size_t at, const Item& item) {
    heap_[at] = item;
    at_[item.second] = static_cast<Slot>(at);
  }

  bool up(std::size_t at) {
    const Item item = heap_[at];
    const std::size_t start = at;
    while (at != 0 && item.first < heap_[(at - 1) / 4].first) {
      put(at, heap_[(at - 1) / 4]);
      at = (at - 1) / 4;
    }
    if (at == start) return false;
    put(at, item);
    return true;
  }

  void down(std::size_t at) {
    const Item item = heap_[at];
    for (std::size_t child; (child = 4 * at + 1) < heap_.size(); at = child) {
      const std::size_t end = child + 4 < heap_.size() ? child + 4 : heap_.size();
      for (std::size_t other = child + 1; other < end; ++other) {
        if (heap_[other].first < heap_[child].first) child = other;
      }
      if (!(heap_[child].first < item.first)) break;
      put(at, heap_[child]);
    }
    put(at, item);
  }

  Host& host_;
  std::vector<Key> keys_;
  std::vector<Slot> at_;  // in the heap; kNoSlot: not in it
  std::vector<Item> heap_;
};

}  // namespace sage
