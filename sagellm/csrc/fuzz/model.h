// A prefix index that cannot be wrong: a map from every cached prefix to the block that ends it. The oracle of the fuzz
// target.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "sagellm/prefix_index.h"

namespace sage::model {

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "finding: %s\n", what.c_str());
  std::abort();
}

inline void require(bool holds, const char* what) {
  if (!holds) fail(what);
}

using Tokens = std::vector<Token>;
using Key = std::pair<std::string, Tokens>;  // namespace, tokens from the top to the end of a block
using Place = std::pair<Tier, BlockId>;

struct Cached {
  Place place;
  std::uint64_t stamp = 0;
  std::size_t num_locks = 0;
  std::string metadata;
};

class Model {
 public:
  explicit Model(std::size_t block_size) : block_size_(block_size) {}

  const std::map<Key, Cached>& blocks() const { return blocks_; }
  const std::map<LockId, Key>& locks() const { return locks_; }
  std::size_t block_size() const { return block_size_; }
  const Key* holder(Place place) const {
    const auto found = places_.find(place);
    return found == places_.end() ? nullptr : &found->second;
  }
  bool locked(const std::set<Key>& keys) const {
    return std::any_of(keys.begin(), keys.end(), [&](const Key& key) { return blocks_.at(key).num_locks != 0; });
  }
  BlockId free_id(Tier tier, const std::vector<BlockId>& but) const {
    BlockId id = 0;
    while (holder({tier, id}) != nullptr || std::find(but.begin(), but.end(), id) != but.end()) ++id;
    return id;
  }

  Key prefix(const Key& key, std::size_t num_blocks) const {
    const auto length = static_cast<std::ptrdiff_t>(num_blocks * block_size_);
    return {key.first, Tokens(key.second.begin(), key.second.begin() + length)};
  }
  std::size_t length(const Key& key) const { return key.second.size() / block_size_; }

  // The longest cached prefix, a key a block, from the top.
  std::vector<Key> match(const Key& key) const {
    std::vector<Key> found;
    while (found.size() < length(key) && blocks_.count(prefix(key, found.size() + 1)) != 0) {
      found.push_back(prefix(key, found.size() + 1));
    }
    return found;
  }

  std::set<Key> subtree(const Key& key) const {
    std::set<Key> found;
    for (auto i = blocks_.lower_bound(key); i != blocks_.end() && i->first.first == key.first; ++i) {
      const Tokens& tokens = i->first.second;
      if (tokens.size() < key.second.size() || !std::equal(key.second.begin(), key.second.end(), tokens.begin())) break;
      found.insert(i->first);
    }
    return found;
  }

  // Returns the keys that `invalidate` of a sequence removes.
  std::set<Key> sequence(const Key& key) const {
    std::vector<Key> path = match(key);
    std::set<Key> doomed;
    if (path.empty()) return doomed;
    if (path.size() == length(key)) {
      doomed = subtree(path.back());
      path.pop_back();
    }
    for (; !path.empty(); path.pop_back()) {
      const Cached& last = blocks_.at(path.back());
      if (!last.metadata.empty() || last.num_locks != 0) return doomed;
      for (const Key& below : subtree(path.back())) {
        if (below != path.back() && doomed.count(below) == 0) return doomed;
      }
      doomed.insert(path.back());
    }
    return doomed;
  }

  // The least recently used unlocked blocks of a tier, first victim first.
  std::vector<Key> least_recent(std::size_t num_blocks, Tier tier) const {
    std::vector<Key> keys;
    for (const auto& [key, cached] : blocks_) {
      if (cached.place.first == tier && cached.num_locks == 0) keys.push_back(key);
    }
    std::sort(keys.begin(), keys.end(), [&](const Key& a, const Key& b) {
      const std::uint64_t left = blocks_.at(a).stamp, right = blocks_.at(b).stamp;
      return left != right ? left < right : a.second.size() > b.second.size();
    });
    keys.resize(std::min(num_blocks, keys.size()));
    return keys;
  }

  std::set<Key> with_all_below(const std::vector<Key>& keys) const {
    std::set<Key> all;
    for (const Key& key : keys) all.merge(subtree(key));
    return all;
  }

  // ---- changes

  void touch(const Key& end) {
    ++clock_;
    for (const Key& key : match(end)) blocks_.at(key).stamp = clock_;
  }

  void place(const Key& key, Place at) {
    const auto old = blocks_.find(key);
    if (old != blocks_.end()) places_.erase(old->second.place);
    blocks_[key].place = at;
    places_[at] = key;
  }

  void move(const std::vector<Key>& keys, const std::vector<BlockId>& ids, Tier tier) {
    for (const Key& key : keys) places_.erase(blocks_.at(key).place);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      blocks_.at(keys[i]).place = {tier, ids[i]};
      places_[{tier, ids[i]}] = keys[i];
    }
  }

  void annotate(const Key& key, const std::string& metadata) { blocks_.at(key).metadata = metadata; }

  void lock(LockId lock, const Key& end) {
    require(locks_.emplace(lock, end).second, "a lock id that is in use was given out");
    for (const Key& key : match(end)) ++blocks_.at(key).num_locks;
  }

  void unlock(LockId lock) {
    const Key end = locks_.at(lock);
    locks_.erase(lock);
    for (const Key& key : match(end)) --blocks_.at(key).num_locks;
    touch(end);
  }

  void extend_lock(LockId lock, const Key& end) {
    const std::size_t before = length(locks_.at(lock));
    for (const Key& key : match(end)) {
      if (length(key) > before) ++blocks_.at(key).num_locks;
    }
    locks_.at(lock) = end;
  }

  // The index says it removed these; `expected` is what it had to remove.
  void remove(const Removal& removal, const std::set<Key>& expected) {
    require(removal.blocks.size() == expected.size() && removal.tiers.size() == expected.size(),
            "another number of blocks was removed than the contract says");
    for (std::size_t i = 0; i < removal.blocks.size(); ++i) {
      const Key* found = holder({removal.tiers[i], removal.blocks[i]});
      require(found != nullptr, "a removed block was not cached, or was removed twice");
      const Key key = *found;
      require(expected.count(key) != 0, "a block was removed that had to stay");
      require(blocks_.at(key).num_locks == 0, "a locked block was removed");
      require(subtree(key).size() == 1, "a block was removed before one below it");
      places_.erase(blocks_.at(key).place);
      blocks_.erase(key);
    }
  }

  void forget_locks() {
    locks_.clear();
    for (auto& [key, cached] : blocks_) cached.num_locks = 0;
  }

  void clear() {
    blocks_.clear();
    places_.clear();
    locks_.clear();
  }

 private:
  std::size_t block_size_;
  std::uint64_t clock_ = 0;
  std::map<Key, Cached> blocks_;
  std::map<Place, Key> places_;
  std::map<LockId, Key> locks_;
};

}  // namespace sage::model
