// The log of changes that a listener follows.

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "sagellm/hash.h"
#include "sagellm/prefix_index.h"

namespace sage {

// Events are counted also when none is kept, so that a listener learns that it cannot follow.
bool PrefixIndex::keeps_events() {
  if (event_capacity_ == 0) ++last_sequence_;
  return event_capacity_ != 0;
}

void PrefixIndex::push_event(Event event) {
  event.sequence = ++last_sequence_;
  events_.push_back(std::move(event));
  if (events_.size() > event_capacity_) events_.pop_front();
}

// Hashes of the prefixes that end with blocks `first` to `last` of a node.
std::vector<std::uint64_t> PrefixIndex::block_hashes(NodeIndex index, std::size_t first, std::size_t last) const {
  const Node& n = node(index);
  std::vector<std::uint64_t> hashes;
  std::uint64_t hash = prefix_hash(n.parent);
  for (std::size_t k = 0; k < last; ++k) {
    hash = chain_hash(hash, block_hash(tokens_of(n) + k * block_size_, block_size_));
    if (k >= first) hashes.push_back(hash);
  }
  return hashes;
}

void PrefixIndex::emit_stored(NodeIndex index, std::size_t first, std::size_t num_blocks) {
  if (!keeps_events()) return;
  const Node& n = node(index);
  Event event;
  event.kind = EventKind::kStored;
  event.name_space = name_of(index);
  event.tier = n.tier;
  event.last_access = n.last_access;
  event.block_ids.assign(ids_of(n) + first, ids_of(n) + first + num_blocks);
  event.tokens.assign(tokens_of(n) + first * block_size_, tokens_of(n) + (first + num_blocks) * block_size_);
  event.block_hashes = block_hashes(index, first, first + num_blocks);
  const Node& parent = node(n.parent);
  event.has_parent = first > 0 || !parent.is_root;
  if (event.has_parent) {
    event.parent_tier = first > 0 ? n.tier : parent.tier;
    event.parent_id = first > 0 ? ids_of(n)[first - 1] : ids_of(parent)[parent.num_blocks - 1];
  }
  push_event(std::move(event));
}

void PrefixIndex::emit_removed(NodeIndex index, std::size_t first, RemovalReason reason) {
  if (!keeps_events()) return;
  const Node& n = node(index);
  Event event;
  event.kind = EventKind::kRemoved;
  event.name_space = name_of(index);
  event.tier = n.tier;
  event.reason = reason;
  event.block_ids.assign(ids_of(n) + first, ids_of(n) + n.num_blocks);
  event.block_hashes = block_hashes(index, first, n.num_blocks);
  std::reverse(event.block_ids.begin(), event.block_ids.end());
  std::reverse(event.block_hashes.begin(), event.block_hashes.end());
  push_event(std::move(event));
}

// One event for all nodes of a namespace, since their ids may trade places.
void PrefixIndex::emit_moved(std::vector<Move> moves, Tier tier) {
  if (!keeps_events()) return;
  std::stable_sort(moves.begin(), moves.end(), [&](const Move& a, const Move& b) {
    const NodeIndex left = root_of(a.node), right = root_of(b.node);
    return left != right ? left < right : node(a.node).depth < node(b.node).depth;
  });
  for (std::size_t i = 0; i < moves.size();) {
    const NodeIndex root = root_of(moves[i].node);
    Event event;
    event.kind = EventKind::kMoved;
    event.name_space = names_[node(root).tag];
    event.src_tier = node(moves[i].node).tier;
    event.tier = tier;
    for (; i < moves.size() && root_of(moves[i].node) == root; ++i) {
      const Node& n = node(moves[i].node);
      event.src_block_ids.insert(event.src_block_ids.end(), ids_of(n), ids_of(n) + n.num_blocks);
      event.block_ids.insert(event.block_ids.end(), moves[i].ids, moves[i].ids + n.num_blocks);
    }
    push_event(std::move(event));
  }
}

void PrefixIndex::emit_cleared() {
  if (!keeps_events()) return;
  Event event;
  event.kind = EventKind::kCleared;
  push_event(std::move(event));
}

Events PrefixIndex::events(std::uint64_t after) const {
  std::shared_lock structure(tree_);
  Events out;
  out.last_sequence = last_sequence_;
  const std::uint64_t first_kept = last_sequence_ - events_.size() + 1;
  if (after + 1 < first_kept) out.num_lost = first_kept - 1 - after;
  for (const Event& event : events_) {
    if (event.sequence > after) out.events.push_back(event);
  }
  return out;
}

}  // namespace sage
