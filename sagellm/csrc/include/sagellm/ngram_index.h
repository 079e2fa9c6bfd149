// Where the latest n tokens of a growing text stood before, for several n at once.
// The plain twin is sagellm/accel/speculative/reference.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sage {

class NgramIndex {
 public:
  // 1 <= min_n <= max_n.
  NgramIndex(std::size_t min_n, std::size_t max_n);
  // O(max_n) for each token, amortised.
  void append(const std::int32_t* tokens, std::size_t count);
  void clear();
  // Up to `limit` tokens that stood behind the latest earlier place of the longest n-gram that ends the text. Where that place
  // is so near that the text ends first, the guesses themselves are read on: a text that repeats goes on repeating.
  void propose(std::size_t limit, std::vector<std::int32_t>& out) const;
  const std::vector<std::int32_t>& text() const { return text_; }
  std::size_t num_bytes() const;

 private:
  // The grams of one length, by open addressing: the place behind the latest of each; 0 where nothing is.
  struct Table {
    std::vector<std::uint32_t> places;
    std::size_t count = 0;
  };

  std::uint64_t extend_hash(std::uint64_t hash, std::size_t at) const;
  std::size_t place_of(const Table& table, std::size_t n, std::uint64_t hash, std::size_t end) const;
  void note(std::size_t end);
  void grow(Table& table, std::size_t n);

  std::size_t min_n_, max_n_;
  std::vector<std::int32_t> text_;
  std::vector<Table> tables_;  // of lengths min_n, min_n + 1, ...
};

}  // namespace sage
