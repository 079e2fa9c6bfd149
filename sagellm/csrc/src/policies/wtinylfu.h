// Einziger, Friedman and Manes' W-TinyLFU (ACM ToS 2017): a small window, a segmented LRU behind it, and a count-min sketch
// that says which of the two blocks at their ends was used more often.
#pragma once

#include <vector>

#include "slru.h"

namespace sage {

// Four rows of counters up to 15, all halved once ten uses a block of capacity were counted. A row is no longer than 2**22:
// beyond 4 million blocks more keys share a counter, and counters are halved as often as if there were no more blocks.
class FrequencySketch {
 public:
  explicit FrequencySketch(std::size_t capacity) : period_(10 * std::min<std::uint64_t>(capacity, kMaxWidth)) {
    std::size_t width = 16;
    while (width < capacity && width < kMaxWidth) width *= 2;
    mask_ = width - 1;
    counters_.assign(kRows * width, 0);
  }

  void add(std::uint64_t key) {
    for (std::size_t row = 0; row < kRows; ++row) {
      std::uint8_t& counter = counters_[place(key, row)];
      counter = static_cast<std::uint8_t>(counter + (counter < 15));
    }
    if (++additions_ != period_) return;
    for (std::uint8_t& counter : counters_) counter /= 2;
    additions_ /= 2;
  }

  unsigned estimate(std::uint64_t key) const {
    std::uint8_t least = 255;
    for (std::size_t row = 0; row < kRows; ++row) least = std::min(least, counters_[place(key, row)]);
    return least;
  }

 private:
  static constexpr std::size_t kRows = 4, kMaxWidth = std::size_t{1} << 22;

  std::size_t place(std::uint64_t key, std::size_t row) const {
    std::uint64_t x = key + 0x9E3779B97F4A7C15ull * (row + 1);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    return row * (mask_ + 1) + (static_cast<std::size_t>(x) & mask_);
  }

  std::vector<std::uint8_t> counters_;
  std::size_t mask_;
  std::uint64_t period_, additions_ = 0;
};

template <typename Host>
class WTinyLfu : public PolicyBase<Host> {
 public:
  WTinyLfu(Host& host, Settings& settings)
      : PolicyBase<Host>(host, settings),
        window_(host),
        window_size_(std::max<std::size_t>(1, settings.part(settings.number("window_ratio", 0.01, 0.0, 1.0)))),
        main_(host, static_cast<std::size_t>(settings.number("protected_ratio", 0.8, 0.0, 1.0) *
                                             static_cast<double>(settings.capacity() - window_size_))),
        sketch_(settings.capacity()) {}

  void insert(Slot slot, const BlockFacts&) {
    sketch_.add(this->host_[slot].key);
    this->set_where(slot, kWindow);
    window_.push(slot);
    if (window_.size() > window_size_) leave_window(window_.oldest());
  }

  void hit(Slot slot) {
    sketch_.add(this->host_[slot].key);
    if (this->host_[slot].where == kWindow) {
      window_.move_to_newest(slot);
    } else {
      main_.hit(slot);
    }
  }

  bool remove(Slot slot, bool) {
    queue_of(slot).erase(slot);
    return true;
  }

  Slot choose(Slot) {
    const Slot candidate = window_.size() >= window_size_ ? window_.first() : kNoSlot;
    const Slot other = main_.first();
    if (candidate == kNoSlot) return other != kNoSlot ? other : window_.first();
    if (other == kNoSlot || estimate(candidate) <= estimate(other)) return candidate;
    leave_window(candidate);
    return other;
  }

  std::string reason(Slot slot) const {
    const unsigned where = this->host_[slot].where;
    return worded(where == kWindow                        ? "window, estimate %u"
                  : where == Segments<Host>::kProbation ? "probation, estimate %u"
                                                          : "protected, estimate %u",
                  estimate(slot));
  }
  void set_evictable(Slot slot, bool evictable) { queue_of(slot).set_evictable(slot, evictable); }

 private:
  enum : unsigned { kWindow = 3 };  // beside those of Segments

  unsigned estimate(Slot slot) const { return sketch_.estimate(this->host_[slot].key); }
  Queue<Host>& queue_of(Slot slot) { return this->host_[slot].where == kWindow ? window_ : main_.of(slot); }
  void leave_window(Slot slot) {
    window_.erase(slot);
    main_.push(slot);
  }

  Queue<Host> window_;
  const std::size_t window_size_;
  Segments<Host> main_;
  FrequencySketch sketch_;
};

}  // namespace sage
