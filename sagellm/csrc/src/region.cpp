#include "sagellm/region.h"

#include <sys/mman.h>

#include <cassert>
#include <cstdint>
#include <new>
#include <utility>

namespace sage {

Region::Region(std::size_t bytes, bool huge, std::size_t alignment) : size_((bytes + alignment - 1) & ~(alignment - 1)) {
  assert((alignment & (alignment - 1)) == 0);
  // The system aligns to its own pages only: take more, and give back what is before and after.
  void* const taken = mmap(nullptr, size_ + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (taken == MAP_FAILED) throw std::bad_alloc();
  const auto start = reinterpret_cast<std::uintptr_t>(taken);
  const std::uintptr_t aligned = (start + alignment - 1) & ~(alignment - 1);
  if (aligned > start) munmap(taken, aligned - start);
  if (start + alignment > aligned) munmap(reinterpret_cast<void*>(aligned + size_), start + alignment - aligned);
  data_ = reinterpret_cast<void*>(aligned);
#ifdef MADV_HUGEPAGE
  if (huge) madvise(data_, size_, MADV_HUGEPAGE);  // a wish: without large pages it is slower, not wrong
#else
  (void)huge;
#endif
}

Region::~Region() {
  if (data_ != nullptr) munmap(data_, size_);
}

Region::Region(Region&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace sage
