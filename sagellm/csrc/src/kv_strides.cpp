#include "sagellm/kv_strides.h"

#include <algorithm>
#include <stdexcept>

namespace sage {

namespace {

using Word = std::uint64_t;  // layouts come from the network: sums may overflow, and what comes of it is outside of the memory

struct Place {
  std::int64_t offset;
  std::int64_t left;  // tokens to the end of the block
};

Place find(const KVSide& side, const KVBlocks& blocks, std::int64_t token) {
  const std::int64_t place = token - blocks.start, within = place % side.block_tokens;
  const Word block = static_cast<Word>(blocks.blocks[place / side.block_tokens]);
  const Word slot = block * static_cast<Word>(side.block_tokens) + static_cast<Word>(within);
  return {static_cast<std::int64_t>(slot * static_cast<Word>(side.token_bytes) + static_cast<Word>(side.offset)),
          side.block_tokens - within};
}

std::int64_t sum(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<Word>(a) + static_cast<Word>(b));
}

bool covers(const KVSide& side, const KVBlocks& blocks, std::int64_t first, std::int64_t num) {
  if (side.block_tokens < 1 || first < blocks.start || num < 1) return false;
  const Word last = static_cast<Word>(first - blocks.start) + static_cast<Word>(num) - 1;
  return last / static_cast<Word>(side.block_tokens) < blocks.count;
}

void add(KVPieces& found, std::int64_t src, std::int64_t dst, std::int64_t num_bytes) {
  if (!found.src.empty() && sum(found.src.back(), found.num_bytes.back()) == src &&
      sum(found.dst.back(), found.num_bytes.back()) == dst) {
    found.num_bytes.back() = sum(found.num_bytes.back(), num_bytes);
    return;
  }
  found.src.push_back(src);
  found.dst.push_back(dst);
  found.num_bytes.push_back(num_bytes);
}

}  // namespace

KVPieces KVStrides::pieces(const KVBlocks& from, const KVBlocks& to, std::int64_t first, std::int64_t num) const {
  if (!covers(src, from, first, num) || !covers(dst, to, first, num)) {
    throw std::out_of_range("the blocks do not cover the tokens.");
  }
  const bool is_row = run_bytes == src.token_bytes && run_bytes == dst.token_bytes;  // a token follows the one before it
  KVPieces layer;
  for (std::int64_t token = first; token < first + num;) {
    const Place here = find(src, from, token), there = find(dst, to, token);
    const std::int64_t count = is_row ? std::min({here.left, there.left, first + num - token}) : 1;
    add(layer, here.offset, there.offset, static_cast<std::int64_t>(static_cast<Word>(count) * static_cast<Word>(run_bytes)));
    token += count;
  }
  KVPieces found;
  const std::size_t size = layer.src.size() * static_cast<std::size_t>(std::max<std::int64_t>(num_layers, 0));
  for (auto* list : {&found.src, &found.dst, &found.num_bytes}) list->reserve(size);
  std::int64_t src_shift = 0, dst_shift = 0;
  for (std::int64_t number = 0; number < num_layers; ++number) {
    for (std::size_t i = 0; i < layer.src.size(); ++i) {
      add(found, sum(layer.src[i], src_shift), sum(layer.dst[i], dst_shift), layer.num_bytes[i]);
    }
    src_shift = sum(src_shift, src.layer_bytes);
    dst_shift = sum(dst_shift, dst.layer_bytes);
  }
  return found;
}

}  // namespace sage
