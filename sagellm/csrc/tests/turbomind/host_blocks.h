// KV blocks in host memory: free, cached (not held, content kept) or active (held by sequences).
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "engine.h"

namespace sage::host {

class HostBlocks {
 public:
  HostBlocks(int num_blocks, int block_len, UniqueId first_unique_id);

  int num_free() const { return static_cast<int>(free_.size()); }
  int num_cached() const { return static_cast<int>(cached_.size()); }
  int num_blocks() const { return static_cast<int>(blocks_.size()); }
  std::size_t block_bytes() const { return words_ * sizeof(std::uint64_t); }
  std::vector<BlockId> cached() const { return {cached_.begin(), cached_.end()}; }
  SageBlockInfo info(BlockId id) const;  // of a free block for an id out of range
  UniqueId unique_id(BlockId id) const { return at(id).unique_id; }
  int use_count(BlockId id) const { return at(id).use_count; }
  bool is_cached(BlockId id) const { return cached_.count(id) != 0; }
  void* memory(BlockId id) { return content_.data() + static_cast<std::size_t>(id) * words_; }

  // The lowest free ids, held once.
  std::vector<BlockId> allocate(int count);
  // The lowest free id, cached.
  BlockId adopt();
  // A cached block becomes another one.
  void replace(BlockId id);
  void hold(BlockId id);
  void release(BlockId id);
  // Marks as used, the first block as the most recent one: a prefix outlives what follows it.
  void touch(const std::vector<BlockId>& ids);
  void free(BlockId id);
  // Cached ids by their last use, those in `except` left out.
  std::vector<BlockId> least_recent(int count, const std::set<BlockId>& except) const;

 private:
  struct Block {
    int use_count = 0;
    UniqueId unique_id = 0;
    std::uint64_t timestamp = 0;
  };
  const Block& at(BlockId id) const { return blocks_.at(static_cast<std::size_t>(id)); }
  Block& at(BlockId id) { return blocks_.at(static_cast<std::size_t>(id)); }
  BlockId take();

  std::size_t words_;
  std::vector<Block> blocks_;
  std::vector<std::uint64_t> content_;
  std::set<BlockId> free_, cached_;
  UniqueId next_unique_id_;
  std::uint64_t clock_ = 1;
};

}  // namespace sage::host
