// Waiting for another process: a word in shared memory, the kernel's futex, and the clock.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>

#include "shm_layout.h"

namespace sage {

inline double shm_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void shm_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void shm_notify(ShmEvent& event) noexcept {
  if (event.num_waiting.load() == 0) return;
  event.sequence.fetch_add(1);
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&event.sequence), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// For at most `limit_s`, or until notified. Whether it is ready.
template <typename Ready>
bool shm_wait(ShmEvent& event, double limit_s, Ready ready) {
  const std::uint32_t seen = event.sequence.load();
  event.num_waiting.fetch_add(1);
  if (!ready() && limit_s > 0) {
    timespec limit{0, 0};
    limit.tv_nsec = static_cast<long>(limit_s * 1e9);  // below a second
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&event.sequence), FUTEX_WAIT, seen, &limit, nullptr, 0);
  }
  event.num_waiting.fetch_sub(1);
  return ready();
}

}  // namespace sage
