// Which block was used when, and which are in use. Each tier has one list of its unlocked nodes, sorted by (stamp, depth).
// A path is stamped from its end upwards, and each node goes to the front. So the last node of the list never has an unlocked
// node of its own tier below it, and eviction is a pop whatever the number of leaves.

#include <mutex>
#include <shared_mutex>

#include "sagellm/prefix_index.h"

namespace sage {

void PrefixIndex::lru_unlink(NodeIndex index) {
  Links& own = links(index);
  if (own.prev == kUnlinked) return;
  const auto tier = static_cast<std::size_t>(node(index).tier);
  (own.prev == kNone ? most_recent_[tier] : links(own.prev).next) = own.next;
  (own.next == kNone ? least_recent_[tier] : links(own.next).prev) = own.prev;
  own.prev = own.next = kUnlinked;
}

void PrefixIndex::lru_push_front(NodeIndex index) {
  const auto tier = static_cast<std::size_t>(node(index).tier);
  const NodeIndex head = most_recent_[tier];
  Links& own = links(index);
  own.prev = kNone;
  own.next = head;
  (head == kNone ? least_recent_[tier] : links(head).prev) = index;
  most_recent_[tier] = index;
  NodeIndex& newcomer = newcomers_[tier][num_newcomers_[tier]++ % kFar];
  links(newcomer).far = index;
  newcomer = index;
}

// `index` becomes the next more recent one of `below`, if that is in a list.
void PrefixIndex::lru_link_above(NodeIndex index, NodeIndex below) {
  Links& other = links(below);
  if (other.prev == kUnlinked) return;
  const auto tier = static_cast<std::size_t>(node(index).tier);
  links(index) = Links{other.prev, below, other.far};
  (other.prev == kNone ? most_recent_[tier] : links(other.prev).next) = index;
  other.prev = index;
}

// A node that changed its tier keeps its stamp. It is looked for from the recent end: what is promoted was just used, and
// what is demoted is younger than what was demoted before.
void PrefixIndex::lru_insert_sorted(NodeIndex index) {
  const Node& n = node(index);
  const auto tier = static_cast<std::size_t>(n.tier);
  NodeIndex after = most_recent_[tier];
  while (after != kNone) {
    const Node& other = node(after);
    if (other.last_access < n.last_access || (other.last_access == n.last_access && other.depth > n.depth)) break;
    after = links(after).next;
  }
  if (after != kNone) return lru_link_above(index, after);
  const NodeIndex tail = least_recent_[tier];
  links(index) = Links{tail, kNone, index};
  (tail == kNone ? most_recent_[tier] : links(tail).next) = index;
  least_recent_[tier] = index;
}

void PrefixIndex::touch_path(NodeIndex index) {
  const std::uint64_t now = ++clock_;
  for (NodeIndex i = index; !node(i).is_root; i = node(i).parent) {
    Node& n = node(i);
    n.last_access = now;
    if (n.num_locks != 0) continue;
    lru_unlink(i);
    lru_push_front(i);
  }
}

void PrefixIndex::touch(BlockId id, Tier tier) {
  std::lock_guard structure(tree_);
  if (!is_used(tier, id)) return;
  learn_owners();
  touch_path(owner(tier, id));
}

void PrefixIndex::lock_path(NodeIndex from, NodeIndex up_to) {
  for (NodeIndex i = from; i != up_to; i = node(i).parent) {
    if (node(i).num_locks++ == 0 && !node(i).is_root) lru_unlink(i);
  }
}

LockId PrefixIndex::take_lock(NodeIndex index) {
  lock_path(index, kNone);
  std::uint32_t slot;
  if (free_locks_.empty()) {
    slot = static_cast<std::uint32_t>(lock_slots_.size());
    lock_slots_.push_back(LockSlot{kNone, 0});
  } else {
    slot = free_locks_.back();
    free_locks_.pop_back();
  }
  lock_slots_[slot].node = index;
  if (++lock_slots_[slot].generation == 0) ++lock_slots_[slot].generation;  // or slot 0 would give out lock 0: no lock
  return (LockId{lock_slots_[slot].generation} << 32) | slot;
}

PrefixIndex::LockSlot& PrefixIndex::lock_slot(LockId lock) {
  const auto slot = static_cast<std::size_t>(lock & 0xffffffffu);
  if (slot < lock_slots_.size() && lock_slots_[slot].generation == lock >> 32 && lock_slots_[slot].node != kNone) {
    return lock_slots_[slot];
  }
  throw Error(ErrorKind::kLock, "lock " + std::to_string(lock) +
                                    " is unknown or was released already; a lock comes from lookup(lock=True) and is "
                                    "released once.");
}

void PrefixIndex::unlock(LockId lock) {
  {
    std::shared_lock structure(tree_);
    std::lock_guard recency(recency_);
    if (!node(lock_slot(lock).node).is_root) return release(lock);
  }
  // The lock of a request that matched nothing may be all that keeps its namespace, which then goes with it.
  std::lock_guard structure(tree_);
  const NodeIndex end = lock_slot(lock).node;
  release(lock);
  drop_root_if_empty(end);
}

void PrefixIndex::release(LockId lock) {
  LockSlot& slot = lock_slot(lock);
  const std::uint64_t now = ++clock_;
  for (NodeIndex i = slot.node; i != kNone; i = node(i).parent) {
    Node& n = node(i);
    n.last_access = now;
    if (--n.num_locks == 0 && !n.is_root) lru_push_front(i);
  }
  slot.node = kNone;
  free_locks_.push_back(static_cast<std::uint32_t>(lock & 0xffffffffu));
}

}  // namespace sage
