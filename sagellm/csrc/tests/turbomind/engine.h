// One rank's manager of sequences and KV blocks, as the batch loop of TurboMind sees it, for one generation: from start or
// wakeup to sleep or shutdown. The scenarios know nothing else of an engine, so another one with this interface, the
// real one for instance, runs the same list.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "sage_hooks.h"

namespace sage::host {

using Token = std::int32_t;
using BlockId = std::int32_t;
using UniqueId = std::uint64_t;
using SeqId = std::uint64_t;
using Tokens = std::vector<Token>;

struct EngineOptions {
  std::uint64_t engine = 1;
  std::int32_t group = 0, rank = 0, num_ranks = 1;
  std::uint64_t generation = 1;
  int block_len = 4, num_blocks = 64;
  bool prefix_caching = true;
  UniqueId first_unique_id = 1;
  const SageHooks* hooks = nullptr;  // null: none installed
};

struct Candidate {
  SeqId seq_id;
  int context_len;
  std::uint64_t priority;  // smaller goes first; SAGE_PRIORITY_HOLD: takes no part
};

struct Outcome {
  int allocated = 0, swapped_in = 0, swapped_out = 0;
};

struct SequenceView {
  SageSequenceStatus status;
  int cache_len, input_len;  // tokens computed; tokens that the current step computes
  std::vector<BlockId> blocks;
  std::vector<UniqueId> unique_ids;
};

class Engine {
 public:
  virtual ~Engine() = default;  // sleep: tells `reset`, with or without sequences

  virtual void create(SeqId seq_id, const Tokens& prompt) = 0;
  virtual bool erase(SeqId seq_id) = 0;
  // Decides who is active in this step, and gives the active ones blocks for their context and one more token. At most
  // `budget` new tokens.
  virtual Outcome materialize(const std::vector<Candidate>& candidates, int budget) = 0;
  // The step computed `input_len` tokens of this sequence.
  virtual void advance(SeqId seq_id) = 0;
  virtual void cache_prompt(const std::vector<SeqId>& active) = 0;
  // `tokens`: all, the last one not computed. Also called for sequences that wait or were preempted, when they are cancelled.
  virtual void cache_generation(SeqId seq_id, const Tokens& tokens) = 0;

  virtual SequenceView sequence(SeqId seq_id) const = 0;
  virtual std::vector<SageBlockInfo> blocks() const = 0;  // of all, by id
  // At least block_len * 8 bytes, on the host.
  virtual void* memory(BlockId id) = 0;
};

using EngineFactory = std::function<std::unique_ptr<Engine>(const EngineOptions&)>;

}  // namespace sage::host
