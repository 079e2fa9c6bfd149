// Removing blocks, and moving them between tiers.

#include <algorithm>
#include <mutex>

#include "sagellm/prefix_index.h"

namespace sage {

namespace {

[[noreturn]] void throw_locked(BlockId id) {
  throw Error(ErrorKind::kLock, "block " + std::to_string(id) +
                                    " is locked: a request holds its prefix. Release the lock first; nothing was removed.");
}

[[noreturn]] void throw_not_cached(BlockId id) {
  throw Error(ErrorKind::kArgument, "block " + std::to_string(id) + " is not cached on that tier; see blocks() for those that are.");
}

}  // namespace

void PrefixIndex::truncate(NodeIndex index, std::size_t num_blocks, RemovalReason reason, Removal& out) {
  Node& n = node(index);
  const std::size_t rest = n.num_blocks - num_blocks;
  emit_removed(index, rest, reason);
  const BlockId* ids = ids_of(n);
  for (std::size_t i = n.num_blocks; i-- > rest;) {
    out.blocks.push_back(ids[i]);
    out.tiers.push_back(n.tier);
    give_back_id(n.tier, ids[i]);
  }
  num_blocks_[static_cast<std::size_t>(n.tier)] -= num_blocks;
  counters_.removed_blocks[static_cast<std::size_t>(reason)] += num_blocks;
  if (rest == 0) {
    const NodeIndex parent = n.parent;
    table_erase(n.tag, index);
    unlink_child(index);
    lru_unlink(index);
    free_node(index);
    drop_root_if_empty(parent);
    return;
  }
  n.num_blocks = static_cast<std::uint32_t>(rest);
  n.depth -= static_cast<std::uint32_t>(num_blocks);
  n.generation += 2;
  hash_of(n) = 0;
  if (n.has_metadata) {
    metadata_.erase(index);
    n.has_metadata = false;
  }
  if (n.capacity - n.num_blocks > n.num_blocks / 4) resize_chunk(n, n.num_blocks);
}

// Children before parents. Blocks of `tier` leave for `reason`, others for `others`.
void PrefixIndex::remove_subtree(NodeIndex top, Tier tier, RemovalReason reason, RemovalReason others, Removal& out) {
  for (NodeIndex i = top;;) {
    while (node(i).first_child != kNone) i = node(i).first_child;
    const NodeIndex parent = node(i).parent;
    truncate(i, node(i).num_blocks, node(i).tier == tier ? reason : others, out);
    if (i == top) return;
    i = parent;
  }
}

void PrefixIndex::remove_below(NodeIndex index, Tier tier, RemovalReason reason, RemovalReason others, Removal& out) {
  while (node(index).first_child != kNone) remove_subtree(node(index).first_child, tier, reason, others, out);
}

// The given blocks by id; refuses one that is not cached or is named twice.
std::unordered_map<BlockId, std::size_t> PrefixIndex::row_of(const BlockId* ids, std::size_t num_ids, Tier tier) const {
  std::unordered_map<BlockId, std::size_t> rows;
  rows.reserve(num_ids);
  for (std::size_t i = 0; i < num_ids; ++i) {
    if (!is_used(tier, ids[i])) throw_not_cached(ids[i]);
    if (!rows.emplace(ids[i], i).second) {
      throw Error(ErrorKind::kArgument, "block " + std::to_string(ids[i]) + " is named twice; name it once.");
    }
  }
  return rows;
}

// Throws unless, with a block, everything of its tier below it is among `rows`.
void PrefixIndex::check_closed(NodeIndex index, Tier tier, const std::unordered_map<BlockId, std::size_t>& rows) const {
  const Node& n = node(index);
  const auto refuse = [](BlockId below) {
    throw Error(ErrorKind::kArgument, "block " + std::to_string(below) +
                                          " continues the prefix of a block to be removed and is not among them; name it "
                                          "too, or use leaf-first order. Nothing was removed.");
  };
  bool inside = false;
  for (std::size_t k = 0; k < n.num_blocks; ++k) {
    const bool named = rows.count(ids_of(n)[k]) != 0;
    if (inside && !named) refuse(ids_of(n)[k]);
    inside |= named;
  }
  std::vector<NodeIndex> below;
  for (NodeIndex i = n.first_child; i != kNone; i = node(i).next_sibling) below.push_back(i);
  while (!below.empty()) {
    const Node& child = node(below.back());
    below.pop_back();
    if (child.tier == tier) {
      // Its own turn sees to the rest of it, and to what is below it.
      if (rows.count(ids_of(child)[0]) == 0) refuse(ids_of(child)[0]);
      continue;
    }
    for (NodeIndex i = child.first_child; i != kNone; i = node(i).next_sibling) below.push_back(i);
  }
}

Removal PrefixIndex::evict(const BlockId* ids, std::size_t num_ids, Tier tier, RemovalReason reason) {
  std::lock_guard structure(tree_);
  const auto rows = row_of(ids, num_ids, tier);
  learn_owners();
  NodeIndex checked = kNone;
  for (std::size_t i = 0; i < num_ids; ++i) {
    const NodeIndex holder = owner(tier, ids[i]);
    if (holder == checked) continue;  // neighbours of a node mostly come together; checking twice does no harm
    checked = holder;
    if (node(holder).num_locks != 0) throw_locked(ids[i]);
    check_closed(holder, tier, rows);
  }
  Removal out;
  for (std::size_t i = 0; i < num_ids; ++i) {
    const NodeIndex holder = owner(tier, ids[i]);
    if (holder != kNone) cut(holder, ids[i], tier, reason, RemovalReason::kOrphaned, out);
  }
  return out;
}

// Removes block `id` of a node and everything below it.
void PrefixIndex::cut(NodeIndex index, BlockId id, Tier tier, RemovalReason reason, RemovalReason others, Removal& out) {
  remove_below(index, tier, reason, others, out);
  const Node& n = node(index);
  std::size_t at = n.num_blocks;
  while (ids_of(n)[--at] != id) {
  }
  truncate(index, n.num_blocks - at, reason, out);
}

// ---- invalidation

void PrefixIndex::check_unlocked(NodeIndex index) const {
  const Node& n = node(index);
  if (n.num_locks != 0) throw_locked(ids_of(n)[n.num_blocks - 1]);
}

// Removes a node with all below it, and the nodes above that hold nothing else.
Removal PrefixIndex::forget(NodeIndex index) {
  check_unlocked(index);
  NodeIndex top = index;
  for (;;) {
    const NodeIndex parent = node(top).parent;
    const Node& p = node(parent);
    const bool holds_more = node(top).next_sibling != kNone || node(top).prev_sibling != kNone;
    if (p.is_root || holds_more || p.has_metadata || p.num_locks != 0) break;
    top = parent;
  }
  Removal out;
  remove_subtree(top, Tier::kGpu, RemovalReason::kInvalidated, RemovalReason::kInvalidated, out);
  return out;
}

Removal PrefixIndex::invalidate(std::string_view name_space, const Token* tokens, std::size_t num_tokens) {
  std::lock_guard structure(tree_);
  const std::size_t num_blocks = num_tokens / block_size_;
  const NodeIndex root = find_root(name_space);
  if (root == kNone) return {};
  const Walk at = walk(root, tokens, num_blocks, nullptr, nullptr);
  if (at.matched == 0) return {};
  const Node& n = node(at.node);
  const bool is_continued = at.in_node < n.num_blocks || n.first_child != kNone;
  if (at.matched < num_blocks && (is_continued || n.has_metadata || n.num_locks != 0)) return {};
  return forget(at.node);
}

Removal PrefixIndex::invalidate_entry(EntryId entry) {
  std::lock_guard structure(tree_);
  return forget(find_entry(entry));
}

Removal PrefixIndex::invalidate_blocks(const BlockId* ids, std::size_t num_ids, Tier tier) {
  std::lock_guard structure(tree_);
  learn_owners();
  for (std::size_t i = 0; i < num_ids; ++i) {
    const NodeIndex holder = owner(tier, ids[i]);
    if (holder != kNone) check_unlocked(holder);
  }
  Removal out;
  for (std::size_t i = 0; i < num_ids; ++i) {
    const NodeIndex holder = owner(tier, ids[i]);
    if (holder == kNone) continue;
    cut(holder, ids[i], tier, RemovalReason::kInvalidated, RemovalReason::kInvalidated, out);
  }
  return out;
}

void PrefixIndex::forget_root(NodeIndex root, Removal& out) {
  while (true) {
    const NodeIndex child = node(root).first_child;
    const bool is_last = node(child).next_sibling == kNone;
    remove_subtree(child, Tier::kGpu, RemovalReason::kInvalidated, RemovalReason::kInvalidated, out);
    if (is_last) return;  // the root went with its last child, unless a lock holds it
  }
}

Removal PrefixIndex::invalidate_namespace(std::string_view name_space) {
  std::lock_guard structure(tree_);
  Removal out;
  const NodeIndex root = find_root(name_space);
  if (root == kNone || node(root).first_child == kNone) return out;
  for (NodeIndex i = node(root).first_child; i != kNone; i = node(i).next_sibling) check_unlocked(i);
  forget_root(root, out);
  return out;
}

Removal PrefixIndex::invalidate_all() {
  std::lock_guard structure(tree_);
  std::vector<NodeIndex> roots;
  for (const auto& [name, root] : roots_) {
    if (node(root).first_child != kNone) roots.push_back(root);
    for (NodeIndex i = node(root).first_child; i != kNone; i = node(i).next_sibling) check_unlocked(i);
  }
  Removal out;
  for (const NodeIndex root : roots) forget_root(root, out);
  return out;
}

void PrefixIndex::clear() {
  std::lock_guard structure(tree_);
  free_nodes();
  chunks_.clear();
  table_memory_ = Region();
  table_ = nullptr;
  table_size_ = table_used_ = 0;
  roots_.clear();
  names_.clear();
  free_names_.clear();
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    used_[tier].clear();
    owners_[tier].clear();
    num_blocks_[tier] = 0;
    most_recent_[tier] = least_recent_[tier] = kNone;
  }
  for (std::size_t slot = 0; slot < lock_slots_.size(); ++slot) {
    if (lock_slots_[slot].node == kNone) continue;
    lock_slots_[slot].node = kNone;
    free_locks_.push_back(static_cast<std::uint32_t>(slot));
  }
  emit_cleared();
}

// ---- moving

void PrefixIndex::move(const BlockId* ids, const BlockId* new_ids, std::size_t num_ids, Tier src, Tier dst) {
  std::lock_guard structure(tree_);
  const auto rows = row_of(ids, num_ids, src);
  std::unordered_map<BlockId, std::size_t> targets;
  for (std::size_t i = 0; i < num_ids; ++i) {
    if (new_ids[i] < 0) {
      throw Error(ErrorKind::kArgument, "block id " + std::to_string(new_ids[i]) + "; block ids are 0 to 2147483647.");
    }
    const bool is_vacated = src == dst && rows.count(new_ids[i]) != 0;
    if (!targets.emplace(new_ids[i], i).second || (is_used(dst, new_ids[i]) && !is_vacated)) {
      throw Error(ErrorKind::kBlockReuse, "block id " + std::to_string(new_ids[i]) +
                                              " is given twice, or is cached already on the tier to move to; nothing was moved.");
    }
  }
  learn_owners();
  std::vector<NodeIndex> pending;
  for (std::size_t i = 0; i < num_ids; ++i) pending.push_back(owner(src, ids[i]));
  std::sort(pending.begin(), pending.end());
  pending.erase(std::unique(pending.begin(), pending.end()), pending.end());

  // Each node is cut into runs that move and runs that stay; the lower part of a split keeps its index, so runs are taken
  // from the top. Ids are exchanged after all cuts, since one that moves may take an id that another gives up.
  std::vector<std::pair<NodeIndex, std::vector<BlockId>>> moves;
  for (const NodeIndex index : pending) {
    for (;;) {
      const Node& n = node(index);
      const BlockId* old = ids_of(n);
      const bool moving = rows.count(old[0]) != 0;
      std::size_t run = 1;
      while (run < n.num_blocks && (rows.count(old[run]) != 0) == moving) ++run;
      std::vector<BlockId> fresh;
      for (std::size_t k = 0; moving && k < run; ++k) fresh.push_back(new_ids[rows.at(old[k])]);
      const bool is_last = run == n.num_blocks;
      const NodeIndex part = is_last ? index : split(index, run);
      if (moving) moves.emplace_back(part, std::move(fresh));
      if (is_last) break;
    }
  }
  std::vector<Move> told;
  for (const auto& [index, fresh] : moves) told.push_back({index, fresh.data()});
  if (!moves.empty()) emit_moved(std::move(told), dst);
  for (std::size_t i = 0; i < num_ids; ++i) give_back_id(src, ids[i]);
  for (const auto& [index, fresh] : moves) relocate(index, fresh.data(), dst);
}

}  // namespace sage
