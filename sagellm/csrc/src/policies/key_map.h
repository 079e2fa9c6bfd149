// Keys to slots, by open addressing. A removal moves back what it left a hole before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../prefetch.h"
#include "sagellm/hash.h"
#include "sagellm/policy.h"

namespace sage {

class KeyMap {
 public:
  KeyMap() : places_(64), mask_(63) {}

  Slot find(std::uint64_t key) const {
    for (std::size_t at = home(key);; at = (at + 1) & mask_) {
      const Place& place = places_[at];
      if (place.slot == kNoSlot || place.key == key) return place.slot;
    }
  }

  // The key must not be there.
  void insert(std::uint64_t key, Slot slot) {
    if (++size_ > most_) grow();
    put(key, slot);
  }

  // The key must be there.
  void erase(std::uint64_t key) {
    std::size_t hole = home(key);
    while (places_[hole].key != key || places_[hole].slot == kNoSlot) hole = (hole + 1) & mask_;
    for (std::size_t at = (hole + 1) & mask_; places_[at].slot != kNoSlot; at = (at + 1) & mask_) {
      // It may fill the hole unless its home lies behind that.
      if (((at - home(places_[at].key)) & mask_) >= ((at - hole) & mask_)) {
        places_[hole] = places_[at];
        hole = at;
      }
    }
    places_[hole].slot = kNoSlot;
    --size_;
  }

  void prefetch(std::uint64_t key) const { sage::prefetch(&places_[home(key)]); }
  std::size_t size() const { return size_; }

 private:
  struct Place {
    std::uint64_t key = 0;
    Slot slot = kNoSlot;
  };

  std::size_t home(std::uint64_t key) const { return static_cast<std::size_t>(fold(key ^ kHash0, kHash1)) & mask_; }

  void put(std::uint64_t key, Slot slot) {
    std::size_t at = home(key);
    while (places_[at].slot != kNoSlot) at = (at + 1) & mask_;
    places_[at] = Place{key, slot};
  }

  void grow() {
    std::vector<Place> old(places_.size() * 2);
    old.swap(places_);
    mask_ = places_.size() - 1;
    most_ = places_.size() / (places_.size() <= kRoomy ? 4 : 2);
    for (const Place& place : old) {
      if (place.slot != kNoSlot) put(place.key, place.slot);
    }
  }

  // A quarter full, nearly every key lies at its home and no branch of a search is mispredicted, which takes a third off an
  // access. Where the map is larger than the processor's caches it is the memory that counts.
  static constexpr std::size_t kRoomy = std::size_t{1} << 18;

  std::vector<Place> places_;
  std::size_t mask_, most_ = 16;
  std::size_t size_ = 0;
};

}  // namespace sage
