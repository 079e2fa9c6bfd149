// Generations: sleep and wakeup, tables that come and go; collectives.

#include <atomic>
#include <map>
#include <mutex>
#include <set>

#include "installed.h"
#include "scenarios.h"

namespace sage::host {

namespace {

void sleep_and_wakeup(const Lab& lab) {
  const Table table = lab.make_table();
  GroupOptions options;
  options.engine.num_blocks = 24;
  Group group(lab.engines, options, table.hooks);
  const auto hits = [&group](const Tokens& prompt) {
    const SeqId seq_id = group.submit(prompt, 3);
    group.drain();
    return group.request(seq_id).hit_tokens;
  };
  for (int generation = 0; generation < 3; ++generation) {
    // The same ids and unique ids as in the generation before, for other prompts.
    require(hits(text(10 + generation, 21)) == 0, "a block of the generation before was found");
    for (int other = 0; other < 3; ++other) {
      const bool seen = other == generation;
      require(hits(text(10 + other, 21)) == (seen ? 20 : 0), "a block of the generation before was found");
    }
    const SeqId running = group.submit(text(20, 60), 20);
    group.step();
    group.step();
    group.sleep();
    require(group.request(running).state == RequestState::kLost, "a request ran on in its sleep");
    group.wake(table.hooks);
  }
  group.sleep();  // with nothing in it
}

void tables_come_and_go(const Lab& lab) {
  Installed installed;
  const Table first = lab.make_table(), second = lab.make_table();
  require(installed.install(first.hooks).empty(), "a table was refused");
  Group group(lab.engines, {}, installed.table());
  const auto run = [&group] {
    for (int i = 0; i < 12; ++i) group.submit(text(i, 17), 4);
    group.step();
    group.step();
  };
  run();
  installed.install(nullptr);  // the engine that runs keeps its table
  group.drain();
  require(!lab.has_table() || group.tally().stores > 0, "the table was not told");
  for (const SageHooks* table : {static_cast<const SageHooks*>(nullptr), second.hooks, first.hooks}) {
    group.sleep();
    require(installed.install(table).empty(), "a table was refused");
    group.wake(installed.table());
    run();
    group.drain();
    require((group.tally().stores > 0) == (table != nullptr), "another table was told than the one installed");
  }
}

void versions(const Lab& lab) {
  NaiveTable naive;
  Installed installed;
  SageHooks other = *naive.hooks();
  other.abi = SAGE_HOOKS_ABI + 1;
  require(!installed.install(&other).empty() && installed.table() == nullptr, "a table of another ABI was taken");
  other = *naive.hooks();
  other.struct_size = 16;
  require(!installed.install(&other).empty(), "a table was taken that is too short to be one");
  // An older and shorter one: what it lacks is null. A longer one: what is too new is not looked at.
  other = *naive.hooks();
  other.struct_size = offsetof(SageHooks, prefix_lookup);
  other.flags = 0;
  require(installed.install(&other).empty(), "an older table was refused");
  require(installed.table()->evict != nullptr && installed.table()->prefix_lookup == nullptr, "an older table was misread");
  struct {
    SageHooks known;
    void* unknown[4];
  } newer{*naive.hooks(), {}};
  newer.known.struct_size = sizeof newer;
  Group group(lab.engines, {}, installed.table());
  for (int i = 0; i < 20; ++i) group.submit(text(i % 9, 30), 4);
  group.drain();
  require(group.tally().evictions > 0, "the older table was not asked");
  require(installed.install(&newer.known).empty() && installed.table()->struct_size == sizeof(SageHooks), "a newer table");
  group.sleep();
  group.wake(installed.table());
  group.submit(text(1, 30), 4);
  group.drain();
}

// Hands out a token for each collective, and sees that it comes back with the same collective.
class CommTable : public NaiveTable {
 public:
  explicit CommTable(bool timed) : NaiveTable(TableFault::kNone, kComm, timed ? SAGE_TIME_COMM : 0) {}
  void* comm_begin(const SageComm& comm) override {
    const std::lock_guard guard(mutex_);
    const std::uintptr_t token = ++next_;
    begun_[token] = {comm.op, comm.rank, comm.bytes, comm.n_ranks};
    return reinterpret_cast<void*>(token);
  }
  void comm_end(const SageComm& comm, void* token, float milliseconds) override {
    const std::lock_guard guard(mutex_);
    const auto found = begun_.find(reinterpret_cast<std::uintptr_t>(token));
    if (found == begun_.end() || found->second != Known{comm.op, comm.rank, comm.bytes, comm.n_ranks}) ++num_wrong_;
    if (found != begun_.end()) begun_.erase(found);
    total_ms_ += milliseconds;
  }
  bool all_ended() {
    const std::lock_guard guard(mutex_);
    return begun_.empty() && num_wrong_ == 0;
  }
  float total_ms() const { return total_ms_; }

 private:
  using Known = std::tuple<std::int32_t, std::int32_t, std::uint64_t, std::int32_t>;
  std::mutex mutex_;
  std::uintptr_t next_ = 0;
  std::map<std::uintptr_t, Known> begun_;
  int num_wrong_ = 0;
  float total_ms_ = 0;
};

void collectives(const Lab& lab) {
  for (const bool timed : {false, true}) {
    CommTable comm(timed);
    const Table table = lab.make_table();
    GroupOptions options;
    options.engine.num_ranks = 4;
    options.num_collectives = 5;
    Group group(lab.engines, options, table.hooks != nullptr ? table.hooks : comm.hooks(), comm.hooks());
    for (int i = 0; i < 6; ++i) group.submit(text(i, 10), 5);
    group.drain();
    const int expected = group.num_steps() * options.num_collectives;
    group.sleep();
    for (int rank = 0; rank < 4; ++rank) {
      const Tally& tally = group.tally(rank);
      require(tally.comm_begins == expected && (timed ? tally.comm_durations : tally.comm_ends) == expected,
              "not every collective was told, or more");
    }
    require(comm.all_ended() && (comm.total_ms() > 0) == timed, "a collective ended otherwise than it began");
  }
}

}  // namespace

std::vector<Scenario> lifecycle_scenarios() {
  return {{"sleep-wakeup", sleep_and_wakeup},
          {"table-exchange", tables_come_and_go},
          {"table-versions", versions, RunsWith::kItsOwn},
          {"collectives", collectives}};
}

}  // namespace sage::host
