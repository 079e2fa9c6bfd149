#include "table_base.h"

namespace sage::host {

namespace {
TableBase& self(void* ctx) { return *static_cast<TableBase*>(ctx); }
}  // namespace

TableBase::TableBase(unsigned parts, unsigned flags) {
  hooks_.abi = SAGE_HOOKS_ABI;
  hooks_.struct_size = sizeof hooks_;
  hooks_.flags = flags;
  hooks_.ctx = this;
  if ((parts & kEvict) != 0) {
    hooks_.evict = [](void* ctx, const SageManager* manager, const BlockId* cached, BlockId n, BlockId count,
                      BlockId* victims) { return self(ctx).evict(*manager, cached, n, count, victims); };
  }
  if ((parts & (kEvict | kPrefix)) != 0) {
    hooks_.evicted = [](void* ctx, const SageManager* manager, const BlockId* ids, const UniqueId* unique_ids,
                        std::int32_t n) { self(ctx).evicted(*manager, ids, unique_ids, n); };
    hooks_.released = [](void* ctx, const SageManager* manager, SeqId seq_id, const BlockId* ids, const UniqueId* unique_ids,
                         std::int32_t n) { self(ctx).released(*manager, seq_id, ids, unique_ids, n); };
    hooks_.reset = [](void* ctx, const SageManager* manager) { self(ctx).reset(*manager); };
  }
  if ((parts & kPrefix) != 0) {
    hooks_.prefix_lookup = [](void* ctx, const SageManager* manager, const SageSequence* sequence, std::int32_t max_blocks,
                              BlockId* ids, UniqueId* unique_ids) {
      return self(ctx).prefix_lookup(*manager, *sequence, max_blocks, ids, unique_ids);
    };
    hooks_.prefix_store = [](void* ctx, const SageManager* manager, SeqId, std::int32_t, const Token* tokens,
                             const BlockId* ids, const UniqueId* unique_ids, std::int32_t n_blocks) {
      self(ctx).prefix_store(*manager, tokens, ids, unique_ids, n_blocks);
    };
  }
  if ((parts & kSchedule) != 0) {
    hooks_.schedule = [](void* ctx, const SageStep* step, const SageSequence* sequences, std::int32_t n,
                         std::uint64_t* priorities, std::int32_t* budget) {
      return self(ctx).schedule(*step, sequences, n, priorities, budget);
    };
  }
  if ((parts & kAdmit) != 0) {
    hooks_.admit = [](void* ctx, std::uint64_t, std::int32_t, const SageRequest* requests, std::int32_t n,
                      std::int32_t max_admitted, std::int32_t* admitted) {
      return self(ctx).admit(requests, n, max_admitted, admitted);
    };
  }
  if ((parts & kStepEnd) != 0) {
    hooks_.step_end = [](void* ctx, const SageStepResult* result) { self(ctx).step_end(*result); };
  }
  if ((parts & kComm) != 0) {
    hooks_.comm_begin = [](void* ctx, const SageComm* comm) { return self(ctx).comm_begin(*comm); };
    hooks_.comm_end = [](void* ctx, const SageComm* comm, void* token, float milliseconds) {
      self(ctx).comm_end(*comm, token, milliseconds);
    };
  }
}

}  // namespace sage::host
