#include "sagellm/suffix_index.h"

#include <algorithm>
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

// What most often follows a match that ends at `spot`. Where `is_growing`, the newest place is read on behind the longest
// suffixes, and behind the end of the text the guesses themselves.
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
  // What the text ends with, and what occurred before, is what is not in the tree on its own account.
  consider(tree_, active_.length, true);
  if (history == nullptr) return;
  // If a pattern does not occur, no longer one does.
  std::size_t known = 0, beyond = std::min(history->max_depth_, text().size()) + 1;
  while (beyond - known > 1) {
    const std::size_t middle = known + (beyond - known) / 2;
    (history->tree_.find(text_end - middle, middle).node == SuffixTree::kNone ? beyond : known) = middle;
  }
  consider(history->tree_, known, false);
}

}  // namespace sage
