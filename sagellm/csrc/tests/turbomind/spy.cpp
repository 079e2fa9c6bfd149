#include "spy.h"

#include <algorithm>
#include <string>

#include "installed.h"
#include "kv.h"

namespace sage::host {

Spy::Spy(const SageHooks* table, const SageHooks* steering, const EngineOptions& options, bool strict, Findings& findings)
    : table_(read_table(table)),
      steering_(read_table(steering != nullptr ? steering : table)),
      options_(options),
      strict_(strict),
      findings_(findings),
      ranks_(static_cast<std::size_t>(options.num_ranks)) {
  fill_hooks();
}

// A hook of the table that is a method of the spy.
template <typename Return, typename... Arguments, Return (Spy::*method)(Arguments...)>
struct Spy::Call<method> {
  static Return call(void* spy, Arguments... arguments) { return (static_cast<Spy*>(spy)->*method)(arguments...); }
};

void Spy::fill_hooks() {
  hooks_.abi = SAGE_HOOKS_ABI;
  hooks_.struct_size = sizeof hooks_;
  hooks_.flags = (table_.flags & SAGE_REPLACE_TRIE) | (steering_.flags & SAGE_TIME_COMM);
  hooks_.ctx = this;
  // Notices are looked at in any case; a decision that the table leaves to the engine stays the engine's.
  hooks_.evicted = &Call<&Spy::evicted>::call;
  hooks_.released = &Call<&Spy::released>::call;
  hooks_.reset = &Call<&Spy::reset>::call;
  hooks_.prefix_store = &Call<&Spy::prefix_store>::call;
  if (table_.evict != nullptr) hooks_.evict = &Call<&Spy::evict>::call;
  if (table_.prefix_lookup != nullptr) hooks_.prefix_lookup = &Call<&Spy::prefix_lookup>::call;
  if (steering_.schedule != nullptr) hooks_.schedule = &Call<&Spy::schedule>::call;
  if (steering_.admit != nullptr) hooks_.admit = &Call<&Spy::admit>::call;
  if (steering_.step_end != nullptr) {
    hooks_.step_end = [](void* ctx, const SageStepResult* result) {
      const SageHooks& to = static_cast<Spy*>(ctx)->steering_;
      to.step_end(to.ctx, result);
    };
  }
  if (steering_.comm_begin != nullptr) {
    hooks_.comm_begin = [](void* ctx, const SageComm* comm) {
      Spy& self = *static_cast<Spy*>(ctx);
      ++self.at(comm->rank).tally.comm_begins;
      return self.steering_.comm_begin(self.steering_.ctx, comm);
    };
  }
  if (steering_.comm_end != nullptr) {
    hooks_.comm_end = [](void* ctx, const SageComm* comm, void* token, float milliseconds) {
      Spy& self = *static_cast<Spy*>(ctx);
      Tally& tally = self.at(comm->rank).tally;
      ++(milliseconds < 0 ? tally.comm_ends : tally.comm_durations);
      self.steering_.comm_end(self.steering_.ctx, comm, token, milliseconds);
    };
  }
}

void Spy::attach(int rank, Engine* engine) { at(rank).engine = engine; }

void Spy::expect(bool fine, const SageManager* manager, const char* what) {
  if (!fine) findings_.add(said("rank", manager->rank) + said(", round", manager->epoch) + ": " + what);
}

Spy::Rank& Spy::enter(const SageManager* manager, bool own_thread) {
  Rank& rank = at(manager->rank);
  if (own_thread) {
    if (rank.thread == std::thread::id()) rank.thread = std::this_thread::get_id();
    expect(rank.thread == std::this_thread::get_id(), manager, "a hook was called on another thread than before");
  }
  expect(!rank.reset, manager, "a hook was called after reset");
  expect(manager->generation == options_.generation, manager, "a hook was called for another generation");
  expect(manager->engine == options_.engine && manager->group == options_.group && manager->n_ranks == options_.num_ranks &&
             manager->block_len == options_.block_len,
         manager, "the manager is not described as it is");
  expect(manager->epoch >= rank.epoch, manager, "the epoch went back");
  rank.epoch = manager->epoch;
  return rank;
}

std::int32_t Spy::evict(const SageManager* manager, const std::int32_t* cached, std::int32_t n, std::int32_t count,
                        std::int32_t* victims) {
  Rank& rank = enter(manager);
  ++rank.tally.evictions;
  std::vector<SageBlockInfo> infos(static_cast<std::size_t>(n));
  manager->api->block_info(manager->manager, cached, n, infos.data());
  const auto is_cached = [](const SageBlockInfo& info) { return info.state == SAGE_BLOCK_CACHED; };
  expect(std::all_of(infos.begin(), infos.end(), is_cached), manager, "evict was offered a block that is not cached");
  expect(std::is_sorted(cached, cached + n) && std::adjacent_find(cached, cached + n) == cached + n, manager,
         "evict was offered blocks that do not ascend");
  expect(count > 0 && count <= n, manager, "evict was asked for more blocks than there are, or for none");
  const std::int32_t chosen = table_.evict(table_.ctx, manager, cached, n, count, victims);
  if (!strict_) return chosen;
  expect(chosen >= 0 && chosen <= count, manager, "the table chose another number of victims than was asked for");
  std::set<std::int32_t> seen;
  for (std::int32_t i = 0; i < std::min(chosen, count); ++i) {
    expect(std::binary_search(cached, cached + n, victims[i]), manager, "the table chose a victim that is not cached");
    expect(seen.insert(victims[i]).second, manager, "the table chose a victim twice");
  }
  return chosen;
}

void Spy::evicted(const SageManager* manager, const std::int32_t* ids, const std::uint64_t* unique_ids, std::int32_t n) {
  Rank& rank = enter(manager);
  std::vector<SageBlockInfo> infos(static_cast<std::size_t>(n));
  manager->api->block_info(manager->manager, ids, n, infos.data());
  for (std::int32_t i = 0; i < n; ++i) {
    const SageBlockInfo& info = infos[static_cast<std::size_t>(i)];
    expect(info.state == SAGE_BLOCK_CACHED, manager, "a block that is not cached was told to be evicted");
    expect(info.unique_id == unique_ids[i], manager, "a block was told to be evicted under another unique id");
    expect(rank.evicted.emplace(ids[i], unique_ids[i]).second, manager, "an eviction was told twice");
  }
  rank.tally.evicted_blocks += n;
  if (table_.evicted != nullptr) table_.evicted(table_.ctx, manager, ids, unique_ids, n);
}

void Spy::released(const SageManager* manager, SeqId seq_id, const std::int32_t* ids, const std::uint64_t* unique_ids,
                   std::int32_t n) {
  Rank& rank = enter(manager);
  if (n > 0) ++rank.tally.releases;
  const SequenceView view = rank.engine->sequence(seq_id);
  expect(n == static_cast<std::int32_t>(view.blocks.size()) && std::equal(ids, ids + n, view.blocks.begin()) &&
             std::equal(unique_ids, unique_ids + n, view.unique_ids.begin()),
         manager, "a sequence was told to give up other blocks than it has");
  if (table_.released != nullptr) table_.released(table_.ctx, manager, seq_id, ids, unique_ids, n);
}

void Spy::reset(const SageManager* manager) {
  Rank& rank = enter(manager, false);
  rank.reset = true;
  ++rank.tally.resets;
  if (table_.reset != nullptr) table_.reset(table_.ctx, manager);
}

class Spy::Watched {
 public:
  Watched(const SageManager& manager, Rank& rank) : manager_(manager), rank_(rank), seen_(manager) {
    seen_.manager = this;
    seen_.api = &api();
  }
  const SageManager* get() const { return &seen_; }

 private:
  static const SageKvApi& api() {
    static const SageKvApi api{
        SAGE_HOOKS_ABI, sizeof(SageKvApi),
        [](void* self, const std::int32_t* ids, std::int32_t n, SageBlockInfo* out) {
          const SageManager& manager = static_cast<Watched*>(self)->manager_;
          return manager.api->block_info(manager.manager, ids, n, out);
        },
        [](void* self, SageCounts* out) {
          const SageManager& manager = static_cast<Watched*>(self)->manager_;
          manager.api->counts(manager.manager, out);
        },
        [](void* self, SageMove* moves, std::int32_t n) { return static_cast<Watched*>(self)->migrate(moves, n); }};
    return api;
  }
  std::int32_t migrate(SageMove* moves, std::int32_t n) {
    std::int32_t moved = 0;
    for (std::int32_t i = 0; i < n; ++i) {
      SageBlockInfo before{};
      manager_.api->block_info(manager_.manager, &moves[i].block_id, 1, &before);
      moved += manager_.api->migrate(manager_.manager, &moves[i], 1);
      const bool replaced = moves[i].kind == SAGE_REPLACE && moves[i].status == SAGE_MOVED;
      if (replaced) rank_.evicted.emplace(before.id, before.unique_id);
    }
    return moved;
  }

  const SageManager& manager_;
  Rank& rank_;
  SageManager seen_;
};

std::int32_t Spy::prefix_lookup(const SageManager* manager, const SageSequence* sequence, std::int32_t max_blocks,
                                std::int32_t* ids, std::uint64_t* unique_ids) {
  Rank& rank = enter(manager);
  ++rank.tally.lookups;
  expect(sequence->prompt != nullptr && sequence->n_prompt > 0, manager, "a lookup without a prompt");
  expect(sequence->cache_len == 0, manager, "a lookup for a sequence that has computed tokens");
  expect(max_blocks >= 0 && max_blocks * options_.block_len < std::max(1, sequence->n_prompt), manager,
         "a lookup that would leave nothing of the prompt to compute");
  const std::int32_t found = table_.prefix_lookup(table_.ctx, Watched(*manager, rank).get(), sequence, max_blocks, ids,
                                                  unique_ids);
  rank.tally.hit_blocks += std::max(0, found);
  if (!strict_ || found <= 0) return found;
  if (found > max_blocks) {
    expect(false, manager, "the table found more blocks than were asked for");
    return found;
  }
  std::vector<SageBlockInfo> infos(static_cast<std::size_t>(found));
  manager->api->block_info(manager->manager, ids, found, infos.data());
  for (std::int32_t i = 0; i < found; ++i) {
    const SageBlockInfo& info = infos[static_cast<std::size_t>(i)];
    if (info.state == SAGE_BLOCK_FREE || info.unique_id != unique_ids[i]) {
      expect(false, manager, "the table found a block that has gone");
      return found;
    }
  }
  const int n = found * options_.block_len;
  const Kv kv = compute_kv(sequence->prompt, static_cast<std::size_t>(n), manager->rank);
  expect(holds(*rank.engine, ids, options_.block_len, kv, n), manager, "the table found a block that holds something else");
  return found;
}

void Spy::prefix_store(const SageManager* manager, SeqId seq_id, std::int32_t kind, const std::int32_t* tokens,
                       const std::int32_t* ids, const std::uint64_t* unique_ids, std::int32_t n_blocks) {
  Rank& rank = enter(manager);
  ++rank.tally.stores;
  rank.tally.stored_blocks += n_blocks;
  const SequenceView view = rank.engine->sequence(seq_id);
  expect(kind == SAGE_STORE_PROMPT || kind == SAGE_STORE_GENERATION, manager, "a store of an unknown kind");
  expect(view.status != SAGE_SEQUENCE_CACHED, manager, "a sequence stores blocks that it does not hold");
  expect(n_blocks <= view.cache_len / options_.block_len, manager, "blocks were stored that are not computed");
  const bool own = n_blocks >= 0 && n_blocks <= static_cast<std::int32_t>(view.blocks.size()) &&
                   std::equal(ids, ids + n_blocks, view.blocks.begin()) &&
                   std::equal(unique_ids, unique_ids + n_blocks, view.unique_ids.begin());
  expect(own, manager, "a sequence stores other blocks than it has");
  if (own) {
    const int n = n_blocks * options_.block_len;
    const Kv kv = compute_kv(tokens, static_cast<std::size_t>(n), manager->rank);
    expect(holds(*rank.engine, ids, options_.block_len, kv, n), manager, "blocks were stored that hold something else");
  }
  if (table_.prefix_store != nullptr) {
    table_.prefix_store(table_.ctx, Watched(*manager, rank).get(), seq_id, kind, tokens, ids, unique_ids, n_blocks);
  }
}

std::int32_t Spy::schedule(const SageStep* step, const SageSequence* sequences, std::int32_t n, std::uint64_t* priorities,
                           std::int32_t* budget) {
  const std::int32_t answer = steering_.schedule(steering_.ctx, step, sequences, n, priorities, budget);
  if (!strict_ || answer != 0) return answer;
  std::set<std::uint64_t> seen;
  for (std::int32_t i = 0; i < n; ++i) {
    if (priorities[i] != SAGE_PRIORITY_HOLD && !seen.insert(priorities[i]).second) findings_.add("a priority was given twice");
  }
  if (*budget < 1 || *budget > step->max_budget) findings_.add("a budget that cannot be used was given");
  return answer;
}

std::int32_t Spy::admit(std::uint64_t engine, std::int32_t group, const SageRequest* requests, std::int32_t n,
                        std::int32_t max_admitted, std::int32_t* admitted) {
  const std::int32_t answer = steering_.admit(steering_.ctx, engine, group, requests, n, max_admitted, admitted);
  if (!strict_ || answer < 0) return answer;
  std::set<std::int32_t> seen;
  for (std::int32_t i = 0; i < std::min(answer, max_admitted); ++i) {
    const bool there = admitted[i] >= 0 && admitted[i] < n && seen.insert(admitted[i]).second;
    if (!there) findings_.add("a request was admitted that is not there, or twice");
  }
  if (answer > max_admitted) findings_.add("more requests were admitted than fit");
  return answer;
}

void Spy::check_step(int number, const std::vector<SageBlockInfo>& blocks) {
  Rank& rank = at(number);
  rank.unique_ids.resize(blocks.size());
  UniqueId largest = rank.largest;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const UniqueId before = rank.unique_ids[i], now = blocks[i].unique_id;
    if (before == now) continue;
    if (before != 0 && rank.evicted.count({blocks[i].id, before}) == 0) {
      findings_.add(said("rank", number) + said(": block", blocks[i].id) + " changed hands and its eviction was not told");
    }
    if (now != 0 && now <= rank.largest) findings_.add(said("a unique id was given out again:", now));
    largest = std::max(largest, now);
    rank.unique_ids[i] = now;
  }
  for (const auto& [id, unique_id] : rank.evicted) {
    if (blocks[static_cast<std::size_t>(id)].unique_id == unique_id) {
      findings_.add(said("block", id) + " was told to be evicted and is still there");
    }
  }
  rank.largest = largest;
  rank.evicted.clear();
}

}  // namespace sage::host
