#include "naive_table.h"

#include <algorithm>
#include <set>
#include <vector>

namespace sage::host {

NaiveTable::Key NaiveTable::key(const SageManager& manager) const {
  return {manager.engine, manager.group, manager.rank, fault_ == TableFault::kForgetReset ? 0 : manager.generation};
}

NaiveTable::Replica& NaiveTable::replica(const SageManager& manager) {
  const std::lock_guard guard(mutex_);
  std::unique_ptr<Replica>& replica = replicas_[key(manager)];
  if (replica == nullptr) {
    replica = std::make_unique<Replica>(
        Replica{PrefixMap(manager.block_len), std::minstd_rand(static_cast<unsigned>(manager.rank) + 1)});
  }
  return *replica;
}

int NaiveTable::evict(const SageManager& manager, const BlockId* cached, int n, int count, BlockId* victims) {
  Replica& state = replica(manager);
  std::vector<BlockId> order(cached, cached + n);
  std::vector<SageBlockInfo> infos(order.size());
  manager.api->block_info(manager.manager, cached, n, infos.data());
  std::set<BlockId> needed;
  for (const auto& [tokens, place] : state.known.all()) needed.insert(place.first);
  std::map<BlockId, std::pair<bool, std::uint64_t>> worth;
  for (const SageBlockInfo& info : infos) worth[info.id] = {needed.count(info.id) != 0, info.timestamp};
  std::sort(order.begin(), order.end(), [&](BlockId a, BlockId b) { return worth[a] < worth[b]; });
  if (fault_ == TableFault::kRandomVictims) std::shuffle(order.begin(), order.end(), state.random);
  std::copy_n(order.begin(), count, victims);
  if (fault_ == TableFault::kRepeatedVictims) std::fill_n(victims, count, victims[0]);
  if (fault_ == TableFault::kFewVictims) return count / 2;
  if (fault_ == TableFault::kManyVictims) return count + 1000;
  if (fault_ == TableFault::kUncachedVictims) {
    const BlockId nonsense[] = {-1, 1 << 30};
    for (int i = 0; i < count; ++i) victims[i] = nonsense[i % 2];
    for (BlockId id = 0; id < count; ++id) {
      if (!std::binary_search(cached, cached + n, id)) victims[id] = id;
    }
  }
  return count;
}

void NaiveTable::evicted(const SageManager& manager, const BlockId* ids, const UniqueId* unique_ids, int n) {
  if (fault_ == TableFault::kForgetEvicted) return;
  for (int i = 0; i < n; ++i) replica(manager).known.drop({ids[i], unique_ids[i]});
}

void NaiveTable::reset(const SageManager& manager) {
  if (fault_ == TableFault::kForgetReset) return;
  const std::lock_guard guard(mutex_);
  replicas_.erase(key(manager));
}

int NaiveTable::prefix_lookup(const SageManager& manager, const SageSequence& sequence, int max_blocks, BlockId* ids,
                              UniqueId* unique_ids) {
  Replica& state = replica(manager);
  std::vector<PrefixMap::Place> places = state.known.find(sequence.prompt, max_blocks);
  if (fault_ == TableFault::kForeignBlocks) {
    for (const auto& [tokens, place] : state.known.all()) {
      if (static_cast<int>(places.size()) < max_blocks) places.push_back(place);
    }
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    ids[i] = places[i].first;
    unique_ids[i] = places[i].second + (fault_ == TableFault::kWrongUniqueIds ? 1 : 0);
  }
  return static_cast<int>(places.size());
}

void NaiveTable::prefix_store(const SageManager& manager, const Token* tokens, const BlockId* ids,
                              const UniqueId* unique_ids, int n_blocks) {
  PrefixMap& known = replica(manager).known;
  for (int i = 0; i < n_blocks; ++i) {
    if (!known.has(tokens, i + 1) || fault_ == TableFault::kForgetEvicted) known.put(tokens, i + 1, {ids[i], unique_ids[i]});
  }
}

}  // namespace sage::host
