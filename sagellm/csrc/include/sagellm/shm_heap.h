// Places in a range of memory: first fit, neighbours join when they are free.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace sage {

class ShmHeap {
 public:
  explicit ShmHeap(std::size_t num_bytes) : num_bytes_(num_bytes) { free_.emplace(0, num_bytes); }

  // The offset of `num_bytes` > 0, a multiple of a cache line; `npos` if there is no such gap.
  std::size_t allocate(std::size_t num_bytes);
  void release(std::size_t offset, std::size_t num_bytes);
  std::size_t num_bytes() const noexcept { return num_bytes_; }
  std::size_t num_free() const;

  static constexpr std::size_t npos = ~std::size_t{0};

 private:
  const std::size_t num_bytes_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // offset to length; no two touch
};

}  // namespace sage
