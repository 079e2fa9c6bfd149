#include "host_engine.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>

#include "installed.h"

namespace sage::host {

HostEngine::HostEngine(const EngineOptions& options, EngineFault fault)
    : options_(options),
      fault_(fault),
      api_{SAGE_HOOKS_ABI, sizeof(SageKvApi), api_block_info, api_counts, api_migrate},
      hooks_(read_table(options.hooks)),
      blocks_(options.num_blocks, options.block_len, options.first_unique_id),
      own_(options.block_len) {
  manager_.struct_size = sizeof manager_;
  manager_.manager = this;
  manager_.api = &api_;
  manager_.engine = options.engine;
  manager_.group = options.group;
  manager_.rank = options.rank;
  manager_.n_ranks = options.num_ranks;
  manager_.block_len = options.block_len;
  manager_.generation = options.generation;
}

HostEngine::~HostEngine() {
  may_move_ = false;
  if (hooks_.reset != nullptr && fault_ != EngineFault::kSilentSleep) hooks_.reset(hooks_.ctx, &manager_);
}

void HostEngine::create(SeqId seq_id, const Tokens& prompt) {
  if (!sequences_.emplace(seq_id, Sequence{seq_id, prompt, {SAGE_SEQUENCE_CACHED, 0, 0, {}, {}}}).second) {
    throw std::logic_error("a sequence was created twice");
  }
}

bool HostEngine::still_is(BlockId id, UniqueId unique_id) const {
  const UniqueId now = blocks_.unique_id(id);
  if (fault_ == EngineFault::kShortUniqueId) return static_cast<UniqueId>(static_cast<int>(now)) == unique_id;
  return now == unique_id;
}

bool HostEngine::erase(SeqId seq_id) {
  const auto found = sequences_.find(seq_id);
  if (found == sequences_.end()) return false;
  SequenceView& view = found->second.view;
  std::vector<BlockId> ids = view.blocks;
  if (view.status == SAGE_SEQUENCE_CACHED) {
    std::size_t valid = 0;
    while (valid < ids.size() && still_is(ids[valid], view.unique_ids[valid])) ++valid;
    ids.resize(valid);
  } else {
    give_up(found->second);
  }
  // Without a prefix cache they are never asked for.
  if (!options_.prefix_caching) freed_.insert(freed_.end(), ids.begin(), ids.end());
  sequences_.erase(found);
  return true;
}

void HostEngine::give_up(Sequence& sequence) {
  SequenceView& view = sequence.view;
  blocks_.touch(view.blocks);
  if (hooks_.released != nullptr && fault_ != EngineFault::kSilentRelease && !view.blocks.empty()) {
    hooks_.released(hooks_.ctx, &manager_, sequence.seq_id, view.blocks.data(), view.unique_ids.data(),
                    static_cast<std::int32_t>(view.blocks.size()));
  }
  const bool leak = fault_ == EngineFault::kLeakHold && !view.blocks.empty();
  released_.insert(released_.end(), view.blocks.begin(), view.blocks.end() - (leak ? 1 : 0));
  view.status = SAGE_SEQUENCE_CACHED;
}

void HostEngine::commit() {
  for (const BlockId id : released_) blocks_.release(id);
  released_.clear();
  set_free(freed_);
  freed_.clear();
}

// A sequence that was preempted keeps what is left of its blocks, up to the first that has gone.
void HostEngine::take_back(Sequence& sequence) {
  SequenceView& view = sequence.view;
  if (view.status != SAGE_SEQUENCE_CACHED) return;
  std::size_t valid = 0;
  while (valid < view.blocks.size() &&
         (fault_ == EngineFault::kKeepPreempted ? blocks_.unique_id(view.blocks[valid]) != 0
                                                : still_is(view.blocks[valid], view.unique_ids[valid]))) {
    ++valid;
  }
  view.blocks.resize(valid);
  view.unique_ids.resize(valid);
  for (const BlockId id : view.blocks) blocks_.hold(id);
  view.cache_len = std::min(view.cache_len, static_cast<int>(valid) * options_.block_len);
  view.status = SAGE_SEQUENCE_LOCKED;
}

void HostEngine::look_up(Sequence& sequence) {
  SequenceView& view = sequence.view;
  if (!options_.prefix_caching || view.cache_len != 0 || sequence.prompt.empty()) return;
  // The last token is computed in any case: its logits are what the request is after.
  const int max_blocks = (static_cast<int>(sequence.prompt.size()) - 1) / options_.block_len;
  std::vector<BlockId> ids(static_cast<std::size_t>(max_blocks));
  std::vector<UniqueId> unique_ids(ids.size());
  const bool replaced = (hooks_.flags & SAGE_REPLACE_TRIE) != 0;
  int found = -1;
  if (hooks_.prefix_lookup != nullptr) {
    SageSequence asked{};
    asked.seq_id = sequence.seq_id;
    asked.status = view.status;
    asked.context_len = asked.n_prompt = static_cast<std::int32_t>(sequence.prompt.size());
    asked.prompt = sequence.prompt.data();
    found = hooks_.prefix_lookup(hooks_.ctx, &manager_, &asked, max_blocks, ids.data(), unique_ids.data());
  }
  if (found < 0 && !replaced) {
    const std::vector<PrefixMap::Place> places = own_.find(sequence.prompt.data(), max_blocks);
    found = static_cast<int>(places.size());
    for (std::size_t i = 0; i < places.size(); ++i) std::tie(ids[i], unique_ids[i]) = places[i];
  }
  std::set<BlockId> seen;
  for (int i = 0; i < std::min(found, max_blocks); ++i) {
    const std::size_t place = static_cast<std::size_t>(i);
    const BlockId id = ids[place];
    const SageBlockInfo info = blocks_.info(id);
    const bool bad = info.state == SAGE_BLOCK_FREE || !still_is(id, unique_ids[place]) || !seen.insert(id).second;
    if (bad && (fault_ != EngineFault::kTrustLookups || info.state == SAGE_BLOCK_FREE)) break;
    blocks_.hold(id);
    view.blocks.push_back(id);
    view.unique_ids.push_back(info.unique_id);
  }
  view.cache_len = static_cast<int>(view.blocks.size()) * options_.block_len;
}

void HostEngine::advance(SeqId seq_id) {
  SequenceView& view = at(seq_id).view;
  view.cache_len += view.input_len;
}

void HostEngine::cache_prompt(const std::vector<SeqId>& active) {
  if (!options_.prefix_caching) return;
  for (const SeqId seq_id : active) {
    Sequence& sequence = at(seq_id);
    if (sequence.view.cache_len > static_cast<int>(sequence.prompt.size())) {
      sequence.prompt.clear();
    } else {
      publish(sequence, SAGE_STORE_PROMPT, sequence.prompt);
    }
  }
}

void HostEngine::cache_generation(SeqId seq_id, const Tokens& tokens) {
  Sequence& sequence = at(seq_id);
  if (!options_.prefix_caching) return;
  // It waits or was preempted, and is cancelled: what it still holds is not known before the next round.
  if (sequence.view.status == SAGE_SEQUENCE_CACHED) {
    if (fault_ == EngineFault::kFailCancel) throw std::logic_error("a sequence without blocks was cancelled");
    return;
  }
  publish(sequence, SAGE_STORE_GENERATION, tokens);
}

void HostEngine::publish(Sequence& sequence, SageStoreKind kind, const Tokens& tokens) {
  const SequenceView& view = sequence.view;
  const int num_tokens = static_cast<int>(tokens.size());
  int n = std::min(view.cache_len, num_tokens) / options_.block_len;
  if (fault_ == EngineFault::kPublishUncomputed) {
    n = std::min(static_cast<int>(view.blocks.size()), num_tokens / options_.block_len);
  }
  if (n == 0 && kind == SAGE_STORE_PROMPT) return;
  if ((hooks_.flags & SAGE_REPLACE_TRIE) == 0) {
    // The engine's own cache keeps the newest copy, and leaves out the last block of a sequence.
    for (int i = 0; i < std::min(n, static_cast<int>(view.blocks.size()) - 1); ++i) {
      const std::size_t place = static_cast<std::size_t>(i);
      own_.put(tokens.data(), i + 1, {view.blocks[place], view.unique_ids[place]});
    }
  }
  if (hooks_.prefix_store != nullptr) {
    hooks_.prefix_store(hooks_.ctx, &manager_, sequence.seq_id, kind, tokens.data(), view.blocks.data(),
                        view.unique_ids.data(), n);
  }
}

SequenceView HostEngine::sequence(SeqId seq_id) const { return sequences_.at(seq_id).view; }

std::vector<SageBlockInfo> HostEngine::blocks() const {
  std::vector<SageBlockInfo> infos;
  for (BlockId id = 0; id < blocks_.num_blocks(); ++id) infos.push_back(blocks_.info(id));
  return infos;
}

std::int32_t HostEngine::api_block_info(void* manager, const std::int32_t* ids, std::int32_t n, SageBlockInfo* out) {
  const HostEngine& self = *static_cast<HostEngine*>(manager);
  for (std::int32_t i = 0; i < n; ++i) out[i] = self.blocks_.info(ids[i]);
  return n;
}

void HostEngine::api_counts(void* manager, SageCounts* out) {
  const HostBlocks& blocks = static_cast<HostEngine*>(manager)->blocks_;
  SageCounts counts{};
  counts.struct_size = std::min<std::uint32_t>(out->struct_size, sizeof counts);
  counts.total = counts.max_blocks = blocks.num_blocks();
  counts.free = blocks.num_free();
  counts.cached = blocks.num_cached();
  counts.active = counts.total - counts.free - counts.cached;
  counts.block_len = static_cast<HostEngine*>(manager)->options_.block_len;
  counts.block_bytes = blocks.block_bytes();
  std::memcpy(out, &counts, counts.struct_size);
}

std::int32_t HostEngine::api_migrate(void* manager, SageMove* moves, std::int32_t n) {
  return static_cast<HostEngine*>(manager)->migrate(moves, n);
}

int HostEngine::migrate(SageMove* moves, int n) {
  int moved = 0;
  for (int i = 0; i < n; ++i) {
    move(moves[i]);
    if (moves[i].status == SAGE_MOVED) ++moved;
  }
  return moved;
}

void HostEngine::move(SageMove& move) {
  const bool is_known = move.kind == SAGE_OFFLOAD || move.kind == SAGE_RESTORE ||
                        (move.kind == SAGE_REPLACE && (hooks_.flags & SAGE_REPLACE_TRIE) != 0);
  move.status = SAGE_BAD_MOVE;
  if (!may_move_ || move.host == nullptr || !is_known) return;
  if (move.kind == SAGE_RESTORE) {
    move.status = SAGE_NO_FREE_BLOCK;
    if (blocks_.num_free() == 0) return;
    move.block_id = blocks_.adopt();
  } else {
    const bool wanted = blocks_.is_cached(move.block_id) &&
                        (move.unique_id == 0 || blocks_.unique_id(move.block_id) == move.unique_id);
    move.status = SAGE_NO_SUCH_BLOCK;
    if (!wanted) return;
    if (move.kind == SAGE_REPLACE) blocks_.replace(move.block_id);
  }
  void* const block = blocks_.memory(move.block_id);
  move.status = SAGE_MOVED;
  if (move.kind == SAGE_OFFLOAD) {
    std::memcpy(move.host, block, blocks_.block_bytes());
    return;
  }
  move.unique_id = blocks_.unique_id(move.block_id);
  if (fault_ != EngineFault::kEmptyRestore) std::memcpy(block, move.host, blocks_.block_bytes());
}

}  // namespace sage::host
