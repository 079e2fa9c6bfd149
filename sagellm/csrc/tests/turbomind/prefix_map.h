// The plainest exact prefix cache: every cached prefix, token by token, and its last block.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "engine.h"

namespace sage::host {

class PrefixMap {
 public:
  explicit PrefixMap(int block_len) : block_len_(block_len) {}

  using Place = std::pair<BlockId, UniqueId>;

  // The blocks of the longest known prefix, at most `max_blocks`. O(n^2) in tokens.
  std::vector<Place> find(const Token* tokens, int max_blocks) const {
    std::vector<Place> places;
    for (int i = 1; i <= max_blocks; ++i) {
      const auto found = places_.find(Tokens(tokens, tokens + i * block_len_));
      if (found == places_.end()) break;
      places.push_back(found->second);
    }
    return places;
  }
  bool has(const Token* tokens, int num_blocks) const {
    return places_.count(Tokens(tokens, tokens + num_blocks * block_len_)) != 0;
  }
  void put(const Token* tokens, int num_blocks, Place place) {
    places_[Tokens(tokens, tokens + num_blocks * block_len_)] = place;
  }
  // Forgets the prefix that ends in that block.
  void drop(Place place) {
    for (auto at = places_.begin(); at != places_.end();) at = at->second == place ? places_.erase(at) : std::next(at);
  }
  // Nor is any that goes on from there.
  void drop_with_extensions(Place place) {
    for (auto at = places_.begin(); at != places_.end();) {
      if (at->second != place) {
        ++at;
        continue;
      }
      const Tokens prefix = at->first;
      const auto extends = [&prefix](const Tokens& tokens) {
        return tokens.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
      };
      while (at != places_.end() && extends(at->first)) at = places_.erase(at);  // in order, they follow it
    }
  }
  const std::map<Tokens, Place>& all() const { return places_; }

 private:
  int block_len_;
  std::map<Tokens, Place> places_;
};

}  // namespace sage::host
