// The hash of a block of tokens and of a prefix. Stable: it leaves the process in events and entries.
// After wyhash's multiply-and-fold; its plain twin is sagellm/prefix_reuse/matcher.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sage {

inline constexpr std::uint64_t kHash0 = 0xa0761d6478bd642full, kHash1 = 0xe7037ed1a0b428dbull,
                               kHash2 = 0x8ebc6af09c88c6e3ull, kHash3 = 0x589965cc75374cc3ull;
inline constexpr std::uint64_t kEmptyPrefixHash = kHash3;

inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

inline std::uint64_t block_hash(const std::int32_t* tokens, std::size_t block_size) {
  std::uint64_t hash = kHash0;
  std::size_t i = 0;
  for (; i + 4 <= block_size; i += 4) {
    std::uint64_t pair[2];
    std::memcpy(pair, tokens + i, sizeof pair);
    hash = fold(pair[0] ^ kHash1, pair[1] ^ hash);
  }
  if (i < block_size) {
    std::uint64_t pair[2] = {0, 0};
    std::memcpy(pair, tokens + i, (block_size - i) * sizeof(std::int32_t));
    hash = fold(pair[0] ^ kHash1, pair[1] ^ hash);
  }
  return fold(hash ^ kHash2, block_size ^ kHash1);
}

inline std::uint64_t chain_hash(std::uint64_t prefix, std::uint64_t block) { return fold(prefix ^ kHash1, block ^ kHash2); }

}  // namespace sage
