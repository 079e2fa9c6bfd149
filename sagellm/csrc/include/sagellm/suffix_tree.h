// A compressed trie of suffixes of bounded length, with counts: how often does this string occur, and what follows it most?
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sage {

// Suffixes come in the order in which they stand in the text, and leave in the same order. So the newest suffix below a node
// outlives all others there, and the node is written as a place in that one: no label is ever copied.
class SuffixTree {
 public:
  using Node = std::uint32_t;
  static constexpr Node kNone = ~Node{0};
  static constexpr Node kRoot = 0;

  // Where a string ends in the tree: `length` tokens from the root, on the way to `node` or at its end.
  struct Spot {
    Node node = kNone;
    std::size_t length = 0;
  };

  SuffixTree();
  void clear();

  // ---- the text; places count on from the first token ever, also when the oldest are dropped

  void push(std::int32_t token) { text_.push_back(token); }
  void drop_text(std::uint64_t before);
  std::uint64_t end() const { return base_ + text_.size(); }
  std::int32_t token(std::uint64_t place) const { return text_[static_cast<std::size_t>(place - base_)]; }
  const std::vector<std::int32_t>& text() const { return text_; }

  // ---- suffixes: O(nodes on the way, and tokens on the edges)

  // `length` may be more than what the text has as yet, if it differs from all suffixes that are there before that.
  void insert(std::uint64_t start, std::size_t length);
  // The oldest of those that were inserted, with its length.
  void remove(std::uint64_t start, std::size_t length);
  // Where `pattern` ends; no node if it does not occur. For trees whose suffixes are all within the text.
  Spot find(const std::int32_t* pattern, std::size_t length) const;
  // As `find`, for a pattern that is known to be there.
  Spot locate(const std::int32_t* pattern, std::size_t length) const;
  Node child(Node parent, std::int32_t token) const;

  std::uint32_t count(Node node) const { return nodes_[node].count; }
  std::size_t depth(Node node) const { return nodes_[node].depth; }
  // The start of the newest suffix through it.
  std::uint64_t newest(Node node) const { return nodes_[node].newest; }
  // The child with the highest count, of equals the one with the newest suffix; kNone: a leaf. Not of the root.
  Node best(Node node) const { return nodes_[node].best; }
  // The children of a node, in any order; kNone behind the last one.
  Node first(Node node) const { return nodes_[node].first; }
  Node next(Node node) const { return nodes_[node].next; }

  std::size_t num_nodes() const { return num_nodes_; }
  std::size_t num_bytes() const;

 private:
  struct Entry {
    std::uint64_t newest = 0;
    std::uint32_t count = 0, depth = 0;
    Node parent = kNone;
    std::int32_t token = 0;  // the first on the edge to it
    Node first = kNone, next = kNone, previous = kNone, best = kNone;
  };

  Node make(Node parent, std::int32_t token, std::uint64_t start, std::uint32_t count, std::size_t depth);
  void free(Node node);
  void link(Node node);
  void unlink(Node node);
  Node split(Node node, std::size_t depth, std::uint64_t start);
  void choose_best(Node node);
  void merge(Node node);

  std::size_t home(Node parent, std::int32_t token) const;
  void put(Node node);
  void take(Node node);
  void grow();

  std::vector<std::int32_t> text_;
  std::uint64_t base_ = 0;
  std::vector<Entry> nodes_;
  Node free_ = kNone;           // a list through `next`
  std::size_t num_nodes_ = 0;   // without the root
  std::vector<Node> children_;  // by parent and token, open addressing
  std::vector<Node> path_;      // of `remove`
};

}  // namespace sage
