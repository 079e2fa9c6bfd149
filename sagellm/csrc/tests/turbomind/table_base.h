// A table as a C++ class: what a derived class overrides answers the hook.
#pragma once

#include <cstdint>

#include "engine.h"

namespace sage::host {

class TableBase {
 public:
  // Which hooks are there; the others are null.
  enum Part : unsigned { kEvict = 1, kPrefix = 2, kSchedule = 4, kAdmit = 8, kStepEnd = 16, kComm = 32 };

  explicit TableBase(unsigned parts, unsigned flags = 0);
  virtual ~TableBase() = default;
  TableBase(const TableBase&) = delete;
  TableBase& operator=(const TableBase&) = delete;
  const SageHooks* hooks() const { return &hooks_; }

  virtual int evict(const SageManager&, const BlockId* /*cached*/, int /*n*/, int /*count*/, BlockId* /*victims*/) { return 0; }
  virtual void evicted(const SageManager&, const BlockId*, const UniqueId*, int /*n*/) {}
  virtual void released(const SageManager&, SeqId, const BlockId*, const UniqueId*, int /*n*/) {}
  virtual void reset(const SageManager&) {}
  virtual int prefix_lookup(const SageManager&, const SageSequence&, int /*max_blocks*/, BlockId*, UniqueId*) { return 0; }
  virtual void prefix_store(const SageManager&, const Token*, const BlockId*, const UniqueId*, int /*n_blocks*/) {}
  virtual int schedule(const SageStep&, const SageSequence*, int /*n*/, std::uint64_t* /*priorities*/, int* /*budget*/) {
    return 1;
  }
  virtual int admit(const SageRequest*, int /*n*/, int /*max_admitted*/, std::int32_t* /*admitted*/) { return -1; }
  virtual void step_end(const SageStepResult&) {}
  virtual void* comm_begin(const SageComm&) { return nullptr; }
  virtual void comm_end(const SageComm&, void* /*token*/, float /*milliseconds*/) {}

 private:
  SageHooks hooks_{};
};

}  // namespace sage::host
