// The trees and grams that guess from text, beside counting in plain text; for the sanitizers above all.

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "expect.h"
#include "sagellm/ngram_index.h"
#include "sagellm/suffix_index.h"
#include "sagellm/suffix_tree.h"

namespace {

using Tokens = std::vector<std::int32_t>;

std::mt19937 dice(1);

Tokens random_text(std::size_t count, std::uint32_t vocab_size) {
  Tokens text(count);
  for (auto& token : text) token = static_cast<std::int32_t>(dice() % vocab_size);
  return text;
}

// Texts come and go; what the tree says of every string of the oldest text is what counting says.
void counts_are_right(std::uint32_t vocab_size, std::size_t depth) {
  sage::SuffixTree tree;
  std::vector<std::uint64_t> ends{0};
  const auto length_at = [&](std::uint64_t start, std::uint64_t end) { return std::min<std::uint64_t>(depth, end - start); };
  std::size_t first = 0;
  for (int round = 0; round < 120; ++round) {
    const std::uint64_t start = tree.end();
    for (const auto token : random_text(1 + dice() % 20, vocab_size)) tree.push(token);
    for (std::uint64_t at = start; at < tree.end(); ++at) tree.insert(at, length_at(at, tree.end()));
    ends.push_back(tree.end());
    if (dice() % 3 != 0 || round > 100) {
      for (std::uint64_t at = ends[first]; at < ends[first + 1]; ++at) tree.remove(at, length_at(at, ends[first + 1]));
      tree.drop_text(ends[++first]);
    }
    EXPECT(tree.num_nodes() <= 2 * tree.text().size());
    if (first + 1 == ends.size()) continue;
    const Tokens& text = tree.text();
    const auto place_of = [&](std::size_t text_number) { return static_cast<std::size_t>(ends[text_number] - ends[first]); };
    const std::size_t most = length_at(ends[first], ends[first + 1]);
    for (std::size_t length = 1; length <= most; ++length) {
      std::uint32_t count = 0;
      for (std::size_t number = first; number + 1 < ends.size(); ++number) {
        for (std::size_t at = place_of(number); at + length <= place_of(number + 1); ++at) {
          count += std::equal(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(length),
                              text.begin() + static_cast<std::ptrdiff_t>(at));
        }
      }
      const auto spot = tree.find(text.data(), length);
      EXPECT(spot.node != sage::SuffixTree::kNone);
      EXPECT(tree.count(spot.node) == count);
    }
  }
  while (first + 1 < ends.size()) {
    for (std::uint64_t at = ends[first]; at < ends[first + 1]; ++at) tree.remove(at, length_at(at, ends[first + 1]));
    tree.drop_text(ends[++first]);
  }
  EXPECT(tree.num_nodes() == 0);
}

void guesses_come_from_the_text(std::uint32_t vocab_size) {
  sage::SuffixIndex suffixes(8);
  sage::SuffixHistory history(8, 100);
  sage::NgramIndex ngrams(1, 4);
  sage::SuffixGuess guess;
  sage::SuffixGuessTree tree;
  Tokens grams;
  for (int step = 0; step < 300; ++step) {
    const Tokens text = random_text(dice() % 9, vocab_size);
    suffixes.append(text.data(), text.size());
    ngrams.append(text.data(), text.size());
    if (step % 9 == 0) history.add(text.data(), text.size());
    suffixes.propose(9, 0.0, step % 2 == 0 ? &history : nullptr, guess);
    suffixes.propose_tree(9, 0.0, step % 2 == 0 ? &history : nullptr, tree);
    EXPECT(tree.tokens.size() <= 9 && tree.parents.size() == tree.tokens.size() && tree.tokens.empty() == guess.tokens.empty());
    for (std::size_t node = 0; node < tree.tokens.size(); ++node) {
      const auto parent = tree.parents[node];
      EXPECT(parent >= -1 && parent < static_cast<std::int32_t>(node));
      EXPECT(parent < 0 || tree.chances[node] <= tree.chances[static_cast<std::size_t>(parent)]);
    }
    ngrams.propose(9, grams);
    EXPECT(guess.tokens.size() <= 9 && (grams.empty() || grams.size() == 9));
    EXPECT(history.num_tokens() <= 100);
    if (step % 100 == 99) {
      suffixes.clear();
      ngrams.clear();
    }
  }
}

}  // namespace

int main() {
  for (const std::uint32_t vocab_size : {1u, 2u, 3u, 50u}) {
    for (const std::size_t depth : {2u, 5u, 16u}) counts_are_right(vocab_size, depth);
    guesses_come_from_the_text(vocab_size);
  }
  std::puts("suffix_tree: passed");
  return 0;
}
