// An engine in host memory that asks and tells a table what sage_hooks.h says, when it says so.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "engine.h"
#include "host_blocks.h"
#include "prefix_map.h"

namespace sage::host {

// Faults planted to see that the host's checks find them.
enum class EngineFault {
  kNone,
  kPublishUncomputed,  // stores every block that is allocated
  kSilentEviction,     // does not tell `evicted`
  kLateEviction,       // tells it when the block is free already
  kWrongUniqueId,      // tells `evicted` the next unique id
  kShortUniqueId,      // keeps 31 bits of unique ids where it compares
  kTrustVictims,       // frees whatever `evict` answers
  kTrustLookups,       // takes whatever `prefix_lookup` answers
  kSilentRelease,      // does not tell `released`
  kSilentSleep,        // does not tell `reset`
  kIgnoreHold,
  kIgnoreBudget,
  kIgnoreOrder,   // the newest sequence first
  kLeakHold,      // keeps one block of a sequence that ends
  kFailCancel,    // throws when a sequence without blocks is cancelled
  kEmptyRestore,  // a restored block is not filled
  kKeepPreempted  // takes a preempted sequence back without looking whether its blocks are still its own
};

class HostEngine final : public Engine {
 public:
  explicit HostEngine(const EngineOptions& options, EngineFault fault = EngineFault::kNone);
  ~HostEngine() override;
  HostEngine(const HostEngine&) = delete;
  HostEngine& operator=(const HostEngine&) = delete;

  void create(SeqId seq_id, const Tokens& prompt) override;
  bool erase(SeqId seq_id) override;
  Outcome materialize(const std::vector<Candidate>& candidates, int budget) override;
  void advance(SeqId seq_id) override;
  void cache_prompt(const std::vector<SeqId>& active) override;
  void cache_generation(SeqId seq_id, const Tokens& tokens) override;
  SequenceView sequence(SeqId seq_id) const override;
  std::vector<SageBlockInfo> blocks() const override;
  void* memory(BlockId id) override { return blocks_.memory(id); }

 private:
  struct Sequence {
    SeqId seq_id;
    Tokens prompt;  // empty once it is computed
    SequenceView view;
  };
  struct Plan;

  Sequence& at(SeqId seq_id) { return sequences_.at(seq_id); }
  bool still_is(BlockId id, UniqueId unique_id) const;
  void give_up(Sequence& sequence);
  void commit();
  void take_back(Sequence& sequence);
  void look_up(Sequence& sequence);
  Plan plan(const std::vector<Candidate>& order, int budget);
  int preempt_for(Plan& plan, std::size_t first, int missing);
  void evict(int count);
  void set_free(const std::vector<BlockId>& ids);
  void publish(Sequence& sequence, SageStoreKind kind, const Tokens& tokens);
  int migrate(SageMove* moves, int n);
  void move(SageMove& move);

  static std::int32_t api_block_info(void* manager, const std::int32_t* ids, std::int32_t n, SageBlockInfo* out);
  static void api_counts(void* manager, SageCounts* out);
  static std::int32_t api_migrate(void* manager, SageMove* moves, std::int32_t n);

  const EngineOptions options_;
  const EngineFault fault_;
  const SageKvApi api_;
  SageHooks hooks_{};
  SageManager manager_{};
  HostBlocks blocks_;
  PrefixMap own_;  // the engine's own prefix cache, empty where a table replaces it
  std::map<SeqId, Sequence> sequences_;
  std::vector<BlockId> released_, freed_;  // since the last round; given up at the next
  bool may_move_ = true;                   // not while the numbers of free and cached blocks are being relied on
};

}  // namespace sage::host
