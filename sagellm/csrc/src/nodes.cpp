// Nodes of the tree, their memory, and the namespaces they hang in.

#include <algorithm>
#include <cstring>

#include "sagellm/hash.h"
#include "sagellm/prefix_index.h"

namespace sage {

std::size_t PrefixIndex::chunk_bytes(std::size_t capacity) const {
  return sizeof(std::uint64_t) + capacity * (block_size_ * sizeof(Token) + sizeof(BlockId));
}

PrefixIndex::NodeIndex PrefixIndex::new_node() {
  NodeIndex index = free_nodes_;
  if (index != kNone) {
    free_nodes_ = node(index).parent;
  } else {
    if ((num_node_slots_ & (kSlabSize - 1)) == 0) {
      const bool huge = !slabs_.empty();  // an index with few nodes takes the pages it needs
      slabs_.emplace_back(kSlabSize * sizeof(Node), huge);
      links_.emplace_back(kSlabSize * sizeof(Links), false, std::size_t{4096});  // aligned to a page: any alignment does
    }
    index = static_cast<NodeIndex>(num_node_slots_++);
  }
  Node& n = node(index);
  const std::uint32_t generation = n.generation + 1;
  n = Node{};
  n.generation = generation;
  n.parent = n.first_child = n.next_sibling = n.prev_sibling = kNone;
  links(index) = Links{kUnlinked, kUnlinked, index};
  ++num_nodes_;
  return index;
}

void PrefixIndex::free_node(NodeIndex index) {
  Node& n = node(index);
  if (n.data != nullptr) {
    chunks_.free(n.data, chunk_bytes(n.capacity));
    n.data = nullptr;
  }
  if (n.has_metadata) metadata_.erase(index);
  ++n.generation;
  n.parent = free_nodes_;
  free_nodes_ = index;
  --num_nodes_;
}

void PrefixIndex::free_nodes() {
  for (std::size_t i = 0; i < num_node_slots_; ++i) {
    const auto index = static_cast<NodeIndex>(i);
    if (node(index).generation % 2 == 1) free_node(index);
  }
}

void PrefixIndex::resize_chunk(Node& n, std::size_t capacity) {
  Node old = n;
  n.data = chunks_.allocate(chunk_bytes(capacity));
  n.capacity = static_cast<std::uint32_t>(capacity);
  hash_of(n) = old.data == nullptr ? 0 : hash_of(old);
  if (old.data == nullptr) return;
  std::memcpy(ids_of(n), ids_of(old), n.num_blocks * sizeof(BlockId));
  std::memcpy(tokens_of(n), tokens_of(old), n.num_blocks * block_size_ * sizeof(Token));
  chunks_.free(old.data, chunk_bytes(old.capacity));
}

PrefixIndex::NodeIndex PrefixIndex::add_child(NodeIndex parent, const Token* tokens, const BlockId* ids,
                                              std::size_t num_blocks, Tier tier, std::uint64_t last_access) {
  make_room_in_table();
  const NodeIndex index = new_node();
  Node& n = node(index);
  try {
    resize_chunk(n, num_blocks);
  } catch (...) {
    free_node(index);
    throw;
  }
  n.tier = tier;
  n.last_access = last_access;
  n.depth = node(parent).depth;
  n.tag = make_tag(parent, tokens);
  n.parent = parent;
  append(index, tokens, ids, num_blocks);
  link_child(parent, index);
  table_insert(n.tag, index);
  return index;
}

void PrefixIndex::append(NodeIndex index, const Token* tokens, const BlockId* ids, std::size_t num_blocks) {
  Node& n = node(index);
  const std::size_t wanted = n.num_blocks + num_blocks;
  // A node that grows once is likely to grow again, block by block, as its request generates.
  if (wanted > n.capacity) resize_chunk(n, n.num_blocks == 0 ? wanted : wanted + wanted / 8);
  std::memcpy(tokens_of(n) + n.num_blocks * block_size_, tokens, num_blocks * block_size_ * sizeof(Token));
  std::memcpy(ids_of(n) + n.num_blocks, ids, num_blocks * sizeof(BlockId));
  std::uint64_t hash = n.num_blocks == 0 ? (node(n.parent).is_root ? kEmptyPrefixHash : hash_of(node(n.parent))) : hash_of(n);
  if (hash != 0) {
    for (std::size_t i = 0; i < num_blocks; ++i) hash = chain_hash(hash, block_hash(tokens + i * block_size_, block_size_));
  }
  hash_of(n) = hash;
  if (n.num_blocks != 0) n.generation += 2;
  n.num_blocks += static_cast<std::uint32_t>(num_blocks);
  take_ids(index, n.num_blocks - num_blocks, n.num_blocks);
  n.depth += static_cast<std::uint32_t>(num_blocks);
  num_blocks_[static_cast<std::size_t>(n.tier)] += num_blocks;
}

PrefixIndex::NodeIndex PrefixIndex::split(NodeIndex index, std::size_t at) {
  // The lower part keeps the index: locks, metadata and entry ids name the end of the node.
  make_room_in_table();
  const NodeIndex upper_index = new_node();
  Node& lower = node(index);
  Node& upper = node(upper_index);
  const std::size_t rest = lower.num_blocks - at;
  std::byte* rest_data = nullptr;
  try {
    rest_data = chunks_.allocate(chunk_bytes(rest));
    resize_chunk(upper, at);
  } catch (...) {
    if (rest_data != nullptr) chunks_.free(rest_data, chunk_bytes(rest));
    free_node(upper_index);
    throw;
  }
  upper.num_blocks = static_cast<std::uint32_t>(at);
  upper.depth = lower.depth - static_cast<std::uint32_t>(rest);
  upper.tier = lower.tier;
  upper.last_access = lower.last_access;
  upper.num_locks = lower.num_locks;
  upper.tag = lower.tag;
  std::memcpy(tokens_of(upper), tokens_of(lower), at * block_size_ * sizeof(Token));
  std::memcpy(ids_of(upper), ids_of(lower), at * sizeof(BlockId));
  if (knows_owners_) set_owners(upper_index, 0, at);

  const NodeIndex parent = lower.parent;
  table_erase(lower.tag, index);
  unlink_child(index);
  link_child(parent, upper_index);
  table_insert(upper.tag, upper_index);

  const Node old = lower;
  lower.data = rest_data;
  lower.num_blocks = lower.capacity = static_cast<std::uint32_t>(rest);
  hash_of(lower) = hash_of(old);
  std::memcpy(ids_of(lower), ids_of(old) + at, rest * sizeof(BlockId));
  std::memcpy(tokens_of(lower), tokens_of(old) + at * block_size_, rest * block_size_ * sizeof(Token));
  chunks_.free(old.data, chunk_bytes(old.capacity));
  lower.tag = make_tag(upper_index, tokens_of(lower));
  link_child(upper_index, index);
  table_insert(lower.tag, index);
  if (lower.num_locks == 0) lru_link_above(upper_index, index);
  return upper_index;
}

void PrefixIndex::link_child(NodeIndex parent, NodeIndex child) {
  Node& p = node(parent);
  Node& c = node(child);
  c.parent = parent;
  c.prev_sibling = kNone;
  c.next_sibling = p.first_child;
  if (p.first_child != kNone) node(p.first_child).prev_sibling = child;
  p.first_child = child;
}

void PrefixIndex::unlink_child(NodeIndex child) {
  Node& c = node(child);
  if (c.prev_sibling != kNone) {
    node(c.prev_sibling).next_sibling = c.next_sibling;
  } else {
    node(c.parent).first_child = c.next_sibling;
  }
  if (c.next_sibling != kNone) node(c.next_sibling).prev_sibling = c.prev_sibling;
}

// Known for a node unless it was cut or split; then made again from the nearest one above. Callers hold `tree_` exclusively.
std::uint64_t PrefixIndex::prefix_hash(NodeIndex index) const {
  std::vector<NodeIndex> unknown;
  std::uint64_t hash = kEmptyPrefixHash;
  for (NodeIndex i = index; !node(i).is_root; i = node(i).parent) {
    if (hash_of(node(i)) != 0) {
      hash = hash_of(node(i));
      break;
    }
    unknown.push_back(i);
  }
  for (auto i = unknown.rbegin(); i != unknown.rend(); ++i) {
    const Node& n = node(*i);
    for (std::size_t k = 0; k < n.num_blocks; ++k) {
      hash = chain_hash(hash, block_hash(tokens_of(n) + k * block_size_, block_size_));
    }
    hash_of(n) = hash;
  }
  return hash;
}

EntryId PrefixIndex::entry_id(NodeIndex index) const {
  const Node& n = node(index);
  return n.is_root ? 0 : (EntryId{n.generation} << 32) | index;
}

PrefixIndex::NodeIndex PrefixIndex::find_entry(EntryId id) const {
  const auto index = static_cast<NodeIndex>(id & 0xffffffffu);
  const auto generation = static_cast<std::uint32_t>(id >> 32);
  if (index < num_node_slots_ && generation % 2 == 1 && node(index).generation == generation && !node(index).is_root) {
    return index;
  }
  throw Error(ErrorKind::kArgument, "entry " + std::to_string(id) +
                                        " is not cached: its last block was removed, or it was continued in place; "
                                        "look its tokens up again.");
}

PrefixIndex::NodeIndex PrefixIndex::root_of(NodeIndex index) const {
  while (!node(index).is_root) index = node(index).parent;
  return index;
}

const std::string& PrefixIndex::name_of(NodeIndex index) const { return names_[node(root_of(index)).tag]; }

PrefixIndex::NodeIndex PrefixIndex::find_root(std::string_view name_space) const {
  const auto found = roots_.find(std::string(name_space));
  return found == roots_.end() ? kNone : found->second;
}

PrefixIndex::NodeIndex PrefixIndex::make_root(std::string_view name_space) {
  const NodeIndex found = find_root(name_space);
  if (found != kNone) return found;
  const NodeIndex index = new_node();
  Node& n = node(index);
  n.is_root = true;
  if (free_names_.empty()) {
    n.tag = static_cast<std::uint32_t>(names_.size());
    names_.emplace_back(name_space);
  } else {
    n.tag = free_names_.back();
    free_names_.pop_back();
    names_[n.tag] = std::string(name_space);
  }
  roots_.emplace(std::string(name_space), index);
  return index;
}

void PrefixIndex::drop_root_if_empty(NodeIndex root) {
  const Node& n = node(root);
  if (!n.is_root || n.first_child != kNone || n.num_locks != 0) return;
  roots_.erase(names_[n.tag]);
  free_names_.push_back(n.tag);
  names_[n.tag].clear();
  free_node(root);
}

}  // namespace sage
