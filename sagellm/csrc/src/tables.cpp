// Tables: (parent, first block) -> child; which block ids are used, and by which node.

#include <algorithm>
#include <cstring>
#include <utility>

#include "sagellm/hash.h"
#include "sagellm/prefix_index.h"

namespace sage {

std::uint32_t PrefixIndex::make_tag(NodeIndex parent, const Token* block) const {
  return static_cast<std::uint32_t>(fold(block_hash(block, block_size_) ^ kHash3, parent * kHash0 + 1) >> 32);
}

PrefixIndex::NodeIndex PrefixIndex::find_child(NodeIndex parent, const Token* block, std::uint64_t* collisions) const {
  if (table_used_ == 0) return kNone;
  const std::uint32_t tag = make_tag(parent, block);
  const std::size_t mask = table_size_ - 1;
  for (std::size_t i = tag >> table_shift_;; i = (i + 1) & mask) {
    const Slot& slot = table_[i];
    if (slot.index_plus_1 == 0) return kNone;
    if (slot.tag != tag) continue;
    const NodeIndex index = slot.index_plus_1 - 1;
    const Node& n = node(index);
    __builtin_prefetch(n.data);
    if (n.parent == parent && std::memcmp(tokens_of(n), block, block_size_ * sizeof(Token)) == 0) return index;
    if (collisions != nullptr) ++*collisions;
  }
}

void PrefixIndex::place(std::uint32_t tag, NodeIndex index) {
  const std::size_t mask = table_size_ - 1;
  std::size_t i = tag >> table_shift_;
  while (table_[i].index_plus_1 != 0) i = (i + 1) & mask;
  table_[i] = Slot{tag, index + 1};
}

// For one entry more. Done before anything is changed, as it may throw.
void PrefixIndex::make_room_in_table() {
  if ((table_used_ + 1) * 5 > table_size_ * 4) table_resize(table_size_ == 0 ? kSmallestTable : table_size_ * 2);
}

// There is room: `make_room_in_table` was called.
void PrefixIndex::table_insert(std::uint32_t tag, NodeIndex index) {
  place(tag, index);
  ++table_used_;
}

void PrefixIndex::table_erase(std::uint32_t tag, NodeIndex index) {
  const std::size_t mask = table_size_ - 1;
  std::size_t hole = tag >> table_shift_;
  while (table_[hole].index_plus_1 != index + 1) hole = (hole + 1) & mask;
  // Close the gap: every later slot of the run that may stand earlier moves up, so that no probe meets a hole too soon.
  for (std::size_t i = (hole + 1) & mask; table_[i].index_plus_1 != 0; i = (i + 1) & mask) {
    const std::size_t home = table_[i].tag >> table_shift_;
    if (((i - home) & mask) >= ((i - hole) & mask)) {
      table_[hole] = table_[i];
      hole = i;
    }
  }
  table_[hole].index_plus_1 = 0;
  --table_used_;
}

void PrefixIndex::table_resize(std::size_t size) {
  const Slot* const old = table_;
  const std::size_t old_size = table_size_;
  const bool huge = size * sizeof(Slot) >= Region::kHugePage;
  Region memory(size * sizeof(Slot), huge, huge ? Region::kHugePage : kSmallestTable * sizeof(Slot));
  table_ = memory.as<Slot>();
  table_size_ = size;
  table_shift_ = 32;
  for (std::size_t rest = size; rest > 1; rest /= 2) --table_shift_;
  for (std::size_t i = 0; i < old_size; ++i) {
    if (old[i].index_plus_1 != 0) place(old[i].tag, old[i].index_plus_1 - 1);
  }
  table_memory_ = std::move(memory);
}

// ---- block ids

bool PrefixIndex::is_used(Tier tier, BlockId id) const {
  const auto& pages = used_[static_cast<std::size_t>(tier)];
  const std::size_t page = static_cast<std::size_t>(id) >> kPageBits;
  if (id < 0 || page >= pages.size() || pages[page] == nullptr) return false;
  const std::size_t bit = static_cast<std::size_t>(id) & (kPageSize - 1);
  return pages[page][bit / 64] >> (bit % 64) & 1;
}

void PrefixIndex::mark_used(Tier tier, BlockId id, bool used) {
  auto& pages = used_[static_cast<std::size_t>(tier)];
  const std::size_t page = static_cast<std::size_t>(id) >> kPageBits;
  if (page >= pages.size()) pages.resize(page + 1);
  if (pages[page] == nullptr) pages[page] = std::make_unique<std::uint64_t[]>(kPageSize / 64);
  const std::size_t bit = static_cast<std::size_t>(id) & (kPageSize - 1);
  std::uint64_t& word = pages[page][bit / 64];
  word = (word & ~(std::uint64_t{1} << (bit % 64))) | (std::uint64_t{used} << (bit % 64));
}

void PrefixIndex::take_ids(NodeIndex index, std::size_t first, std::size_t last) {
  const Node& n = node(index);
  for (std::size_t k = first; k < last; ++k) mark_used(n.tier, ids_of(n)[k], true);
  if (knows_owners_) set_owners(index, first, last);
}

void PrefixIndex::give_back_id(Tier tier, BlockId id) {
  mark_used(tier, id, false);
  if (knows_owners_) owner_slot(tier, id) = kNone;
}

PrefixIndex::NodeIndex& PrefixIndex::owner_slot(Tier tier, BlockId id) {
  auto& pages = owners_[static_cast<std::size_t>(tier)];
  const std::size_t page = static_cast<std::size_t>(id) >> kPageBits;
  if (page >= pages.size()) pages.resize(page + 1);
  if (pages[page] == nullptr) {
    pages[page] = std::make_unique<NodeIndex[]>(kPageSize);
    std::fill_n(pages[page].get(), kPageSize, kNone);
  }
  return pages[page][static_cast<std::size_t>(id) & (kPageSize - 1)];
}

void PrefixIndex::set_owners(NodeIndex index, std::size_t first, std::size_t last) {
  const Node& n = node(index);
  for (std::size_t k = first; k < last; ++k) owner_slot(n.tier, ids_of(n)[k]) = index;
}

// Which node holds a block is not asked until a caller names blocks; from then on a table of 4 bytes a block is kept.
void PrefixIndex::learn_owners() {
  if (knows_owners_) return;
  for (std::size_t i = 0; i < num_node_slots_; ++i) {
    const auto index = static_cast<NodeIndex>(i);
    if (node(index).generation % 2 == 1 && !node(index).is_root) set_owners(index, 0, node(index).num_blocks);
  }
  knows_owners_ = true;
}

// kNone if the block is not cached. Only after `learn_owners`.
PrefixIndex::NodeIndex PrefixIndex::owner(Tier tier, BlockId id) const {
  const auto& pages = owners_[static_cast<std::size_t>(tier)];
  const std::size_t page = static_cast<std::size_t>(id) >> kPageBits;
  if (id < 0 || page >= pages.size() || pages[page] == nullptr) return kNone;
  return pages[page][static_cast<std::size_t>(id) & (kPageSize - 1)];
}

}  // namespace sage
