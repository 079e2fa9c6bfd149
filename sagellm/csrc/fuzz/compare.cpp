// Invariants that hold after any calls.

#include <array>
#include <optional>

#include "session.h"

namespace sage::model {

// Cheap enough for every call.
void Session::follow() {
  index_->check();
  for (Named& named : entries_) named.alive &= model_.blocks().count(named.key) != 0;
  listener_.follow(*index_);
}

void Session::compare() {
  const BlockTable table = index_->blocks(std::nullopt, false);
  require(table.block_ids.size() == model_.blocks().size(), "the index holds another number of blocks");
  std::map<std::uint64_t, std::uint64_t> stamps;
  for (std::size_t row = 0; row < table.block_ids.size(); ++row) compare_row(table, row, stamps);
  std::uint64_t last = 0;
  for (const auto& [theirs, ours] : stamps) {
    require(ours > last, "blocks were used in another order");
    last = ours;
  }
  std::array<std::size_t, kNumTiers> counts{};
  std::set<std::string> names;
  for (const auto& [key, cached] : model_.blocks()) {
    ++counts[static_cast<std::size_t>(cached.place.first)];
    names.insert(key.first);
  }
  for (const Tier tier : kTiers)
    require(index_->num_blocks(tier) == counts[static_cast<std::size_t>(tier)], "a tier counts wrong");
  const std::vector<std::string> told = index_->namespaces();
  require(std::set<std::string>(told.begin(), told.end()) == names && told.size() == names.size(),
          "namespaces are others");
  if (!planted("tokens")) listener_.compare(model_);
}

void Session::compare_row(const BlockTable& table, std::size_t row, std::map<std::uint64_t, std::uint64_t>& stamps) {
  const Place place{kTiers[table.tiers.at(row)], static_cast<BlockId>(table.block_ids[row])};
  const Key* key = model_.holder(place);
  require(key != nullptr, "the index holds a block that should be gone");
  const Cached& cached = model_.blocks().at(*key);
  require(table.depth.at(row) == static_cast<std::int64_t>(key->second.size()), "a block lies at another depth");
  require(planted("locks") || table.num_locks.at(row) == static_cast<std::int64_t>(cached.num_locks),
          "a block has another number of locks");
  const std::size_t above = model_.length(*key) - 1;
  const BlockId parent = above == 0 ? -1 : model_.blocks().at(model_.prefix(*key, above)).place.second;
  require(table.parent_ids.at(row) == parent, "a block hangs below another one");
  const auto [stamp, is_new] = stamps.emplace(static_cast<std::uint64_t>(table.last_access.at(row)), cached.stamp);
  require(is_new || stamp->second == cached.stamp, "blocks of one call have different stamps, or the reverse");
}

}  // namespace sage::model
