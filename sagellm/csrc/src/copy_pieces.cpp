#include "sagellm/copy_pieces.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace sage {

namespace {

constexpr std::size_t kLookBytes = 512 << 10;  // about 0.1 ms of copying on one core
constexpr std::size_t kLookPieces = 2048;      // of a few bytes each, they cost as much

double steady_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool is_within(std::int64_t offset, std::int64_t num_bytes, std::size_t size) {
  return offset >= 0 && num_bytes >= 0 && static_cast<std::uint64_t>(num_bytes) <= size &&
         static_cast<std::uint64_t>(offset) <= size - static_cast<std::uint64_t>(num_bytes);
}

constexpr std::size_t kStreamBytes = 256 << 10;  // of a list; fewer stay in a core's own cache, for their reader
constexpr std::size_t kStreamPiece = 4096;       // of one piece; of shorter ones too much is at their ends

#ifdef __SSE2__

constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kAhead = 6144;  // bytes that are asked for before they are read; 4 to 8 KiB are alike

// Asks for the lines that `stream` does not ask for itself.
void ask_for_first(const std::uint8_t* from, std::size_t num_bytes) {
  for (std::size_t i = 0; i < std::min(num_bytes, kAhead); i += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(from) + i, _MM_HINT_NTA);
  }
}

// Past the caches, so that a line of the target is not read before it is written. `next` will be read, and
// `next_to` written, afterwards: pieces lie in other pages, where the processor does not look ahead by itself.
void stream(std::uint8_t* to, const std::uint8_t* from, std::size_t num_bytes, const std::uint8_t* next,
            const std::uint8_t* next_to) {
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kLine;  // up to the target's first whole line
  std::memcpy(to, from, head);
  std::size_t done = head;
  for (; num_bytes - done >= kLine; done += kLine) {
    const std::size_t ahead = done + kAhead;
    const auto wanted = ahead < num_bytes ? reinterpret_cast<std::uintptr_t>(from) + ahead
                                          : reinterpret_cast<std::uintptr_t>(next) + (ahead - num_bytes);
    _mm_prefetch(reinterpret_cast<const char*>(wanted), _MM_HINT_NTA);  // one behind the end is no mistake, but in vain
    if ((done & (kPage - 1)) == head % kPage) {  // where the target's next page lies is asked for too, by a line of it
      const auto page = done + kPage < num_bytes ? reinterpret_cast<std::uintptr_t>(to) + done + kPage
                                                 : reinterpret_cast<std::uintptr_t>(next_to);
      _mm_prefetch(reinterpret_cast<const char*>(page), _MM_HINT_NTA);
    }
    const auto* source = reinterpret_cast<const __m128i*>(from + done);
    auto* target = reinterpret_cast<__m128i*>(to + done);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + done, from + done, num_bytes - done);
}

void end_streams() { _mm_sfence(); }  // others see such stores in any order until then

#else

void ask_for_first(const std::uint8_t*, std::size_t) {}

void stream(std::uint8_t* to, const std::uint8_t* from, std::size_t num_bytes, const std::uint8_t*, const std::uint8_t*) {
  std::memcpy(to, from, num_bytes);
}

void end_streams() {}

#endif

bool is_large(const PieceList& pieces) {
  std::size_t num_bytes = 0;
  for (std::size_t i = 0; i < pieces.count && num_bytes < kStreamBytes; ++i) {
    num_bytes += static_cast<std::size_t>(pieces.num_bytes[i]);
  }
  return num_bytes >= kStreamBytes;
}

CopyEnd copy_all(Bytes target, ConstBytes source, const PieceList& pieces, double deadline,
                 const volatile std::uint8_t* stop) noexcept {
  std::size_t shortest_stream = ~std::size_t{0};
  if (is_large(pieces)) {
    shortest_stream = kStreamPiece;
    ask_for_first(source.data + pieces.src[0], static_cast<std::size_t>(pieces.num_bytes[0]));
  }
  std::size_t bytes_left = 0, pieces_left = 0;  // until the next look; the first comes before anything is written
  for (std::size_t i = 0; i < pieces.count; ++i) {
    auto left = static_cast<std::size_t>(pieces.num_bytes[i]);
    std::uint8_t* to = target.data + pieces.dst[i];
    const std::uint8_t* from = source.data + pieces.src[i];
    while (left != 0) {
      if (bytes_left == 0 || pieces_left == 0) {
        if (*stop != 0) return CopyEnd::kStopped;
        if (steady_now() >= deadline) return CopyEnd::kDeadline;
        bytes_left = kLookBytes;
        pieces_left = kLookPieces;
      }
      const std::size_t chunk = std::min(left, bytes_left);
      left -= chunk;
      if (chunk >= shortest_stream) {
        const bool goes_on = left != 0 || i + 1 == pieces.count;
        stream(to, from, chunk, goes_on ? from + chunk : source.data + pieces.src[i + 1],
               goes_on ? to + chunk : target.data + pieces.dst[i + 1]);
      } else {
        std::memcpy(to, from, chunk);
      }
      to += chunk;
      from += chunk;
      bytes_left -= chunk;
      --pieces_left;
    }
  }
  return CopyEnd::kDone;
}

}  // namespace

std::size_t first_outside(const PieceList& pieces, std::size_t source_bytes, std::size_t target_bytes) noexcept {
  for (std::size_t i = 0; i < pieces.count; ++i) {
    if (!is_within(pieces.src[i], pieces.num_bytes[i], source_bytes) ||
        !is_within(pieces.dst[i], pieces.num_bytes[i], target_bytes)) {
      return i;
    }
  }
  return pieces.count;
}

CopyEnd copy_pieces(Bytes target, ConstBytes source, const PieceList& pieces, double deadline,
                    const volatile std::uint8_t* stop) noexcept {
  const CopyEnd end = copy_all(target, source, pieces, deadline, stop);
  end_streams();
  return end;
}

}  // namespace sage
