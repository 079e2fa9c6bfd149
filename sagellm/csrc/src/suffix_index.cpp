#include "sagellm/suffix_index.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace sage {

namespace {

// How far a guess is trusted that stands `ahead` tokens behind a match of `matched` tokens.
double suffix_trust(std::size_t matched, std::size_t ahead) {
  return static_cast<double>(matched) / static_cast<double>(matched + ahead);
}

// The highest score that guesses behind a match of that length can have.
double highest_suffix_score(std::size_t matched, std::size_t limit) {
  double score = 0.0;
  for (std::size_t ahead = 1; ahead <= limit; ++ahead) score += suffix_trust(matched, ahead);
  return score;
}

// Guesses what most often follows a match that ends at `spot`. Where `is_growing`, the newest place is read on after the
// longest suffixes, and after the end of the text the guesses themselves.
void guess_along(const SuffixTree& tree, SuffixTree::Spot spot, bool is_growing, std::size_t limit, double min_probability,
                 SuffixGuess& guess) {
  guess.tokens.clear();
  guess.score = 0.0;
  const std::size_t matched = spot.length;
  double probability = 1.0;
  for (; guess.tokens.size() < limit; ++spot.length) {
    if (spot.length == tree.depth(spot.node)) {
      if (const SuffixTree::Node next = tree.best(spot.node); next != SuffixTree::kNone) {
        probability *= static_cast<double>(tree.count(next)) / static_cast<double>(tree.count(spot.node));
        spot.node = next;
      } else if (!is_growing) {
        return;
      }
    }
    const double estimate = probability * suffix_trust(matched, guess.tokens.size() + 1);
    if (estimate < min_probability) return;
    const std::uint64_t place = tree.newest(spot.node) + spot.length;
    const std::int32_t token =
        place < tree.end() ? tree.token(place) : guess.tokens[static_cast<std::size_t>(place - tree.end())];
    guess.tokens.push_back(token);
    guess.score += estimate;
  }
}

// A tree of guesses that grows by the likeliest branch of all.
class GuessTree {
 public:
  GuessTree(std::size_t limit, double min_probability, SuffixGuessTree& found)
      : limit_(limit), min_probability_(min_probability), found_(found) {}

  // The branches behind a match that ends at `spot`.
  void add(const SuffixTree& tree, SuffixTree::Spot spot, bool is_growing) {
    expand({1.0, spot.length, is_growing, 0, &tree, spot, -1, 0}, -1);
  }

  void grow() {
    while (!branches_.empty() && found_.tokens.size() < limit_) {
      std::pop_heap(branches_.begin(), branches_.end(), is_less);
      const Branch branch = branches_.back();
      branches_.pop_back();
      expand(branch, node_of(branch));
    }
  }

 private:
  // A token behind the node `parent` of the result, and where it ends in the tree that says so.
  struct Branch {
    double chance;
    std::size_t matched;
    bool is_growing;
    std::uint64_t newest;
    const SuffixTree* tree;
    SuffixTree::Spot spot;
    std::int32_t parent, token;
  };

  // Among equals the one of a longer match comes first, then of the running text, then the newest. No two of one match and tree
  // have the same newest place and chance.
  static bool is_less(const Branch& one, const Branch& other) {
    return std::tie(one.chance, one.matched, one.is_growing, one.newest) <
           std::tie(other.chance, other.matched, other.is_growing, other.newest);
  }

  // A branch of another match may have made the node before.
  std::int32_t node_of(const Branch& branch) {
    for (std::size_t node = 0; node < found_.tokens.size(); ++node) {
      if (found_.parents[node] == branch.parent && found_.tokens[node] == branch.token) return static_cast<std::int32_t>(node);
    }
    found_.tokens.push_back(branch.token);
    found_.parents.push_back(branch.parent);
    found_.chances.push_back(branch.chance);
    return static_cast<std::int32_t>(found_.tokens.size()) - 1;
  }

  // A guess by its place on the way to `node`, from 0 on.
  std::int32_t guess_at(std::int32_t node, std::size_t place) const {
    std::size_t depth = 0;
    for (std::int32_t at = node; at >= 0; at = found_.parents[static_cast<std::size_t>(at)]) ++depth;
    for (; depth > place + 1; --depth) node = found_.parents[static_cast<std::size_t>(node)];
    return found_.tokens[static_cast<std::size_t>(node)];
  }

  void expand(const Branch& from, std::int32_t node) {
    const SuffixTree& tree = *from.tree;
    const SuffixTree::Node at = from.spot.node;
    const double trust = static_cast<double>(from.matched) / static_cast<double>(from.matched + 1);
    const auto push = [&](SuffixTree::Node next, double share) {
      const double chance = from.chance * share * trust;
      if (chance < min_probability_) return;
      const std::uint64_t place = tree.newest(next) + from.spot.length;
      const std::int32_t token =
          place < tree.end() ? tree.token(place) : guess_at(node, static_cast<std::size_t>(place - tree.end()));
      branches_.push_back({chance, from.matched, from.is_growing, tree.newest(next), from.tree,
                           SuffixTree::Spot{next, from.spot.length + 1}, node, token});
      std::push_heap(branches_.begin(), branches_.end(), is_less);
    };
    if (from.spot.length < tree.depth(at)) return push(at, 1.0);
    if (tree.first(at) == SuffixTree::kNone) {
      if (from.is_growing) push(at, 1.0);  // as `guess_along` reads on
      return;
    }
    for (SuffixTree::Node next = tree.first(at); next != SuffixTree::kNone; next = tree.next(next)) {
      push(next, static_cast<double>(tree.count(next)) / static_cast<double>(tree.count(at)));
    }
  }

  const std::size_t limit_;
  const double min_probability_;
  SuffixGuessTree& found_;
  std::vector<Branch> branches_;  // a heap
};

}  // namespace

void SuffixHistory::add(const std::int32_t* tokens, std::size_t count) {
  if (count > max_tokens_) {
    tokens += count - max_tokens_;
    count = max_tokens_;
  }
  while (num_tokens() + count > max_tokens_) drop_oldest();
  if (count == 0) return;
  const std::uint64_t start = tree_.end(), end = start + count;
  for (std::size_t i = 0; i < count; ++i) tree_.push(tokens[i]);
  for (std::uint64_t at = start; at < end; ++at) tree_.insert(at, std::min<std::uint64_t>(max_depth_, end - at));
  ends_.push_back(end);
}

void SuffixHistory::drop_oldest() {
  const std::uint64_t end = ends_.front();
  ends_.pop_front();
  for (std::uint64_t at = tree_.end() - num_tokens(); at < end; ++at) {
    tree_.remove(at, std::min<std::uint64_t>(max_depth_, end - at));
  }
  tree_.drop_text(end);
}

void SuffixIndex::clear() {
  tree_.clear();
  next_ = 0;
  active_ = SuffixTree::Spot{SuffixTree::kRoot, 0};
}

void SuffixIndex::append(const std::int32_t* tokens, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    tree_.push(tokens[i]);
    while (next_ < tree_.end()) {
      if (!step(tokens[i])) {
        add_next();  // it differs from all that are there
        active_ = tree_.locate(tree_.text().data() + next_, active_.length == 0 ? 0 : active_.length - 1);
        continue;
      }
      if (active_.length == max_depth_) {
        add_next();
        active_ = tree_.locate(tree_.text().data() + next_, max_depth_ - 1);
      }
      break;
    }
  }
}

// Whether what ends at the active spot goes on with this token somewhere; it does so there from now on.
bool SuffixIndex::step(std::int32_t token) {
  if (active_.length == tree_.depth(active_.node)) {
    const SuffixTree::Node next = tree_.child(active_.node, token);
    if (next == SuffixTree::kNone) return false;
    active_.node = next;
  } else if (tree_.token(tree_.newest(active_.node) + active_.length) != token) {
    return false;
  }
  ++active_.length;
  return true;
}

void SuffixIndex::add_next() { tree_.insert(next_++, max_depth_); }

void SuffixIndex::propose(std::size_t limit, double min_probability, const SuffixHistory* history, SuffixGuess& best) const {
  best.tokens.clear();
  best.score = 0.0;
  SuffixGuess guess;
  const std::int32_t* const text_end = text().data() + text().size();
  const auto consider = [&](const SuffixTree& tree, std::size_t matched, bool is_growing) {
    for (; matched > 0 && highest_suffix_score(matched, limit) > best.score; --matched) {
      guess_along(tree, tree.locate(text_end - matched, matched), is_growing, limit, min_probability, guess);
      if (guess.score > best.score) std::swap(guess, best);
    }
  };
  // The active point is the longest end of the text that has occurred before.
  consider(tree_, active_.length, true);
  if (history == nullptr) return;
  consider(history->tree_, known_to(*history), false);
}

// Tokens of the longest end of the text that occurs in the history. If a pattern does not occur, no longer one does.
std::size_t SuffixIndex::known_to(const SuffixHistory& history) const {
  const std::int32_t* const text_end = text().data() + text().size();
  std::size_t known = 0, beyond = std::min(history.max_depth_, text().size()) + 1;
  while (beyond - known > 1) {
    const std::size_t middle = known + (beyond - known) / 2;
    (history.tree_.find(text_end - middle, middle).node == SuffixTree::kNone ? beyond : known) = middle;
  }
  return known;
}

void SuffixIndex::propose_tree(std::size_t limit, double min_probability, const SuffixHistory* history,
                               SuffixGuessTree& found) const {
  found = SuffixGuessTree{};
  GuessTree guesses(limit, min_probability, found);
  const std::int32_t* const text_end = text().data() + text().size();
  const auto add = [&](const SuffixTree& tree, std::size_t matched, bool is_growing) {
    std::uint32_t count = 0;
    for (; matched > 0; --matched) {
      const SuffixTree::Spot spot = tree.locate(text_end - matched, matched);
      if (tree.count(spot.node) == count) continue;  // the longer match has the same places, and is trusted more
      count = tree.count(spot.node);
      guesses.add(tree, spot, is_growing);
    }
  };
  add(tree_, active_.length, true);
  if (history != nullptr) add(history->tree_, known_to(*history), false);
  guesses.grow();
}

}  // namespace sage
