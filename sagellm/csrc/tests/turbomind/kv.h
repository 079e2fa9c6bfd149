// The KV that the host computes: a word for each token, which depends on all tokens up to it and on the rank. So the content
// of a block shows whether it was computed for another prefix, not computed, or moved between ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "engine.h"

namespace sage::host {

using Kv = std::vector<std::uint64_t>;

inline Kv compute_kv(const Token* tokens, std::size_t n, int rank) {
  Kv kv;
  kv.reserve(n);
  std::uint64_t state = 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(rank + 1);
  for (std::size_t i = 0; i < n; ++i) {
    state = (state ^ static_cast<std::uint64_t>(tokens[i])) * 0xbf58476d1ce4e5b9u;
    state ^= state >> 29;
    kv.push_back(state);
  }
  return kv;
}

// Whether the first `n` tokens of `kv` lie in these blocks.
inline bool holds(Engine& engine, const BlockId* ids, int block_len, const Kv& kv, int n) {
  for (int i = 0; i < n; ++i) {
    const auto* const block = static_cast<const std::uint64_t*>(engine.memory(ids[i / block_len]));
    if (block[i % block_len] != kv[static_cast<std::size_t>(i)]) return false;
  }
  return true;
}

}  // namespace sage::host
