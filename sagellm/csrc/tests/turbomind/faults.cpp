// Every check of the host is seen to fail once: a fault is planted, and has to be found by the right words.

#include <functional>

#include "host_engine.h"
#include "scenarios.h"

namespace sage::host {

namespace {

Lab lab_of(EngineFault fault, std::uint64_t seed) {
  Lab lab;
  lab.engines = [fault](const EngineOptions& options) { return std::make_unique<HostEngine>(options, fault); };
  lab.seed = seed;
  return lab;
}

void must_find(const std::string& words, const std::string& fault, const std::function<void()>& run) {
  std::string found;
  try {
    run();
  } catch (const Violation& violation) {
    found = violation.what();
  }
  require(found.find(words) != std::string::npos,
          "the planted fault '" + fault + "' was to be found as '" + words + "', and was" +
              (found.empty() ? " not" : ": " + found));
}

struct PlantedInEngine {
  EngineFault fault;
  const char* name;
  const char* scenario;
  const char* words;
};

constexpr PlantedInEngine kPlanted[] = {
    {EngineFault::kPublishUncomputed, "publishes what is not computed", "uncomputed-blocks",
     "blocks were stored that are not computed"},
    {EngineFault::kSilentEviction, "keeps evictions to itself", "pressure", "its eviction was not told"},
    {EngineFault::kLateEviction, "tells evictions when the block is free", "pressure", "a block that is not cached was told"},
    {EngineFault::kWrongUniqueId, "tells evictions of another unique id", "pressure", "under another unique id"},
    {EngineFault::kShortUniqueId, "keeps 31 bits of unique ids", "large-unique-ids",
     "nothing was found under large unique ids"},
    {EngineFault::kTrustVictims, "frees whatever the table says", "nonsense", "failed"},
    {EngineFault::kTrustLookups, "takes whatever the table finds", "nonsense", "reads KV that was not computed for it"},
    {EngineFault::kSilentSleep, "does not tell reset", "sleep-wakeup", "without telling reset"},
    {EngineFault::kIgnoreHold, "does not hold", "hold", "takes part that is held"},
    {EngineFault::kSilentRelease, "does not tell who gave up what", "pressure", "gave up its blocks and that was not told"},
    {EngineFault::kIgnoreOrder, "runs the newest first", "preemption", "preempted before one that comes after it"},
    {EngineFault::kIgnoreBudget, "does not keep to the budget", "budget", "more new tokens than the budget"},
    {EngineFault::kLeakHold, "keeps a block for nobody", "shared-prefixes", "wrong use count of block"},
    {EngineFault::kFailCancel, "fails when a waiting sequence is cancelled", "cancellation", "without blocks was cancelled"},
    {EngineFault::kEmptyRestore, "brings back an empty block", "offload-restore", "reads KV that was not computed for it"},
    {EngineFault::kKeepPreempted, "does not look whose blocks they are by now", "lost-in-the-middle",
     "a block that is another one by now"},
    {EngineFault::kKeepPreempted, "does not look whose blocks they are by now", "preemption",
     "reads KV that was not computed for it"},
};

void pressure_with(TableFault fault) {
  NaiveTable table(fault);
  Lab lab = lab_of(EngineFault::kNone, 1);
  GroupOptions options;
  options.engine.num_blocks = 24;
  options.engine.num_ranks = 2;
  Group group(lab.engines, options, table.hooks());
  for (int generation = 0; generation < 2; ++generation) {
    for (int i = 0; i < 40; ++i) group.submit(text((i + generation) % 7, 20 + i % 5), 8);
    group.drain();
    if (generation == 0) group.sleep();
    if (generation == 0) group.wake(table.hooks());
  }
}

}  // namespace

void find_planted_faults(std::uint64_t seed) {
  for (const PlantedInEngine& planted : kPlanted) {
    for (const Scenario& scenario : all_scenarios()) {
      if (scenario.name != std::string(planted.scenario)) continue;
      must_find(planted.words, std::string("the engine ") + planted.name,
                [&] { scenario.run(lab_of(planted.fault, seed)); });
    }
  }
  const std::pair<TableFault, const char*> tables[] = {
      {TableFault::kForgetReset, "the table found a block"},
      {TableFault::kForgetEvicted, "the table found a block that has gone"},
      {TableFault::kWrongUniqueIds, "the table found a block that has gone"},
      {TableFault::kForeignBlocks, "the table found a block that holds something else"},
      {TableFault::kUncachedVictims, "the table chose a victim that is not cached"},
      {TableFault::kRepeatedVictims, "the table chose a victim twice"},
      {TableFault::kManyVictims, "another number of victims"},
      {TableFault::kRandomVictims, "diverge"},
  };
  for (const auto& [fault, words] : tables) {
    const TableFault planted = fault;
    must_find(words, "the table, number" + std::to_string(static_cast<int>(fault)), [planted] { pressure_with(planted); });
  }
}

}  // namespace sage::host
