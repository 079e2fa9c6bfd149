// A listener that reads the events alone. It must come to the same blocks as the model.
#pragma once

#include <map>
#include <vector>

#include "model.h"
#include "sagellm/prefix_index.h"

namespace sage::model {

class Listener {
 public:
  Listener(std::size_t block_size, std::size_t event_capacity)
      : block_size_(block_size), complete_(event_capacity > 0) {}

  void follow(const PrefixIndex& index) {
    const Events news = index.events(last_);
    require(news.num_lost + news.events.size() == news.last_sequence - last_,
            "the number of new events does not add up");
    complete_ = complete_ && news.num_lost == 0;
    std::uint64_t expected = last_ + news.num_lost;
    for (const Event& event : news.events) {
      require(event.sequence == ++expected, "events are not numbered without a gap");
      if (complete_) apply(event);
    }
    last_ = news.last_sequence;
  }

  void compare(const Model& model) const {
    if (!complete_) return;
    require(blocks_.size() == model.blocks().size(), "events tell of another number of blocks");
    for (const auto& [key, cached] : model.blocks()) {
      const auto found = blocks_.find({key.first, cached.place});
      require(found != blocks_.end() && found->second == key, "events tell of another prefix in a block");
    }
  }

 private:
  void apply(const Event& event) {
    if (event.kind == EventKind::kCleared) return blocks_.clear();
    if (event.kind == EventKind::kStored) return store(event);
    std::vector<Key> keys;
    const bool moved = event.kind == EventKind::kMoved;
    for (const BlockId id : moved ? event.src_block_ids : event.block_ids) {
      const auto found = blocks_.find({event.name_space, {moved ? event.src_tier : event.tier, id}});
      require(found != blocks_.end(), "an event takes a block away that no event has brought");
      keys.push_back(found->second);
      blocks_.erase(found);
    }
    for (std::size_t i = 0; moved && i < keys.size(); ++i) add({event.tier, event.block_ids.at(i)}, keys[i]);
  }

  void store(const Event& event) {
    Key key{event.name_space, {}};
    if (event.has_parent) {
      const auto parent = blocks_.find({event.name_space, {event.parent_tier, event.parent_id}});
      require(parent != blocks_.end(), "an event names a block above that no event has brought");
      key = parent->second;
    }
    require(event.tokens.size() == event.block_ids.size() * block_size_, "an event has too few or too many tokens");
    std::vector<std::uint64_t> hashes;
    for (std::size_t i = 0; i < event.block_ids.size(); ++i) {
      const auto from = event.tokens.begin() + static_cast<std::ptrdiff_t>(i * block_size_);
      key.second.insert(key.second.end(), from, from + static_cast<std::ptrdiff_t>(block_size_));
      hashes.resize(key.second.size() / block_size_);
      prefix_hashes(key.second.data(), key.second.size(), block_size_, hashes.data());
      require(event.block_hashes.at(i) == hashes.back(), "an event has another hash than its prefix");
      add({event.tier, event.block_ids[i]}, key);
    }
  }

  void add(Place place, const Key& key) {
    require(blocks_.emplace(std::pair(key.first, place), key).second, "an event puts a block where another one lies");
  }

  std::size_t block_size_;
  bool complete_;  // so far: an index that keeps few events loses some
  std::uint64_t last_ = 0;
  // Ids may trade places between namespaces, an event for each: they are told apart here too.
  std::map<std::pair<std::string, Place>, Key> blocks_;
};

}  // namespace sage::model
