// Reading the index without changing it.

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "latency.h"
#include "sagellm/prefix_index.h"

namespace sage {

// Appends the blocks below node `above` down to the end of node `index`.
void PrefixIndex::fill_path(NodeIndex index, NodeIndex above, BlockPath& path) const {
  std::vector<NodeIndex> nodes;
  for (NodeIndex i = index; i != above && !node(i).is_root; i = node(i).parent) nodes.push_back(i);
  for (auto i = nodes.rbegin(); i != nodes.rend(); ++i) append_path(node(*i), node(*i).num_blocks, path);
}

Entry PrefixIndex::describe(NodeIndex index) const {
  Entry entry;
  entry.id = entry_id(index);
  entry.token_hash = prefix_hash(index);
  entry.num_blocks = node(index).depth;
  fill_path(index, kNone, entry.path);
  if (node(index).has_metadata) entry.metadata = metadata_.at(index);
  return entry;
}

Entry PrefixIndex::entry(EntryId id) const {
  std::lock_guard structure(tree_);  // exclusive: describing an entry may fill in the hash of a node
  return describe(find_entry(id));
}

std::vector<Token> PrefixIndex::tokens(EntryId id) const {
  std::shared_lock structure(tree_);
  const NodeIndex index = find_entry(id);
  std::vector<Token> out(std::size_t{node(index).depth} * block_size_);
  for (NodeIndex i = index; !node(i).is_root; i = node(i).parent) {
    const Node& n = node(i);
    std::copy_n(tokens_of(n), n.num_blocks * block_size_, out.data() + (n.depth - n.num_blocks) * block_size_);
  }
  return out;
}

std::vector<Entry> PrefixIndex::entries(std::optional<std::string_view> name_space) const {
  std::lock_guard structure(tree_);
  std::vector<Entry> out;
  const NodeIndex wanted = name_space ? find_root(*name_space) : kNone;
  if (name_space && wanted == kNone) return out;
  for (std::size_t i = 0; i < num_node_slots_; ++i) {
    const auto index = static_cast<NodeIndex>(i);
    const Node& n = node(index);
    if (n.generation % 2 == 0 || n.is_root || n.first_child != kNone) continue;
    if (!name_space || root_of(index) == wanted) out.push_back(describe(index));
  }
  return out;
}

std::vector<std::string> PrefixIndex::namespaces() const {
  std::shared_lock structure(tree_);
  std::vector<std::string> out;
  for (const auto& [name, root] : roots_) {
    if (node(root).first_child != kNone) out.push_back(name);
  }
  std::sort(out.begin(), out.end());
  return out;
}

BlockTable PrefixIndex::blocks(std::optional<Tier> tier, bool unlocked_only) const {
  std::lock_guard structure(tree_);  // exclusive: stamps and lock counts must stand still
  BlockTable out;
  const auto is_row = [&](const Node& n) { return (!tier || n.tier == *tier) && !(unlocked_only && n.num_locks != 0); };
  std::size_t room = 0;
  for (const std::size_t count : num_blocks_) room += count;
  if (tier) room = num_blocks_[static_cast<std::size_t>(*tier)];
  for (auto* column : {&out.block_ids, &out.parent_ids, &out.last_access, &out.depth, &out.num_locks}) column->reserve(room);
  out.tiers.reserve(room);
  for (std::size_t i = 0; i < num_node_slots_; ++i) {
    const Node& n = node(static_cast<NodeIndex>(i));
    if (n.generation % 2 == 0 || n.is_root || !is_row(n)) continue;
    const Node& parent = node(n.parent);
    std::int64_t above = parent.is_root || !is_row(parent) ? -1 : ids_of(parent)[parent.num_blocks - 1];
    for (std::size_t k = 0; k < n.num_blocks; ++k) {
      out.block_ids.push_back(ids_of(n)[k]);
      out.tiers.push_back(static_cast<std::int8_t>(n.tier));
      out.parent_ids.push_back(above);
      out.last_access.push_back(static_cast<std::int64_t>(n.last_access));
      out.depth.push_back(static_cast<std::int64_t>((n.depth - n.num_blocks + k + 1) * block_size_));
      out.num_locks.push_back(n.num_locks);
      above = ids_of(n)[k];
    }
  }
  return out;
}

void PrefixIndex::contains(const BlockId* ids, std::size_t num_ids, Tier tier, bool* out) const {
  std::shared_lock structure(tree_);
  for (std::size_t i = 0; i < num_ids; ++i) out[i] = is_used(tier, ids[i]);
}

std::uint64_t PrefixIndex::clock() const {
  std::shared_lock structure(tree_);
  std::lock_guard recency(recency_);
  return clock_;
}

std::uint64_t PrefixIndex::oldest_stamp(Tier tier) const {
  std::shared_lock structure(tree_);
  std::lock_guard recency(recency_);
  const NodeIndex oldest = least_recent_[static_cast<std::size_t>(tier)];
  return oldest == kNone ? ~std::uint64_t{0} : node(oldest).last_access;
}

std::size_t PrefixIndex::num_blocks(Tier tier) const {
  std::shared_lock structure(tree_);
  return num_blocks_[static_cast<std::size_t>(tier)];
}

std::size_t PrefixIndex::memory_bytes() const {
  std::lock_guard structure(tree_);
  return count_memory();
}

std::size_t PrefixIndex::count_memory() const {
  std::size_t bytes = sizeof(*this) + chunks_.memory_bytes() + table_size_ * sizeof(Slot) +
                      num_node_slots_ * (sizeof(Node) + sizeof(Links)) + lock_slots_.capacity() * sizeof(LockSlot);
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    bytes += (used_[tier].capacity() + owners_[tier].capacity()) * sizeof(void*);
    for (const auto& page : used_[tier]) bytes += page == nullptr ? 0 : kPageSize / 8;
    for (const auto& page : owners_[tier]) bytes += page == nullptr ? 0 : kPageSize * sizeof(NodeIndex);
  }
  for (const auto& [index, text] : metadata_) bytes += sizeof(index) + sizeof(text) + text.capacity();
  for (const std::string& name : names_) bytes += 2 * (sizeof(name) + name.capacity()) + sizeof(NodeIndex);
  return bytes;
}

Metrics PrefixIndex::metrics() const {
  std::lock_guard structure(tree_);
  Metrics out = counters_;
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) out.blocks[tier] = num_blocks_[tier];
  out.nodes = num_nodes_;
  out.locks = lock_slots_.size() - free_locks_.size();
  out.memory_bytes = count_memory();
  for (std::size_t bucket = 0; bucket < latency_.size(); ++bucket) {
    if (latency_[bucket] != 0) out.latency_ns.emplace_back(latency_bound(bucket), latency_[bucket]);
  }
  return out;
}

// ---- invariants

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("prefix index is broken: ") + what);
}

}  // namespace

void PrefixIndex::check_node(NodeIndex index, std::array<std::size_t, kNumTiers>& counted) const {
  const Node& n = node(index);
  const Node& parent = node(n.parent);
  require(n.generation % 2 == 1 && n.data != nullptr && n.num_blocks > 0 && n.num_blocks <= n.capacity, "a node is empty");
  require(n.depth == parent.depth + n.num_blocks, "a depth is wrong");
  require(parent.last_access >= n.last_access || parent.is_root, "a block is more recent than the one above it");
  require(parent.num_locks >= n.num_locks, "a lock does not hold all of its path");
  require((links(index).prev == kUnlinked) == (n.num_locks > 0), "a locked node is in a list, or an unlocked one is not");
  require(n.tag == make_tag(n.parent, tokens_of(n)), "a tag is wrong");
  require(find_child(n.parent, tokens_of(n), nullptr) == index, "a node cannot be found by its first block");
  require(n.has_metadata == (metadata_.count(index) == 1), "metadata without a node");
  for (std::size_t k = 0; k < n.num_blocks; ++k) {
    require(is_used(n.tier, ids_of(n)[k]), "a cached block is not marked as used");
    require(!knows_owners_ || owner(n.tier, ids_of(n)[k]) == index, "a block has another owner");
  }
  const std::uint64_t known = hash_of(n);
  if (known != 0) {
    const auto hashes = block_hashes(index, 0, n.num_blocks);
    require(known == hashes.back(), "a prefix hash is wrong");
  }
  counted[static_cast<std::size_t>(n.tier)] += n.num_blocks;
}

void PrefixIndex::check() const {
  std::lock_guard structure(tree_);
  std::array<std::size_t, kNumTiers> counted{};
  std::size_t num_nodes = 0, num_listed = 0, num_unlocked = 0;
  for (const auto& [name, root] : roots_) {
    require(node(root).is_root && names_[node(root).tag] == name, "a namespace has the wrong root");
    require(node(root).first_child != kNone || node(root).num_locks > 0, "an empty namespace was kept");
    ++num_nodes;
    std::vector<NodeIndex> stack{root};
    while (!stack.empty()) {
      const NodeIndex index = stack.back();
      stack.pop_back();
      if (index != root) {
        check_node(index, counted);
        ++num_nodes;
        num_unlocked += node(index).num_locks == 0;
      }
      for (NodeIndex i = node(index).first_child; i != kNone; i = node(i).next_sibling) {
        require(node(i).parent == index, "a child has another parent");
        stack.push_back(i);
      }
    }
  }
  require(num_nodes == num_nodes_ && counted == num_blocks_, "nodes or blocks are miscounted");
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    NodeIndex newer = kNone;
    for (NodeIndex i = most_recent_[tier]; i != kNone; newer = i, i = links(i).next) {
      const Node& n = node(i);
      require(static_cast<std::size_t>(n.tier) == tier && links(i).prev == newer, "a list is broken");
      require(newer == kNone || node(newer).last_access > n.last_access ||
                  (node(newer).last_access == n.last_access && node(newer).depth < n.depth),
              "a list is not sorted");
      ++num_listed;
    }
    require(least_recent_[tier] == newer, "a list ends elsewhere");
  }
  require(num_listed == num_unlocked, "an unlocked node is in no list");
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    std::size_t num_used = 0;
    for (const auto& page : used_[tier]) {
      for (std::size_t word = 0; page != nullptr && word < kPageSize / 64; ++word) {
        num_used += static_cast<std::size_t>(__builtin_popcountll(page[word]));
      }
    }
    require(num_used == num_blocks_[tier], "an id is marked as used and holds nothing");
  }
  std::size_t used = 0;
  for (std::size_t i = 0; i < table_size_; ++i) used += table_[i].index_plus_1 != 0;
  require(used == table_used_ && used + roots_.size() == num_nodes_, "the table holds something else");
}

}  // namespace sage
