// Queues of slots, oldest first. A slot is in one at most; what links them lies in its node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "nodes.h"

namespace sage {

template <typename Host>
class List {
 public:
  explicit List(Host& host) : host_(host) {}

  std::size_t size() const { return size_; }
  Slot oldest() const { return oldest_; }
  Slot newer(Slot slot) const { return host_[slot].next; }

  void push(Slot slot) {
    Node& node = host_[slot];
    node.prev = newest_;
    node.next = kNoSlot;
    (newest_ == kNoSlot ? oldest_ : host_[newest_].next) = slot;
    newest_ = slot;
    ++size_;
  }

  void erase(Slot slot) {
    const Node& node = host_[slot];
    (node.prev == kNoSlot ? oldest_ : host_[node.prev].next) = node.next;
    (node.next == kNoSlot ? newest_ : host_[node.next].prev) = node.prev;
    --size_;
  }

  void move_to_newest(Slot slot) {
    if (slot == newest_) return;
    erase(slot);
    push(slot);
  }

 protected:
  Host& host_;
  Slot oldest_ = kNoSlot, newest_ = kNoSlot;
  std::size_t size_ = 0;
};

// In a flat cache every slot may go.
template <typename Host>
class FlatQueue : public List<Host> {
 public:
  using List<Host>::List;
  Slot first() const { return this->oldest_; }
  Slot first_from(Slot slot) const { return slot; }
  void set_evictable(Slot, bool) {}
};

// A set of numbers below a bound, in words of 64 bits and words above that tell which of those are not zero: the smallest
// one from a given one on costs a word a level, four for 16 million.
class PlaceSet {
 public:
  static constexpr std::size_t kNone = ~std::size_t{0};

  void reset(std::size_t bound) {
    levels_.clear();
    do {
      bound = (bound + 63) / 64;
      levels_.emplace_back(bound, 0);
    } while (bound > 1);
  }

  void insert(std::size_t place) {
    for (auto& level : levels_) {
      std::uint64_t& word = level[place / 64];
      const bool was_empty = word == 0;
      word |= std::uint64_t{1} << (place % 64);
      if (!was_empty) return;
      place /= 64;
    }
  }

  void erase(std::size_t place) {
    for (auto& level : levels_) {
      std::uint64_t& word = level[place / 64];
      word &= ~(std::uint64_t{1} << (place % 64));
      if (word != 0) return;
      place /= 64;
    }
  }

  // The smallest member from `place` on, or kNone.
  std::size_t next(std::size_t place) const {
    for (std::size_t i = 0; i < levels_.size(); ++i) {
      if (place / 64 >= levels_[i].size()) return kNone;
      const std::uint64_t word = levels_[i][place / 64] >> (place % 64);
      if (word != 0) {
        place += static_cast<std::size_t>(__builtin_ctzll(word));
        while (i-- > 0) place = place * 64 + static_cast<std::size_t>(__builtin_ctzll(levels_[i][place]));
        return place;
      }
      place = place / 64 + 1;
    }
    return kNone;
  }

 private:
  std::vector<std::vector<std::uint64_t>> levels_;
};

// Places count up as slots are pushed, so the order of the queue is theirs, and the evictable ones are a set of places.
// When the places are used up the queue is numbered anew, which is paid for by as many pushes.
template <typename Host>
class PinnedQueue : public List<Host> {
 public:
  explicit PinnedQueue(Host& host) : List<Host>(host) { evictable_.reset(0); }

  void push(Slot slot) {
    if (num_places_ == slots_.size()) renumber();
    List<Host>::push(slot);
    give_place(slot);
  }

  void erase(Slot slot) {
    if (this->host_[slot].is_evictable) evictable_.erase(this->host_[slot].place);
    List<Host>::erase(slot);
  }

  void move_to_newest(Slot slot) {
    if (slot == this->newest_) return;
    erase(slot);
    push(slot);
  }

  void set_evictable(Slot slot, bool evictable) {
    Node& node = this->host_[slot];
    if (node.is_evictable == evictable) return;
    node.is_evictable = evictable;
    if (evictable) {
      evictable_.insert(node.place);
    } else {
      evictable_.erase(node.place);
    }
  }

  // The oldest evictable slot, or kNoSlot.
  Slot first() { return from(0); }
  // The oldest evictable one that is `slot` or newer; kNoSlot for none, or for none given.
  Slot first_from(Slot slot) { return slot == kNoSlot ? kNoSlot : from(this->host_[slot].place); }

 private:
  Slot from(std::size_t place) {
    while ((place = evictable_.next(place)) != PlaceSet::kNone) {
      const Slot slot = slots_[place];
      if (this->host_.confirm(slot)) return slot;
      set_evictable(slot, false);
    }
    return kNoSlot;
  }

  void give_place(Slot slot) {
    Node& node = this->host_[slot];
    node.place = static_cast<std::uint32_t>(num_places_);
    slots_[num_places_] = slot;
    if (node.is_evictable) evictable_.insert(num_places_);
    ++num_places_;
  }

  void renumber() {
    std::size_t room = 64;
    while (room < 2 * (this->size_ + 1)) room *= 2;
    slots_.assign(room, kNoSlot);
    evictable_.reset(room);
    num_places_ = 0;
    for (Slot slot = this->oldest_; slot != kNoSlot; slot = this->newer(slot)) give_place(slot);
  }

  std::vector<Slot> slots_;
  PlaceSet evictable_;
  std::size_t num_places_ = 0;
};

template <typename Host>
using Queue = std::conditional_t<Host::kPinned, PinnedQueue<Host>, FlatQueue<Host>>;

}  // namespace sage
