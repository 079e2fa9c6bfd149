#include "host_blocks.h"

#include <algorithm>
#include <stdexcept>

namespace sage::host {

namespace {
// Content of a block before anything is computed: no scenario computes it.
constexpr std::uint64_t kGarbage = 0xdeadbeefdeadbeef;
}  // namespace

HostBlocks::HostBlocks(int num_blocks, int block_len, UniqueId first_unique_id)
    : words_(static_cast<std::size_t>(block_len)),
      blocks_(static_cast<std::size_t>(num_blocks)),
      content_(words_ * blocks_.size(), kGarbage),
      next_unique_id_(first_unique_id) {
  for (BlockId id = 0; id < num_blocks; ++id) free_.insert(free_.end(), id);
}

SageBlockInfo HostBlocks::info(BlockId id) const {
  SageBlockInfo info{};
  info.id = id;
  if (id < 0 || id >= num_blocks()) return info;
  const Block& block = at(id);
  info.use_count = block.use_count;
  info.state = block.use_count > 0 ? SAGE_BLOCK_ACTIVE : is_cached(id) ? SAGE_BLOCK_CACHED : SAGE_BLOCK_FREE;
  info.unique_id = block.unique_id;
  info.timestamp = block.timestamp;
  return info;
}

BlockId HostBlocks::take() {
  if (free_.empty()) throw std::logic_error("more blocks were taken than are free");
  const BlockId id = *free_.begin();
  free_.erase(free_.begin());
  at(id).unique_id = next_unique_id_++;
  std::fill_n(content_.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(id) * words_), words_, kGarbage);
  return id;
}

std::vector<BlockId> HostBlocks::allocate(int count) {
  std::vector<BlockId> ids;
  for (int i = 0; i < count; ++i) {
    ids.push_back(take());
    at(ids.back()).use_count = 1;
  }
  return ids;
}

BlockId HostBlocks::adopt() {
  const BlockId id = take();
  at(id).timestamp = clock_++;
  cached_.insert(id);
  return id;
}

void HostBlocks::replace(BlockId id) {
  if (!is_cached(id)) throw std::logic_error("a block was replaced that was not cached");
  at(id).unique_id = next_unique_id_++;
  at(id).timestamp = clock_++;
}

void HostBlocks::hold(BlockId id) {
  if (at(id).use_count++ == 0 && cached_.erase(id) == 0) throw std::logic_error("a free block was held");
}

void HostBlocks::release(BlockId id) {
  Block& block = at(id);
  if (block.use_count == 0) throw std::logic_error("a block was given up that nobody holds");
  if (--block.use_count == 0) cached_.insert(id);
}

void HostBlocks::touch(const std::vector<BlockId>& ids) {
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) at(*id).timestamp = clock_++;
}

void HostBlocks::free(BlockId id) {
  if (cached_.erase(id) == 0) throw std::logic_error("a block was freed that was not cached");
  at(id) = {};
  free_.insert(id);
}

std::vector<BlockId> HostBlocks::least_recent(int count, const std::set<BlockId>& except) const {
  std::vector<BlockId> ids;
  for (const BlockId id : cached_) {
    if (except.count(id) == 0) ids.push_back(id);
  }
  const auto older = [this](BlockId a, BlockId b) { return at(a).timestamp < at(b).timestamp; };
  std::sort(ids.begin(), ids.end(), older);
  ids.resize(std::min(ids.size(), static_cast<std::size_t>(count)));
  return ids;
}

}  // namespace sage::host
