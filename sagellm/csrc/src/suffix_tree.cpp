#include "sagellm/suffix_tree.h"

#include <algorithm>

#include "sagellm/hash.h"

namespace sage {

SuffixTree::SuffixTree() { clear(); }

void SuffixTree::clear() {
  text_.clear();
  base_ = 0;
  nodes_.assign(1, Entry{});
  free_ = kNone;
  num_nodes_ = 0;
  children_.assign(64, kNone);
}

void SuffixTree::drop_text(std::uint64_t before) {
  text_.erase(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(before - base_));
  base_ = before;
}

void SuffixTree::insert(std::uint64_t start, std::size_t length) {
  Node at = kRoot;
  while (depth(at) < length) {
    const std::size_t from = depth(at);
    Node next = child(at, token(start + from));
    if (next == kNone) {
      next = make(at, token(start + from), start, 1, length);
      link(next);
    } else {
      const std::size_t most = std::min(depth(next), length);
      std::size_t same = from + 1;
      while (same < most && token(newest(next) + same) == token(start + same)) ++same;
      if (same < depth(next)) next = split(next, same, start);
      ++nodes_[next].count;
      nodes_[next].newest = start;
    }
    // The last one is the newest of all, so it wins among equals.
    Node& best = nodes_[at].best;
    if (best == kNone || count(next) >= count(best)) best = next;
    at = next;
  }
}

void SuffixTree::remove(std::uint64_t start, std::size_t length) {
  path_.clear();
  for (Node at = kRoot; depth(at) < length;) {
    at = child(at, token(start + depth(at)));
    path_.push_back(at);
  }
  while (!path_.empty()) {
    const Node node = path_.back(), parent = nodes_[node].parent;
    path_.pop_back();
    const bool was_best = nodes_[parent].best == node;
    if (--nodes_[node].count == 0) {
      unlink(node);
      free(node);
    } else if (const Node only = nodes_[node].first;
               only != kNone && nodes_[only].next == kNone && count(only) == count(node)) {
      merge(node);
    }
    if (was_best && parent != kRoot) choose_best(parent);
  }
}

SuffixTree::Spot SuffixTree::find(const std::int32_t* pattern, std::size_t length) const {
  Node at = kRoot;
  while (depth(at) < length) {
    const std::size_t from = depth(at);
    at = child(at, pattern[from]);
    if (at == kNone) return Spot{};
    const std::size_t most = std::min(depth(at), length);
    const std::int32_t* const label = text_.data() + (newest(at) - base_);
    if (!std::equal(pattern + from, pattern + most, label + from)) return Spot{};
  }
  return Spot{at, length};
}

SuffixTree::Spot SuffixTree::locate(const std::int32_t* pattern, std::size_t length) const {
  Node at = kRoot;
  while (depth(at) < length) at = child(at, pattern[depth(at)]);
  return Spot{at, length};
}

SuffixTree::Node SuffixTree::child(Node parent, std::int32_t token) const {
  const std::size_t mask = children_.size() - 1;
  for (std::size_t at = home(parent, token);; at = (at + 1) & mask) {
    const Node node = children_[at];
    if (node == kNone || (nodes_[node].parent == parent && nodes_[node].token == token)) return node;
  }
}

std::size_t SuffixTree::num_bytes() const {
  return text_.capacity() * sizeof(std::int32_t) + nodes_.capacity() * sizeof(Entry) + children_.capacity() * sizeof(Node);
}

SuffixTree::Node SuffixTree::make(Node parent, std::int32_t token, std::uint64_t start, std::uint32_t count,
                                  std::size_t depth) {
  Node node = free_;
  if (node != kNone) {
    free_ = nodes_[node].next;
  } else {
    node = static_cast<Node>(nodes_.size());
    nodes_.emplace_back();
  }
  Entry entry;
  entry.newest = start;
  entry.count = count;
  entry.depth = static_cast<std::uint32_t>(depth);
  entry.parent = parent;
  entry.token = token;
  nodes_[node] = entry;
  ++num_nodes_;
  return node;
}

void SuffixTree::free(Node node) {
  nodes_[node].next = free_;
  free_ = node;
  --num_nodes_;
}

void SuffixTree::link(Node node) {
  Entry& entry = nodes_[node];
  Node& first = nodes_[entry.parent].first;
  entry.previous = kNone;
  entry.next = first;
  if (first != kNone) nodes_[first].previous = node;
  first = node;
  put(node);
}

void SuffixTree::unlink(Node node) {
  const Entry& entry = nodes_[node];
  (entry.previous == kNone ? nodes_[entry.parent].first : nodes_[entry.previous].next) = entry.next;
  if (entry.next != kNone) nodes_[entry.next].previous = entry.previous;
  take(node);
}

// Puts a node of that depth on the edge to `node` and returns it.
SuffixTree::Node SuffixTree::split(Node node, std::size_t depth, std::uint64_t start) {
  const Node parent = nodes_[node].parent;
  const bool was_best = nodes_[parent].best == node;
  unlink(node);
  const Node upper = make(parent, nodes_[node].token, start, count(node), depth);
  link(upper);
  nodes_[node].parent = upper;
  nodes_[node].token = token(newest(node) + depth);
  link(node);
  nodes_[upper].best = node;
  if (was_best) nodes_[parent].best = upper;
  return upper;
}

void SuffixTree::choose_best(Node node) {
  Node best = nodes_[node].first;
  for (Node other = best; other != kNone; other = nodes_[other].next) {
    const bool is_more = count(other) > count(best);
    if (is_more || (count(other) == count(best) && newest(other) > newest(best))) best = other;
  }
  nodes_[node].best = best;
}

// Takes a node off that has one child and ends no suffix; its parent's `best` is left to the caller.
void SuffixTree::merge(Node node) {
  const Node only = nodes_[node].first, parent = nodes_[node].parent;
  unlink(only);
  unlink(node);
  nodes_[only].parent = parent;
  nodes_[only].token = nodes_[node].token;
  link(only);
  free(node);
}

std::size_t SuffixTree::home(Node parent, std::int32_t token) const {
  const std::uint64_t key = std::uint64_t{parent} << 32 | static_cast<std::uint32_t>(token);
  return static_cast<std::size_t>(fold(key ^ kHash0, kHash1)) & (children_.size() - 1);
}

void SuffixTree::put(Node node) {
  // Those that are counted are in the table, or about to come.
  if ((num_nodes_ + 1) * 3 > children_.size() * 2) grow();
  const std::size_t mask = children_.size() - 1;
  std::size_t at = home(nodes_[node].parent, nodes_[node].token);
  while (children_[at] != kNone) at = (at + 1) & mask;
  children_[at] = node;
}

void SuffixTree::take(Node node) {
  const std::size_t mask = children_.size() - 1;
  std::size_t hole = home(nodes_[node].parent, nodes_[node].token);
  while (children_[hole] != node) hole = (hole + 1) & mask;
  for (std::size_t at = (hole + 1) & mask; children_[at] != kNone; at = (at + 1) & mask) {
    // It may fill the hole unless its home lies behind that.
    const Entry& entry = nodes_[children_[at]];
    if (((at - home(entry.parent, entry.token)) & mask) >= ((at - hole) & mask)) {
      children_[hole] = children_[at];
      hole = at;
    }
  }
  children_[hole] = kNone;
}

void SuffixTree::grow() {
  std::vector<Node> old(children_.size() * 2, kNone);
  old.swap(children_);
  const std::size_t mask = children_.size() - 1;
  for (const Node node : old) {
    if (node == kNone) continue;
    std::size_t at = home(nodes_[node].parent, nodes_[node].token);
    while (children_[at] != kNone) at = (at + 1) & mask;
    children_[at] = node;
  }
}

}  // namespace sage
