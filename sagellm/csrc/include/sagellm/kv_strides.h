// Where the bytes of a request's tokens lie in the KV blocks of two engines: what a transfer copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sage {

// Strides of one side's tensor [layers, blocks, block_tokens, heads, width]; `offset`: of the first wanted head in a token.
struct KVSide {
  std::int64_t layer_bytes, block_tokens, token_bytes, offset;
};

// A request's tokens: those of `blocks`, the first of which begins with token `start`.
struct KVBlocks {
  const std::int64_t* blocks;
  std::size_t count;
  std::int64_t start;
};

struct KVPieces {
  std::vector<std::int64_t> src, dst, num_bytes;  // [n] each
};

// `run_bytes` of each token, heads side by side, of parts whose geometry is the same.
struct KVStrides {
  std::int64_t num_layers;
  KVSide src, dst;
  std::int64_t run_bytes;

  // Pieces of tokens `first` to `first + num` in all layers; neighbours on both sides are one piece. O(pieces).
  // Throws std::out_of_range: the blocks do not cover the tokens.
  KVPieces pieces(const KVBlocks& from, const KVBlocks& to, std::int64_t first, std::int64_t num) const;
};

}  // namespace sage
