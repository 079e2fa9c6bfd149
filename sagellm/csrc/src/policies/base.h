// Parts that the policies of this folder share. Each is a class template over a host of nodes.h and has
//   insert(slot, facts), hit(slot), remove(slot, evicted) -> whether it is forgotten, notice(slot), choose(incoming),
//   reason(slot), set_evictable(slot, evictable)
// with the meaning that sagellm/policy.h gives them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "heap.h"
#include "nodes.h"
#include "queue.h"

namespace sage {

// Options by name. A policy asks for each once; its maker then sees whether one is left.
class Settings {
 public:
  Settings(std::string name, std::int64_t capacity, const PolicyOptions& options)
      : name_(std::move(name)), capacity_(capacity), left_(options.numbers), future_(options.future) {}

  std::size_t capacity() const { return static_cast<std::size_t>(capacity_); }
  const std::shared_ptr<NextUse>& future() const { return future_; }

  // A number from `low` to `high`, both allowed.
  double number(const char* option, double standard, double low, double high) {
    const auto found = left_.find(option);
    if (found == left_.end()) return standard;
    const double value = found->second;
    left_.erase(found);
    if (value >= low && value <= high) return value;
    char text[128];
    std::snprintf(text, sizeof text, "%s %.6g; allowed are %.6g to %.6g.", option, value, low, high);
    throw PolicyError("policy " + name_ + ": " + text);
  }

  // As `number`; None, which is a NaN here, is as good as nothing.
  double number_or_none(const char* option, double standard, double low, double high) {
    const auto found = left_.find(option);
    if (found != left_.end() && std::isnan(found->second)) left_.erase(found);
    return number(option, standard, low, high);
  }

  std::uint32_t whole(const char* option, double standard, double low, double high) {
    const double value = number(option, standard, low, high);
    if (value == std::floor(value)) return static_cast<std::uint32_t>(value);
    throw PolicyError("policy " + name_ + ": " + option + " must be a whole number.");
  }

  std::size_t part(double ratio) const { return static_cast<std::size_t>(ratio * static_cast<double>(capacity_)); }

  void require_none_left() const {
    if (left_.empty()) return;
    std::string names;
    for (const auto& option : left_) names += (names.empty() ? "" : ", ") + option.first;
    throw PolicyError("policy " + name_ + " has no options " + names + ".");
  }

 private:
  std::string name_;
  std::int64_t capacity_;
  std::map<std::string, double> left_;
  std::shared_ptr<NextUse> future_;
};

template <typename Host>
class PolicyBase {
 public:
  PolicyBase(Host& host, const Settings& settings) : host_(host), capacity_(settings.capacity()) {}
  void notice(Slot) {}
  // A key that is not there is about to come. May refuse it, before anything leaves for it.
  void expect(std::uint64_t) const {}

 protected:
  // Where a slot that comes was to go, if it was a ghost that has been noticed; else 0.
  unsigned noticed(Slot slot) const {
    const unsigned where = slot == kNoSlot ? 0u : host_[slot].where;
    return where >= kNoticed && where != kNowhere ? where - kNoticed : 0u;
  }
  void set_where(Slot slot, unsigned where) { host_[slot].where = static_cast<std::uint8_t>(where); }

  Host& host_;
  const std::size_t capacity_;
};

// Ghosts that were noticed, until they are inserted. A notice may be wrong, so there are at most as many as the tier has
// places; the one noticed first is forgotten.
template <typename Host>
class Returning {
 public:
  Returning(Host& host, std::size_t capacity) : host_(host), list_(host), capacity_(capacity) {}

  void push(Slot slot, unsigned destination) {
    host_[slot].where = static_cast<std::uint8_t>(kNoticed + destination);
    if constexpr (!Host::kPinned) return;  // a flat cache inserts at once what it said is coming
    list_.push(slot);
    if (list_.size() <= capacity_) return;
    const Slot oldest = list_.oldest();
    list_.erase(oldest);
    host_.forget(oldest);
  }

  // Where a slot that comes is to go, if it is one of them; else 0.
  unsigned pop(Slot slot) {
    const unsigned where = host_[slot].where;
    if (where < kNoticed || where == kNowhere) return 0;
    if constexpr (Host::kPinned) list_.erase(slot);
    return where - kNoticed;
  }

 private:
  Host& host_;
  List<Host> list_;
  const std::size_t capacity_;
};

// `format` with one number in it.
template <typename Number>
std::string worded(const char* format, Number number) {
  char text[96];
  std::snprintf(text, sizeof text, format, number);
  return text;
}

}  // namespace sage
