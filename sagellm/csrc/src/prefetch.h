// Asking the processor for a line of memory that will be written soon.
#pragma once

namespace sage {

inline void prefetch(const void* place) {
  __builtin_prefetch(place, 1);
#ifdef __GNUC__
  // GCC takes a function that only prefetches for one without effect and drops the calls to it.
  asm volatile("");
#endif
}

}  // namespace sage
