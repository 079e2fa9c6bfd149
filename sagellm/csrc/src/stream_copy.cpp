#include "sagellm/stream_copy.h"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace sage {

#ifdef __SSE2__

namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kAhead = 1024;       // bytes that are asked for before they are read
constexpr std::size_t kSmall = 128 << 10;   // fits a core's own caches, where `memcpy` is as fast

void stream_line(char* target, const char* source) {
  const auto* from = reinterpret_cast<const __m128i*>(source);
  auto* to = reinterpret_cast<__m128i*>(target);
  const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}

}  // namespace

void stream_copy(void* target, const void* source, std::size_t num_bytes) noexcept {
  if (num_bytes < kSmall) {
    if (num_bytes != 0) std::memcpy(target, source, num_bytes);  // of nothing the pointers may be null
    return;
  }
  auto* to = static_cast<char*>(target);
  const auto* from = static_cast<const char*>(source);
  const char* const end = from + num_bytes;
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kLine;  // up to the target's first whole line
  std::memcpy(to, from, head);
  to += head;
  from += head;
  for (; static_cast<std::size_t>(end - from) >= kLine; from += kLine, to += kLine) {
    // A place behind the end is no mistake: it is asked for in vain.
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(from) + kAhead), _MM_HINT_NTA);
    stream_line(to, from);
  }
  _mm_sfence();  // such stores are seen by others in any order until then
  std::memcpy(to, from, static_cast<std::size_t>(end - from));
}

#else

void stream_copy(void* target, const void* source, std::size_t num_bytes) noexcept {
  if (num_bytes != 0) std::memcpy(target, source, num_bytes);
}

#endif

}  // namespace sage
