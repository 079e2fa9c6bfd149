// Zeroed memory straight from the system. A page is taken when it is first touched, so a region may be larger than what is
// used of it; with `huge` it is asked for in large pages, which random access to much memory is several times faster on.
#pragma once

#include <cstddef>

namespace sage {

class Region {
 public:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;

  Region() = default;
  // `bytes` is rounded up to `alignment`, a power of two. Throws std::bad_alloc.
  explicit Region(std::size_t bytes, bool huge, std::size_t alignment = kHugePage);
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;

  template <typename T>
  T* as() const noexcept {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace sage
