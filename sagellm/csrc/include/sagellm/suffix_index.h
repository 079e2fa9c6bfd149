// Guesses from suffix trees: of a text that grows, and of texts that have ended. The idea is that of SuffixDecoding (Oliaro et
// al., 2024, arXiv 2411.04975); what is counted and how a guess is valued is told in sagellm/accel/speculative/suffix.py.
// The plain twin is sagellm/accel/speculative/reference.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "sagellm/suffix_tree.h"

namespace sage {

// Guesses, and how many of them are expected to be right.
struct SuffixGuess {
  std::vector<std::int32_t> tokens;
  double score = 0.0;
};

// Guesses in a tree, parents before children, and the chance of each that it and its ancestors are right. The parent of a first
// token is -1.
struct SuffixGuessTree {
  std::vector<std::int32_t> tokens, parents;
  std::vector<double> chances;
};

// Texts that have ended, the oldest dropped first where they are more than `max_tokens` together.
class SuffixHistory {
 public:
  SuffixHistory(std::size_t max_depth, std::size_t max_tokens) : max_depth_(max_depth), max_tokens_(max_tokens) {}
  // The last `max_tokens` of it, if it has more. Amortised O(max_depth) for each token, and for each one dropped.
  void add(const std::int32_t* tokens, std::size_t count);
  std::size_t num_tokens() const { return tree_.text().size(); }
  std::size_t num_bytes() const { return tree_.num_bytes(); }

 private:
  friend class SuffixIndex;

  void drop_oldest();

  std::size_t max_depth_, max_tokens_;
  SuffixTree tree_;
  std::deque<std::uint64_t> ends_;  // of the texts, as places
};

// One text. A suffix of it is in the tree from when it differs from all before, or has `max_depth` tokens; until then what it
// says is there already, uncounted.
class SuffixIndex {
 public:
  explicit SuffixIndex(std::size_t max_depth) : max_depth_(max_depth) {}
  // Amortised O(nodes on a way from the root) for each token.
  void append(const std::int32_t* tokens, std::size_t count);
  void clear();
  // Up to `limit` tokens; the best that the text itself or `history`, which may be null, knows.
  void propose(std::size_t limit, double min_probability, const SuffixHistory* history, SuffixGuess& best) const;
  // The `limit` likeliest guesses of all that the two know, as a tree.
  void propose_tree(std::size_t limit, double min_probability, const SuffixHistory* history, SuffixGuessTree& found) const;
  const std::vector<std::int32_t>& text() const { return tree_.text(); }
  std::size_t num_bytes() const { return tree_.num_bytes(); }

 private:
  bool step(std::int32_t token);
  void add_next();
  std::size_t known_to(const SuffixHistory& history) const;

  std::size_t max_depth_;
  SuffixTree tree_;
  std::uint64_t next_ = 0;                            // the first suffix that is not in the tree
  SuffixTree::Spot active_{SuffixTree::kRoot, 0};     // where it ends
};

}  // namespace sage
