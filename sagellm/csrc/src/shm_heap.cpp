#include "sagellm/shm_heap.h"

#include <iterator>

namespace sage {

namespace {

constexpr std::size_t kHeapLine = 64;

std::size_t whole_lines(std::size_t num_bytes) { return (num_bytes + kHeapLine - 1) / kHeapLine * kHeapLine; }

}  // namespace

std::size_t ShmHeap::allocate(std::size_t num_bytes) {
  if (num_bytes > num_bytes_) return npos;
  const std::size_t wanted = whole_lines(num_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
    const auto [offset, length] = *gap;
    if (length < wanted) continue;
    free_.erase(gap);
    if (length > wanted) free_.emplace(offset + wanted, length - wanted);
    return offset;
  }
  return npos;
}

void ShmHeap::release(std::size_t offset, std::size_t num_bytes) {
  std::size_t length = whole_lines(num_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + length == next->first) {
    length += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += length;
      return;
    }
  }
  free_.emplace(offset, length);
}

std::size_t ShmHeap::num_free() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [offset, length] : free_) sum += length;
  return sum;
}

}  // namespace sage
