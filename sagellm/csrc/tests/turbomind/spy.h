// A table between an engine and the table under test, that hands every call on and checks both: that the engine calls as
// sage_hooks.h says, and that the answers make sense.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "engine.h"
#include "findings.h"
#include "sage_hooks.h"

namespace sage::host {

// Calls of one rank in one generation.
struct Tally {
  int lookups = 0, hit_blocks = 0, stores = 0, stored_blocks = 0;
  int evictions = 0, evicted_blocks = 0, releases = 0, resets = 0;
  int comm_begins = 0, comm_ends = 0, comm_durations = 0;
};

class Spy {
 public:
  // `steering` answers schedule, admit, step_end and the collectives; without it `table` does. `strict`: nonsense from the
  // table is a finding; otherwise only what the engine makes of it is looked at.
  Spy(const SageHooks* table, const SageHooks* steering, const EngineOptions& options, bool strict, Findings& findings);
  Spy(const Spy&) = delete;
  Spy& operator=(const Spy&) = delete;

  const SageHooks* hooks() const { return &hooks_; }
  // The rank's engine, or null once it is gone. While the rank is idle, as all that follows.
  void attach(int rank, Engine* engine);
  const Tally& tally(int rank) const { return at(rank).tally; }
  std::uint64_t epoch(int rank) const { return at(rank).epoch; }
  // After a step: blocks that are another one now were told to be evicted, or gave way as the table asked.
  void check_step(int rank, const std::vector<SageBlockInfo>& blocks);

 private:
  struct Rank {
    Engine* engine = nullptr;
    std::thread::id thread;
    std::uint64_t epoch = 0;
    bool reset = false;
    std::vector<UniqueId> unique_ids;  // as of the last step
    UniqueId largest = 0;
    std::set<std::pair<BlockId, UniqueId>> evicted;  // in this step
    Tally tally;
  };
  // The manager as the table gets it where it may move blocks: what gave way to another block is noted.
  class Watched;
  template <auto method>
  struct Call;
  Rank& at(int rank) { return ranks_.at(static_cast<std::size_t>(rank)); }
  const Rank& at(int rank) const { return ranks_.at(static_cast<std::size_t>(rank)); }
  Rank& enter(const SageManager* manager, bool own_thread = true);
  void expect(bool fine, const SageManager* manager, const char* what);

  std::int32_t evict(const SageManager* manager, const std::int32_t* cached, std::int32_t n, std::int32_t count,
                     std::int32_t* victims);
  void evicted(const SageManager* manager, const std::int32_t* ids, const std::uint64_t* unique_ids, std::int32_t n);
  void released(const SageManager* manager, SeqId seq_id, const std::int32_t* ids, const std::uint64_t* unique_ids,
                std::int32_t n);
  void reset(const SageManager* manager);
  std::int32_t prefix_lookup(const SageManager* manager, const SageSequence* sequence, std::int32_t max_blocks,
                             std::int32_t* ids, std::uint64_t* unique_ids);
  void prefix_store(const SageManager* manager, SeqId seq_id, std::int32_t kind, const std::int32_t* tokens,
                    const std::int32_t* ids, const std::uint64_t* unique_ids, std::int32_t n_blocks);
  std::int32_t schedule(const SageStep* step, const SageSequence* sequences, std::int32_t n, std::uint64_t* priorities,
                        std::int32_t* budget);
  std::int32_t admit(std::uint64_t engine, std::int32_t group, const SageRequest* requests, std::int32_t n,
                     std::int32_t max_admitted, std::int32_t* admitted);
  void fill_hooks();

  SageHooks table_, steering_, hooks_{};
  EngineOptions options_;
  bool strict_;
  Findings& findings_;
  std::vector<Rank> ranks_;
};

}  // namespace sage::host
