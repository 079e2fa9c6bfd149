// Which bytes a transfer copies; the Python tests compare them with one token after the other.

#include "sagellm/kv_strides.h"

#include <array>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "expect.h"

namespace {

using Numbers = std::vector<std::int64_t>;

sage::KVBlocks of(const Numbers& blocks, std::int64_t start = 0) { return {blocks.data(), blocks.size(), start}; }

void neighbours_are_one_piece() {
  const sage::KVSide side{80, 2, 4, 0};  // 10 blocks of 2 tokens of 4 bytes
  const sage::KVStrides strides{2, side, side, 4};
  const Numbers src{1, 2, 3}, dst{7, 8, 0};  // the last two are neighbours on one side only
  const auto found = strides.pieces(of(src), of(dst), 1, 5);
  EXPECT((found.src == Numbers{12, 24, 92, 104}));
  EXPECT((found.dst == Numbers{60, 0, 140, 80}));
  EXPECT((found.num_bytes == Numbers{12, 8, 12, 8}));
}

void tokens_without_blocks_are_refused() {
  const sage::KVStrides strides{1, {80, 2, 4, 0}, {80, 2, 4, 0}, 4};
  const Numbers blocks{1, 2};
  for (const auto& [start, first, num] : {std::array<std::int64_t, 3>{0, 0, 5}, {1, 0, 1}, {0, 0, 0}, {0, 4, 1},
                                          {0, 1, INT64_MAX}}) {
    bool is_refused = false;
    try {
      strides.pieces(of(blocks, start), of(blocks), first, num);
    } catch (const std::out_of_range&) {
      is_refused = true;
    }
    EXPECT(is_refused);
  }
}

// A layout comes from the network.
void numbers_that_are_too_large_are_no_fault() {
  const sage::KVSide huge{INT64_MAX, 2, INT64_MAX, INT64_MAX};
  const sage::KVStrides strides{3, huge, huge, INT64_MAX};
  const Numbers blocks{INT64_MAX, 2};
  EXPECT(!strides.pieces(of(blocks), of(blocks), 0, 4).src.empty());
}

}  // namespace

int main() {
  neighbours_are_one_piece();
  tokens_without_blocks_are_refused();
  numbers_that_are_too_large_are_no_fault();
  std::puts("kv_strides: passed");
}
