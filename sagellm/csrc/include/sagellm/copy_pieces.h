// Many pieces from one memory to another, with a deadline and a way to stop it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sage {

struct ConstBytes {
  const std::uint8_t* data;
  std::size_t num_bytes;
};

struct Bytes {
  std::uint8_t* data;
  std::size_t num_bytes;
};

// Offsets in source and target, and lengths, [count] each.
struct PieceList {
  const std::int64_t* src;
  const std::int64_t* dst;
  const std::int64_t* num_bytes;
  std::size_t count;
};

enum class CopyEnd { kDone, kDeadline, kStopped };

// The first piece that does not lie within both; `count` where all do.
std::size_t first_outside(const PieceList& pieces, std::size_t source_bytes, std::size_t target_bytes) noexcept;

// Pieces lie within both, which do not overlap. Between chunks of a fraction of a millisecond it looks at the clock
// (`deadline` is of the steady clock, in seconds) and at `*stop`, which another thread may set; it writes nothing afterwards.
CopyEnd copy_pieces(Bytes target, ConstBytes source, const PieceList& pieces, double deadline,
                    const volatile std::uint8_t* stop) noexcept;

}  // namespace sage
