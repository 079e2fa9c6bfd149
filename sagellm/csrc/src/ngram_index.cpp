#include "sagellm/ngram_index.h"

#include <algorithm>

#include "sagellm/hash.h"

namespace sage {

NgramIndex::NgramIndex(std::size_t min_n, std::size_t max_n) : min_n_(min_n), max_n_(max_n), tables_(max_n - min_n + 1) {
  clear();
}

void NgramIndex::clear() {
  text_.clear();
  for (Table& table : tables_) {
    table.places.assign(64, 0);
    table.count = 0;
  }
}

void NgramIndex::append(const std::int32_t* tokens, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    // Only now has the gram that ended the text a token behind it.
    if (!text_.empty()) note(text_.size());
    text_.push_back(tokens[i]);
  }
}

void NgramIndex::propose(std::size_t limit, std::vector<std::int32_t>& out) const {
  out.clear();
  const std::size_t size = text_.size();
  std::size_t from = 0;
  std::uint64_t hash = kHash0;
  for (std::size_t n = 1; n <= std::min(max_n_, size); ++n) {
    hash = extend_hash(hash, size - n);
    if (n < min_n_) continue;
    const Table& table = tables_[n - min_n_];
    const std::uint32_t found = table.places[place_of(table, n, hash, size)];
    if (found == 0) break;  // then no longer one was there either
    from = found;
  }
  if (from == 0) return;
  for (std::size_t i = from; out.size() < limit; ++i) {
    const std::int32_t token = i < size ? text_[i] : out[i - size];
    out.push_back(token);
  }
}

std::size_t NgramIndex::num_bytes() const {
  std::size_t bytes = text_.capacity() * sizeof(std::int32_t);
  for (const Table& table : tables_) bytes += table.places.capacity() * sizeof(std::uint32_t);
  return bytes;
}

// Grams are hashed from their end, so that one pass gives the hashes of all lengths.
std::uint64_t NgramIndex::extend_hash(std::uint64_t hash, std::size_t at) const {
  return fold(hash ^ static_cast<std::uint32_t>(text_[at]), kHash1);
}

// Where in the table the gram is that ends before `end`, or the empty place where it belongs.
std::size_t NgramIndex::place_of(const Table& table, std::size_t n, std::uint64_t hash, std::size_t end) const {
  const std::size_t mask = table.places.size() - 1;
  for (std::size_t at = static_cast<std::size_t>(hash) & mask;; at = (at + 1) & mask) {
    const std::size_t there = table.places[at];
    if (there == 0 || std::equal(text_.data() + (end - n), text_.data() + end, text_.data() + (there - n))) return at;
  }
}

void NgramIndex::note(std::size_t end) {
  std::uint64_t hash = kHash0;
  for (std::size_t n = 1; n <= std::min(max_n_, end); ++n) {
    hash = extend_hash(hash, end - n);
    if (n < min_n_) continue;
    Table& table = tables_[n - min_n_];
    std::uint32_t& place = table.places[place_of(table, n, hash, end)];
    const bool is_new = place == 0;
    place = static_cast<std::uint32_t>(end);
    if (is_new && ++table.count * 2 > table.places.size()) grow(table, n);
  }
}

void NgramIndex::grow(Table& table, std::size_t n) {
  std::vector<std::uint32_t> old(table.places.size() * 2, 0);
  old.swap(table.places);
  const std::size_t mask = table.places.size() - 1;
  for (const std::uint32_t end : old) {
    if (end == 0) continue;
    std::uint64_t hash = kHash0;
    for (std::size_t k = 1; k <= n; ++k) hash = extend_hash(hash, end - k);
    std::size_t at = static_cast<std::size_t>(hash) & mask;
    while (table.places[at] != 0) at = (at + 1) & mask;
    table.places[at] = end;
  }
}

}  // namespace sage
