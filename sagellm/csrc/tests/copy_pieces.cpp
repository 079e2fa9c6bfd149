// Pieces from one memory to another: every byte of them and none beside, and none after it was to end.

#include "sagellm/copy_pieces.h"

#include <array>
#include <cstdint>
#include <vector>

#include "expect.h"

namespace {

using Offsets = std::vector<std::int64_t>;

sage::PieceList list(const Offsets& src, const Offsets& dst, const Offsets& num_bytes) {
  return {src.data(), dst.data(), num_bytes.data(), src.size()};
}

// Buffers are of just this size, so that a sanitizer sees a read or a write beyond either end.
void copies_what_it_is_given() {
  std::vector<std::uint8_t> source(1500001), target(1500001, 0);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::uint8_t>(i % 251 + 1);
  const Offsets src{0, 700000, 1500000, 5}, dst{1, 600001, 0, 7}, num_bytes{600000, 800001, 1, 0};
  const auto pieces = list(src, dst, num_bytes);
  EXPECT(sage::first_outside(pieces, source.size(), target.size()) == 4);
  const std::uint8_t stop = 0;
  const auto end = sage::copy_pieces({target.data(), target.size()}, {source.data(), source.size()}, pieces, 1e12, &stop);
  EXPECT(end == sage::CopyEnd::kDone);
  EXPECT(target[0] == source[1500000]);
  for (std::size_t i = 0; i < 600000; ++i) EXPECT(target[1 + i] == source[i]);
  for (std::size_t i = 0; i < 800001; ++i) EXPECT(target[600001 + i] == source[700000 + i]);
  EXPECT(target[1400002] == 0 && target[1500000] == 0);
}

void ends_before_it_writes() {
  const std::vector<std::uint8_t> source(100, 1);
  std::vector<std::uint8_t> target(100, 0);
  const Offsets zero{0}, all{100};
  const std::uint8_t go = 0, stop = 1;
  const auto copy = [&](double deadline, const std::uint8_t* flag) {
    return sage::copy_pieces({target.data(), 100}, {source.data(), 100}, list(zero, zero, all), deadline, flag);
  };
  EXPECT(copy(0.0, &go) == sage::CopyEnd::kDeadline);
  EXPECT(copy(1e12, &stop) == sage::CopyEnd::kStopped);
  for (const std::uint8_t byte : target) EXPECT(byte == 0);
}

void pieces_outside_are_found() {
  for (const auto& [src, dst, num] : {std::array<std::int64_t, 3>{100, 0, 1}, {0, 50, 1}, {-1, 0, 1}, {0, -1, 1}, {0, 0, -1},
                                      {0, 0, 51}, {INT64_MAX, 0, 1}, {1, 1, INT64_MAX}}) {
    EXPECT(sage::first_outside(list({0, src}, {0, dst}, {50, num}), 100, 50) == 1);
  }
}

}  // namespace

int main() {
  copies_what_it_is_given();
  ends_before_it_writes();
  pieces_outside_are_found();
  std::puts("copy_pieces: passed");
}
