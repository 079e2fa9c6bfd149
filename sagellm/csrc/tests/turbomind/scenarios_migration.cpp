// Blocks go to host memory and come back, within a generation and after a sleep.

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "scenarios.h"

namespace sage::host {

namespace {

// Copies what is cached to host memory whenever it is asked for a prefix, and brings back what it misses.
class TieredTable : public NaiveTable {
 public:
  int prefix_lookup(const SageManager& manager, const SageSequence& sequence, int max_blocks, BlockId* ids,
                    UniqueId* unique_ids) override {
    Host& host = host_of(manager);
    offload(manager, host);
    PrefixMap& known = replica(manager).known;
    for (int i = static_cast<int>(known.find(sequence.prompt, max_blocks).size()) + 1; i <= max_blocks; ++i) {
      const auto copy = host.copies.find(Tokens(sequence.prompt, sequence.prompt + i * manager.block_len));
      if (copy == host.copies.end()) break;
      SageMove move{SAGE_RESTORE, -1, 0, copy->second.data(), SAGE_BAD_MOVE, 0};
      if (manager.api->migrate(manager.manager, &move, 1) != 1) {
        num_refused += move.status == SAGE_NO_FREE_BLOCK;
        if (!replaces || !replace(manager, known, sequence, i, move)) break;
      }
      known.put(sequence.prompt, i, {move.block_id, move.unique_id});
      ++host.num_restored;
    }
    return NaiveTable::prefix_lookup(manager, sequence, max_blocks, ids, unique_ids);
  }
  int num_restored(int rank) { return host_.at(rank).num_restored; }
  int num_offloaded(int rank) { return static_cast<int>(host_.at(rank).copies.size()); }
  std::atomic<int> num_refused{0}, num_replaced{0};
  bool replaces = false;

 private:
  struct Host {
    std::map<Tokens, Kv> copies;
    int num_restored = 0;
  };
  // Has the first cached block give way that is not part of the prefix itself.
  bool replace(const SageManager& manager, PrefixMap& known, const SageSequence& sequence, int num_blocks, SageMove& move) {
    const auto found = known.find(sequence.prompt, num_blocks);
    const auto is_own = [&found](const PrefixMap::Place& place) {
      return std::find(found.begin(), found.end(), place) != found.end();
    };
    for (const auto& [tokens, place] : known.all()) {
      SageBlockInfo info{};
      manager.api->block_info(manager.manager, &place.first, 1, &info);
      if (info.state != SAGE_BLOCK_CACHED || is_own(place)) continue;
      const PrefixMap::Place gone = place;
      move.kind = SAGE_REPLACE;
      move.block_id = gone.first;
      move.unique_id = gone.second;
      if (manager.api->migrate(manager.manager, &move, 1) != 1) return false;
      known.drop(gone);
      ++num_replaced;
      return true;
    }
    return false;
  }
  Host& host_of(const SageManager& manager) {
    const std::lock_guard guard(mutex_);
    return host_[manager.rank];
  }
  void offload(const SageManager& manager, Host& host) {
    SageCounts counts{};
    counts.struct_size = sizeof counts;
    manager.api->counts(manager.manager, &counts);
    for (const auto& [tokens, place] : replica(manager).known.all()) {
      SageBlockInfo info{};
      manager.api->block_info(manager.manager, &place.first, 1, &info);
      if (info.state != SAGE_BLOCK_CACHED || host.copies.count(tokens) != 0) continue;
      Kv copy(counts.block_bytes / sizeof(std::uint64_t));
      SageMove move{SAGE_OFFLOAD, place.first, place.second, copy.data(), SAGE_BAD_MOVE, 0};
      if (manager.api->migrate(manager.manager, &move, 1) == 1) host.copies.emplace(tokens, std::move(copy));
    }
  }

  std::mutex mutex_;
  std::map<int, Host> host_;
};

void offload_and_restore(const Lab& lab) {
  TieredTable table;
  GroupOptions options;
  options.engine.num_ranks = 2;
  Group group(lab.engines, options, table.hooks());
  const auto hits = [&group](const Tokens& prompt) {
    const SeqId seq_id = group.submit(prompt, 3);
    group.drain();
    return group.request(seq_id).hit_tokens;
  };
  require(hits(text(1, 30)) + hits(text(2, 30)) == 0, "a hit in an empty cache");
  hits(text(3, 5));  // asked again, and everything that is cached by now is copied
  require(table.num_offloaded(0) > 14 && table.num_offloaded(0) == table.num_offloaded(1), "not everything was copied");
  group.sleep();
  group.wake(table.hooks());
  // Block ids are given out anew, the prefixes come back from the host, with what they held.
  require(hits(text(4, 10)) == 0, "a hit of something that never was");
  require(hits(text(2, 30)) == 28 && hits(text(1, 30)) == 28, "what was copied did not come back");
  require(table.num_restored(0) == 14 && table.num_restored(1) == 14, "another number of blocks came back");
  // Under pressure a restore finds no free block, takes none, and the request computes its prompt.
  for (int i = 0; i < 40; ++i) group.submit(text(i % 11, 40), 3);
  group.drain();
  require(table.num_refused > 0, "the pool never filled up");
}

// A pool that stays full: a block that comes back takes the place of another cached block.
void replace_cached(const Lab& lab) {
  TieredTable table;
  table.replaces = true;
  GroupOptions options;
  options.engine.num_ranks = 2;
  options.engine.num_blocks = 24;
  Group group(lab.engines, options, table.hooks());
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 12; ++i) group.submit(text(i, 40), 3);
    group.drain();
  }
  require(table.num_refused > 0, "the pool never filled up");
  require(table.num_replaced > 50, said("blocks that gave way:", table.num_replaced.load()));
  require(table.num_restored(0) == table.num_restored(1), "ranks brought back other blocks");
}

// Asks for every move that is refused, from every hook that is given a manager.
class Mover : public NaiveTable {
 public:
  int num_wrong = 0, num_probed = 0, num_moved = 0;

  int evict(const SageManager& manager, const BlockId* cached, int n, int count, BlockId* victims) override {
    refused(manager, cached[0]);
    return NaiveTable::evict(manager, cached, n, count, victims);
  }
  void evicted(const SageManager& manager, const BlockId* ids, const UniqueId* unique_ids, int n) override {
    refused(manager, ids[0]);
    NaiveTable::evicted(manager, ids, unique_ids, n);
  }
  void reset(const SageManager& manager) override {
    refused(manager, 0);
    NaiveTable::reset(manager);
  }
  int prefix_lookup(const SageManager& manager, const SageSequence& sequence, int max_blocks, BlockId* ids,
                    UniqueId* unique_ids) override {
    probe(manager);
    return NaiveTable::prefix_lookup(manager, sequence, max_blocks, ids, unique_ids);
  }

 private:
  Kv host_ = Kv(64);

  void expect(const SageManager& manager, SageMove move, int status) {
    const SageMove asked = move;
    const int moved = manager.api->migrate(manager.manager, &move, 1);
    num_moved += moved;
    if (move.status != status || moved != (status == SAGE_MOVED ? 1 : 0)) ++num_wrong;
    if (move.host != asked.host || move.kind != asked.kind) ++num_wrong;
  }
  void refused(const SageManager& manager, BlockId id) {
    SageMove moves[] = {{SAGE_OFFLOAD, id, 0, host_.data(), 0, 0},
                        {SAGE_RESTORE, -1, 0, host_.data(), 0, 0},
                        {SAGE_REPLACE, id, 0, host_.data(), 0, 0}};
    num_wrong += manager.api->migrate(manager.manager, moves, 3);
    for (const SageMove& move : moves) num_wrong += move.status == SAGE_MOVED;
  }
  void probe(const SageManager& manager) {
    ++num_probed;
    SageCounts counts{};
    counts.struct_size = sizeof counts;
    manager.api->counts(manager.manager, &counts);
    if (counts.free + counts.cached + counts.active != counts.total) ++num_wrong;
    const BlockId outside[] = {-1, counts.total, 1 << 30};
    SageBlockInfo infos[3];
    if (manager.api->block_info(manager.manager, outside, 3, infos) != 3) ++num_wrong;
    for (const SageBlockInfo& info : infos) num_wrong += info.state != SAGE_BLOCK_FREE || info.unique_id != 0;

    expect(manager, {SAGE_OFFLOAD, -1, 0, host_.data(), 0, 0}, SAGE_NO_SUCH_BLOCK);
    expect(manager, {SAGE_OFFLOAD, counts.total, 0, host_.data(), 0, 0}, SAGE_NO_SUCH_BLOCK);
    expect(manager, {SAGE_OFFLOAD, 0, 0, nullptr, 0, 0}, SAGE_BAD_MOVE);
    expect(manager, {SAGE_RESTORE, 0, 0, nullptr, 0, 0}, SAGE_BAD_MOVE);
    expect(manager, {77, 0, 0, host_.data(), 0, 0}, SAGE_BAD_MOVE);
    if (counts.free == 0) expect(manager, {SAGE_RESTORE, -1, 0, host_.data(), 0, 0}, SAGE_NO_FREE_BLOCK);
    for (BlockId id = 0; id < counts.total; ++id) {
      SageBlockInfo info{};
      manager.api->block_info(manager.manager, &id, 1, &info);
      const bool cached = info.state == SAGE_BLOCK_CACHED;
      expect(manager, {SAGE_OFFLOAD, id, info.unique_id, host_.data(), 0, 0}, cached ? SAGE_MOVED : SAGE_NO_SUCH_BLOCK);
      expect(manager, {SAGE_OFFLOAD, id, info.unique_id + 1, host_.data(), 0, 0}, SAGE_NO_SUCH_BLOCK);
      if (cached) expect(manager, {SAGE_OFFLOAD, id, 0, host_.data(), 0, 0}, SAGE_MOVED);
    }
  }
};

void refused_moves(const Lab& lab) {
  Mover table;
  GroupOptions options;
  options.engine.num_blocks = 20;
  Group group(lab.engines, options, table.hooks());
  for (int i = 0; i < 20; ++i) group.submit(text(i % 6, 20), 5);
  group.drain();
  group.sleep();
  require(table.num_probed > 20 && table.num_moved > 20, "too little was tried");
  require(table.num_wrong == 0, said("moves that ended otherwise than they should:", table.num_wrong));
}

}  // namespace

std::vector<Scenario> migration_scenarios() {
  return {{"offload-restore", offload_and_restore, RunsWith::kItsOwn},
          {"replace-cached", replace_cached, RunsWith::kItsOwn},
          {"refused-moves", refused_moves, RunsWith::kItsOwn}};
}

}  // namespace sage::host
