// The table that TurboMind calls: the native prefix index and native policies behind `sage_hooks.h`, and an advisor for
// what a plug-in decides.
//
// One set of replicas (engine, group, generation) shares one index. Its ranks make the same calls in the same order, so the
// first to make a call has it decided and the others replay the answer; ranks cannot diverge, whatever decides.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "sage_hooks.h"
#include "sagellm/advisor.h"

namespace sage {

struct HookTableOptions {
  bool prefix = true;     // the native index replaces the engine's own
  bool victims = true;    // choose victims: the advisor's, else blocks that no prefix needs, else the least recently used
  bool schedule = false;  // ask the advisor; with none, leave these hooks null
  bool admit = false;
  bool step_end = false;
  bool comm = false;
  bool time_comm = false;  // and wait for the duration of each collective
};

// Sums over all engines and groups since the table was made.
struct HookTableStats {
  std::uint64_t lookups = 0, hits = 0, query_tokens = 0, hit_tokens = 0;  // a sequence that waits and misses counts once
  std::uint64_t stored_blocks = 0, evicted_blocks = 0;  // a second copy of what is cached is not stored
  std::uint64_t decisions = 0, replays = 0;
  std::uint64_t divergences = 0;  // a rank asked for something else than the first did: must stay 0
  std::uint64_t refused = 0;       // calls that were answered with nothing because they made no sense
  std::uint64_t replicas = 0;      // sets of replicas alive
  std::uint64_t cached_blocks = 0;  // in the index
};

class HookTable {
 public:
  // Never freed: engines keep calling it. Nothing but its options and the index takes memory.
  static HookTable& make(const HookTableOptions& options, std::shared_ptr<Advisor> advisor = nullptr);
  HookTable(const HookTable&) = delete;
  HookTable& operator=(const HookTable&) = delete;

  // For turbomind::sage::install() or a capsule named SAGE_HOOKS_CAPSULE.
  const SageHooks* hooks() const noexcept;
  HookTableStats stats() const;

  struct Impl;

 private:
  HookTable(const HookTableOptions& options, std::shared_ptr<Advisor> advisor);
  std::unique_ptr<Impl> impl_;
};

}  // namespace sage
