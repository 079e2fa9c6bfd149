// Faults that a run of the host finds, on any of its threads. The first few are kept. Hooks cannot throw, so the caller asks
// for faults after each step.
#pragma once

#include <cstddef>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace sage::host {

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Findings {
 public:
  void add(std::string what) {
    const std::lock_guard guard(mutex_);
    if (found_.size() < 4) found_.push_back(std::move(what));
  }
  // Throws Violation if there is any.
  void raise() const {
    const std::lock_guard guard(mutex_);
    if (found_.empty()) return;
    std::string all;
    for (const std::string& one : found_) all += (all.empty() ? "" : "; ") + one;
    throw Violation(all);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> found_;
};

// "name a, b, c", for messages.
template <typename... Values>
std::string said(const std::string& what, Values... values) {
  std::string text = what;
  ((text += " " + std::to_string(values)), ...);
  return text;
}

}  // namespace sage::host
