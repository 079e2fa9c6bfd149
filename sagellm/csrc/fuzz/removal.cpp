// Calls that remove blocks.

#include <optional>

#include "session.h"

namespace sage::model {

void Session::expect_removed(const Removal& removal, const std::set<Key>& doomed, std::optional<ErrorKind> error) {
  require(error == (model_.locked(doomed) ? std::optional(ErrorKind::kLock) : std::nullopt),
          "locks and the answer disagree");
  if (!error) model_.remove(removal, doomed);
}

void Session::evict_lru() {
  const std::size_t num_blocks = in_.below(8);
  const Tier tier = in_.tier();
  const std::vector<Key> victims = model_.least_recent(num_blocks, tier);
  std::vector<BlockId> ids;
  for (const Key& key : victims) ids.push_back(model_.blocks().at(key).place.second);
  require(index_->select_lru(num_blocks, tier) == ids,
          "the least recently used blocks are others, or in another order");
  const Removal removal = index_->evict_lru(num_blocks, tier);
  std::vector<BlockId> on_tier;
  for (std::size_t i = 0; i < removal.blocks.size(); ++i) {
    if (removal.tiers.at(i) == tier) on_tier.push_back(removal.blocks[i]);
  }
  require(on_tier == ids, "other blocks were evicted than select_lru named");
  model_.remove(removal, model_.with_all_below(victims));
}

void Session::evict() {
  const Tier tier = in_.tier();
  const std::vector<BlockId> ids = ids_on(tier);
  const std::set<Key> named = keys_of(ids, tier);
  const std::set<Key> doomed = model_.with_all_below({named.begin(), named.end()});
  bool allowed = named.size() == ids.size() && !model_.locked(doomed);
  for (const Key& key : doomed) allowed &= model_.blocks().at(key).place.first != tier || named.count(key) != 0;
  Removal removal;
  const auto error = error_of([&] { removal = index_->evict(ids.data(), ids.size(), tier, RemovalReason::kPolicy); });
  require(error.has_value() != allowed, "an eviction was refused that the tree allows, or the reverse");
  if (!error) model_.remove(removal, doomed);
}

void Session::invalidate() {
  const bool by_entry = in_.one_in(4) && !entries_.empty();
  const std::size_t which = by_entry ? in_.below(entries_.size()) : 0;
  const Key asked = by_entry ? entries_[which].key : Key{name_space(), tokens()};
  const Tokens given = shown(asked.second);
  Removal removal;
  const auto error = error_of([&] {
    removal = by_entry ? index_->invalidate_entry(entries_[which].id)
                       : index_->invalidate(asked.first, given.data(), given.size());
  });
  const bool unknown = by_entry && error == ErrorKind::kArgument;
  require(!unknown || !entries_[which].alive || entries_[which].continued, "an entry was not known that is cached");
  require(!by_entry || unknown || entries_[which].alive, "an entry was invalidated that was gone");
  if (unknown) return;
  const std::set<Key> doomed = model_.sequence(full(asked));
  expect_removed(removal, doomed, error);
}

void Session::invalidate_blocks() {
  const Tier tier = in_.tier();
  const std::vector<BlockId> ids = ids_on(tier);
  const std::set<Key> named = keys_of(ids, tier);
  const std::set<Key> doomed = model_.with_all_below({named.begin(), named.end()});
  Removal removal;
  const auto error = error_of([&] { removal = index_->invalidate_blocks(ids.data(), ids.size(), tier); });
  expect_removed(removal, doomed, error);
}

void Session::invalidate_many() {
  const bool all = in_.one_in(2);
  const std::string name = name_space();
  std::set<Key> doomed;
  for (const auto& [key, cached] : model_.blocks()) {
    if (all || key.first == name) doomed.insert(key);
  }
  Removal removal;
  const auto error = error_of([&] { removal = all ? index_->invalidate_all() : index_->invalidate_namespace(name); });
  expect_removed(removal, doomed, error);
}

}  // namespace sage::model
