// Zeroed memory straight from the system. A page is taken when it is first touched, so a region may be larger than its used
// part. With `huge` it gets large pages, which make random access to much memory several times faster.
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
