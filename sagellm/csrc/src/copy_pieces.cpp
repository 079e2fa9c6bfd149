#include "sagellm/copy_pieces.h"

#include <algorithm>
#include <chrono>
#include <cstring>

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
      std::memcpy(to, from, chunk);
      to += chunk;
      from += chunk;
      left -= chunk;
      bytes_left -= chunk;
      --pieces_left;
    }
  }
  return CopyEnd::kDone;
}

}  // namespace sage
