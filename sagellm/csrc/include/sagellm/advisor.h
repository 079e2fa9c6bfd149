// An advisor decides beside the native index: a Python plug-in through a `PluginPort`, or a policy in C++.
#pragma once

#include <cstdint>
#include <vector>

#include "sage_hooks.h"

namespace sage {

// Called on the engine's threads, several at once, without the GIL. None of it may throw or block for long. Notices cost the
// engine their call, so the default of each does nothing. A decision that returns false leaves it to the default.
class Advisor {
 public:
  virtual ~Advisor() = default;

  // ---- decisions. The ranks of a group are answered once: what is decided for the first is replayed to the others.
  virtual bool select_victims(const SageManager&, const std::int32_t* /*cached*/, std::int32_t /*n*/, std::int32_t /*count*/,
                              std::vector<std::int32_t>& /*victims*/) noexcept {
    return false;
  }
  virtual bool schedule(const SageStep&, const SageSequence*, std::int32_t /*n*/, std::uint64_t* /*priorities*/,
                        std::int32_t* /*budget*/) noexcept {
    return false;
  }
  virtual bool admit(std::uint64_t /*engine*/, std::int32_t /*group*/, const SageRequest*, std::int32_t /*n*/,
                     std::int32_t /*max_admitted*/, std::vector<std::int32_t>& /*admitted*/) noexcept {
    return false;
  }

  // ---- notices, each told once a group
  virtual void evicted(const SageManager&, const std::int32_t* /*ids*/, std::int32_t /*n*/) noexcept {}
  // Still cached, but a block before them was evicted, so nothing finds them any more.
  virtual void lost(const SageManager&, const std::int32_t* /*ids*/, std::size_t /*n*/) noexcept {}
  // The blocks of the sequence are those that were found.
  virtual void matched(const SageManager&, const SageSequence&, std::int32_t /*num_blocks*/) noexcept {}
  // `ids`: the blocks that the index has for the tokens; the first of them may be another sequence's.
  virtual void stored(const SageManager&, std::uint64_t /*seq_id*/, std::int32_t /*kind*/, const std::int32_t* /*tokens*/,
                      const std::int32_t* /*ids*/, std::int32_t /*num_blocks*/) noexcept {}
  // The last rank of the group has told its end: nothing of this generation is valid any more.
  virtual void reset(const SageManager&) noexcept {}
  virtual void step_end(const SageStepResult&) noexcept {}
  // ---- told by every rank
  virtual void collective(const SageComm&, float /*milliseconds*/) noexcept {}
};

}  // namespace sage
