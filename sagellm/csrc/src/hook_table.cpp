#include "sagellm/hook_table.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "replicas.h"
#include "sagellm/hash.h"

namespace sage {

namespace {

using Key = std::tuple<std::uint64_t, std::int32_t, std::uint64_t>;  // engine, group, generation

// Tells one call from another well enough to notice that ranks do not do the same.
std::uint64_t digest(std::uint64_t epoch, std::uint64_t a, std::uint64_t b, std::uint64_t c = 0) {
  return chain_hash(chain_hash(chain_hash(epoch, a), b), c);
}

std::uint64_t bits(std::int32_t value) { return static_cast<std::uint32_t>(value); }

}  // namespace

struct HookTable::Impl {
  Impl(const HookTableOptions& given, std::shared_ptr<Advisor> own_advisor);

  std::shared_ptr<Replicas> replicas_of(const SageManager& manager);
  std::shared_ptr<Replicas> make_replicas(const SageManager& manager) const;
  void choose(Replicas& replicas, const SageManager& manager, std::size_t count, std::vector<std::int32_t>& chosen) const;
  void forget(const SageManager& manager);

  std::int32_t evict(const SageManager& manager, const std::int32_t* cached, std::int32_t n, std::int32_t count,
                     std::int32_t* victims);
  void evicted(const SageManager& manager, const std::int32_t* ids, const std::uint64_t* unique_ids, std::int32_t n);
  void released(const SageManager& manager, std::uint64_t seq_id, const std::int32_t* ids, const std::uint64_t* unique_ids,
                std::int32_t n);
  std::int32_t lookup(const SageManager& manager, const SageSequence& sequence, std::int32_t max_blocks, std::int32_t* ids,
                      std::uint64_t* unique_ids);
  void store(const SageManager& manager, std::uint64_t seq_id, std::int32_t kind, const std::int32_t* tokens,
             const std::int32_t* ids, const std::uint64_t* unique_ids, std::int32_t n);

  void add(const Replicas& replicas, HookTableStats& stats) const;

  const HookTableOptions options;
  const std::shared_ptr<Advisor> advisor;
  SageHooks hooks{};

  mutable std::mutex registry;
  std::map<Key, std::shared_ptr<Replicas>> alive;
  std::atomic<std::uint64_t> version{0};  // one more whenever something was forgotten
  HookTableStats gone;                    // of replicas that are no more; under `registry`

  std::atomic<std::uint64_t> stored{0}, evicted_blocks{0}, refused{0};
};

namespace {

// A C function for a method. Nothing may leave it as an exception: on the engine's thread that ends the process.
template <typename Work>
auto guarded(HookTable::Impl& own, Work&& work, decltype(work()) otherwise) noexcept {
  try {
    return work();
  } catch (...) {
    own.refused.fetch_add(1, std::memory_order_relaxed);
    return otherwise;
  }
}

template <typename Work>
void guarded_notice(HookTable::Impl& own, Work&& work) noexcept {
  guarded(own, [&] { work(); return 0; }, 0);
}

HookTable::Impl& impl_of(void* ctx) { return *static_cast<HookTable::Impl*>(ctx); }

// ---- what the engine calls

std::int32_t on_evict(void* ctx, const SageManager* manager, const std::int32_t* cached, std::int32_t n, std::int32_t count,
                      std::int32_t* victims) {
  auto& own = impl_of(ctx);
  return guarded(own, [&] { return own.evict(*manager, cached, n, count, victims); }, 0);
}

void on_evicted(void* ctx, const SageManager* manager, const std::int32_t* ids, const std::uint64_t* unique_ids,
                std::int32_t n) {
  auto& own = impl_of(ctx);
  guarded_notice(own, [&] { own.evicted(*manager, ids, unique_ids, n); });
}

void on_released(void* ctx, const SageManager* manager, std::uint64_t seq_id, const std::int32_t* ids,
                 const std::uint64_t* unique_ids, std::int32_t n) {
  auto& own = impl_of(ctx);
  guarded_notice(own, [&] { own.released(*manager, seq_id, ids, unique_ids, n); });
}

void on_reset(void* ctx, const SageManager* manager) {
  auto& own = impl_of(ctx);
  guarded_notice(own, [&] { own.forget(*manager); });
}

std::int32_t on_lookup(void* ctx, const SageManager* manager, const SageSequence* sequence, std::int32_t max_blocks,
                       std::int32_t* ids, std::uint64_t* unique_ids) {
  auto& own = impl_of(ctx);
  return guarded(own, [&] { return own.lookup(*manager, *sequence, max_blocks, ids, unique_ids); }, 0);
}

void on_store(void* ctx, const SageManager* manager, std::uint64_t seq_id, std::int32_t kind, const std::int32_t* tokens,
              const std::int32_t* ids, const std::uint64_t* unique_ids, std::int32_t n) {
  auto& own = impl_of(ctx);
  guarded_notice(own, [&] { own.store(*manager, seq_id, kind, tokens, ids, unique_ids, n); });
}

std::int32_t on_schedule(void* ctx, const SageStep* step, const SageSequence* sequences, std::int32_t n,
                         std::uint64_t* priorities, std::int32_t* budget) {
  return impl_of(ctx).advisor->schedule(*step, sequences, n, priorities, budget) ? 0 : 1;
}

std::int32_t on_admit(void* ctx, std::uint64_t engine, std::int32_t group, const SageRequest* requests, std::int32_t n,
                      std::int32_t max_admitted, std::int32_t* admitted) {
  auto& own = impl_of(ctx);
  return guarded(
      own,
      [&] {
        thread_local std::vector<std::int32_t> chosen;
        chosen.clear();
        if (!own.advisor->admit(engine, group, requests, n, max_admitted, chosen)) return -1;
        const std::size_t count = std::min(chosen.size(), static_cast<std::size_t>(std::max(max_admitted, 0)));
        std::copy_n(chosen.begin(), count, admitted);
        return static_cast<std::int32_t>(count);
      },
      -1);
}

void on_step_end(void* ctx, const SageStepResult* result) { impl_of(ctx).advisor->step_end(*result); }

void on_comm_end(void* ctx, const SageComm* comm, void*, float milliseconds) {
  impl_of(ctx).advisor->collective(*comm, milliseconds);
}

}  // namespace

HookTable::Impl::Impl(const HookTableOptions& given, std::shared_ptr<Advisor> own_advisor)
    : options(given), advisor(std::move(own_advisor)) {
  hooks.abi = SAGE_HOOKS_ABI;
  hooks.struct_size = sizeof hooks;
  hooks.ctx = this;
  if (options.victims) hooks.evict = on_evict;
  hooks.evicted = on_evicted;
  hooks.released = on_released;
  hooks.reset = on_reset;
  if (options.prefix) {
    hooks.flags |= SAGE_REPLACE_TRIE;
    hooks.prefix_lookup = on_lookup;
    hooks.prefix_store = on_store;
  }
  if (advisor == nullptr) return;
  if (options.schedule) hooks.schedule = on_schedule;
  if (options.admit) hooks.admit = on_admit;
  if (options.step_end) hooks.step_end = on_step_end;
  if (options.comm) hooks.comm_end = on_comm_end;
  if (options.comm && options.time_comm) hooks.flags |= SAGE_TIME_COMM;
}

// ---- whose index it is

std::shared_ptr<Replicas> HookTable::Impl::make_replicas(const SageManager& manager) const {
  auto replicas = std::make_shared<Replicas>(manager.n_ranks);
  if (options.prefix) {
    SageCounts counts{};
    counts.struct_size = sizeof counts;
    manager.api->counts(manager.manager, &counts);
    replicas->cache.emplace(static_cast<std::size_t>(manager.block_len), static_cast<std::size_t>(counts.max_blocks));
  }
  return replicas;
}

std::shared_ptr<Replicas> HookTable::Impl::replicas_of(const SageManager& manager) {
  struct Last {
    const Impl* of = nullptr;
    std::uint64_t version = 0;
    Key key{};
    std::shared_ptr<Replicas> replicas;
  };
  thread_local Last last;
  const Key key(manager.engine, manager.group, manager.generation);
  if (last.of != this || last.key != key || last.version != version.load(std::memory_order_acquire)) {
    std::lock_guard hold(registry);
    auto found = alive.find(key);
    if (found == alive.end()) found = alive.emplace(key, make_replicas(manager)).first;
    last = Last{this, version.load(std::memory_order_relaxed), key, found->second};
  }
  if (manager.n_ranks != last.replicas->num_ranks() || manager.rank < 0 || manager.rank >= manager.n_ranks) {
    throw Error(ErrorKind::kArgument, "ranks of one group disagree on their number");
  }
  return last.replicas;
}

void HookTable::Impl::forget(const SageManager& manager) {
  std::lock_guard hold(registry);
  const auto found = alive.find(Key(manager.engine, manager.group, manager.generation));
  if (found == alive.end()) return;  // it never asked for anything
  const std::shared_ptr<Replicas> replicas = found->second;
  std::lock_guard inner(replicas->mutex);
  if (!replicas->reset()) return;
  add(*replicas, gone);
  if (advisor != nullptr) advisor->reset(manager);
  alive.erase(found);
  version.fetch_add(1, std::memory_order_release);
}

// ---- blocks

std::int32_t HookTable::Impl::evict(const SageManager& manager, const std::int32_t* cached, std::int32_t n,
                                    std::int32_t count, std::int32_t* victims) {
  const auto replicas = replicas_of(manager);
  std::lock_guard hold(replicas->mutex);
  const Answer& answer =
      replicas->answer(manager.rank, Call::kEvict, digest(manager.epoch, bits(n), bits(count)), [&](Answer& out) {
        if (advisor == nullptr || !advisor->select_victims(manager, cached, n, count, out.ids)) out.ids.clear();
        out.ids.resize(std::min(out.ids.size(), static_cast<std::size_t>(count)));
        if (replicas->cache) choose(*replicas, manager, static_cast<std::size_t>(count), out.ids);
        out.count = static_cast<std::int32_t>(out.ids.size());
      });
  std::copy(answer.ids.begin(), answer.ids.end(), victims);
  return answer.count;
}

// Fills up to `count` what is chosen already.
void HookTable::Impl::choose(Replicas& replicas, const SageManager& manager, std::size_t count,
                             std::vector<std::int32_t>& chosen) const {
  if (chosen.size() >= count) return;
  std::vector<std::int32_t> before(chosen), others;
  std::sort(before.begin(), before.end());
  const auto is_victim = [&](std::int32_t id, std::uint64_t unique_id) {
    if (std::binary_search(before.begin(), before.end(), id)) return false;
    SageBlockInfo info;
    manager.api->block_info(manager.manager, &id, 1, &info);
    return info.state == SAGE_BLOCK_CACHED && info.unique_id == unique_id;
  };
  replicas.cache->choose_victims(count - chosen.size(), is_victim, others);
  chosen.insert(chosen.end(), others.begin(), others.end());
}

void HookTable::Impl::evicted(const SageManager& manager, const std::int32_t* ids, const std::uint64_t* unique_ids,
                              std::int32_t n) {
  const auto replicas = replicas_of(manager);
  std::lock_guard hold(replicas->mutex);
  const std::uint64_t first = n == 0 ? 0 : unique_ids[0];
  replicas->answer(manager.rank, Call::kEvicted, digest(manager.epoch, bits(n), first), [&](Answer&) {
    evicted_blocks.fetch_add(bits(n), std::memory_order_relaxed);
    if (advisor != nullptr) advisor->evicted(manager, ids, n);
    if (!replicas->cache) return;
    const std::vector<std::int32_t> lost = replicas->cache->evicted(ids, static_cast<std::size_t>(n));
    if (advisor != nullptr && !lost.empty()) advisor->lost(manager, lost.data(), lost.size());
  });
}

void HookTable::Impl::released(const SageManager& manager, std::uint64_t seq_id, const std::int32_t* ids,
                               const std::uint64_t* unique_ids, std::int32_t n) {
  if (!options.prefix) return;
  const auto replicas = replicas_of(manager);
  std::lock_guard hold(replicas->mutex);
  replicas->answer(manager.rank, Call::kReleased, digest(manager.epoch, seq_id, bits(n)), [&](Answer&) {
    const bool ended = replicas->ended == seq_id;
    if (ended) replicas->ended.reset();
    replicas->cache->released(ids, unique_ids, static_cast<std::size_t>(n), ended);
  });
}

// ---- prefixes

std::int32_t HookTable::Impl::lookup(const SageManager& manager, const SageSequence& sequence, std::int32_t max_blocks,
                                     std::int32_t* ids, std::uint64_t* unique_ids) {
  if (sequence.prompt == nullptr || max_blocks <= 0) max_blocks = 0;
  const auto replicas = replicas_of(manager);
  std::lock_guard hold(replicas->mutex);
  const Answer& answer = replicas->answer(
      manager.rank, Call::kLookup, digest(manager.epoch, sequence.seq_id, bits(sequence.n_prompt), bits(max_blocks)),
      [&](Answer& out) {
        const auto most = static_cast<std::size_t>(max_blocks) * static_cast<std::size_t>(manager.block_len);
        replicas->cache->lookup(sequence.prompt, std::min(most, static_cast<std::size_t>(sequence.n_prompt)), out.ids,
                               out.unique_ids);
        out.count = static_cast<std::int32_t>(out.ids.size());
        replicas->count_lookup(sequence, out.count * manager.block_len);
        if (advisor == nullptr) return;
        SageSequence found = sequence;
        found.blocks = out.ids.data();
        found.unique_ids = out.unique_ids.data();
        found.n_blocks = out.count;
        advisor->matched(manager, found, out.count);
      });
  std::copy(answer.ids.begin(), answer.ids.end(), ids);
  std::copy(answer.unique_ids.begin(), answer.unique_ids.end(), unique_ids);
  return answer.count;
}

void HookTable::Impl::store(const SageManager& manager, std::uint64_t seq_id, std::int32_t kind, const std::int32_t* tokens,
                            const std::int32_t* ids, const std::uint64_t* unique_ids, std::int32_t n) {
  const auto replicas = replicas_of(manager);
  std::lock_guard hold(replicas->mutex);
  replicas->answer(manager.rank, Call::kStore, digest(manager.epoch, seq_id, bits(kind), bits(n)), [&](Answer&) {
    if (kind == SAGE_STORE_GENERATION) replicas->ended = seq_id;
    thread_local std::vector<std::int32_t> path;
    const std::size_t added = replicas->cache->store(tokens, ids, unique_ids, static_cast<std::size_t>(n), path);
    stored.fetch_add(added, std::memory_order_relaxed);
    if (advisor != nullptr && added > 0) advisor->stored(manager, seq_id, kind, tokens, path.data(), n);
  });
}

// ---- the rest

void HookTable::Impl::add(const Replicas& replicas, HookTableStats& stats) const {
  const ReplicaCounts& counts = replicas.counts;
  stats.lookups += counts.lookups;
  stats.hits += counts.hits;
  stats.query_tokens += counts.query_tokens;
  stats.hit_tokens += counts.hit_tokens;
  stats.decisions += counts.decisions;
  stats.replays += counts.replays;
  stats.divergences += counts.divergences;
}

HookTable::HookTable(const HookTableOptions& options, std::shared_ptr<Advisor> advisor)
    : impl_(std::make_unique<Impl>(options, std::move(advisor))) {}

HookTable& HookTable::make(const HookTableOptions& options, std::shared_ptr<Advisor> advisor) {
  static std::mutex hold;
  static auto& all = *new std::vector<HookTable*>;  // never freed: an engine may call until the process ends
  auto* const table = new HookTable(options, std::move(advisor));
  std::lock_guard guard(hold);
  all.push_back(table);
  return *table;
}

const SageHooks* HookTable::hooks() const noexcept { return &impl_->hooks; }

HookTableStats HookTable::stats() const {
  HookTableStats stats;
  std::vector<std::shared_ptr<Replicas>> alive;
  {
    std::lock_guard hold(impl_->registry);
    stats = impl_->gone;
    for (const auto& [key, replicas] : impl_->alive) alive.push_back(replicas);
  }
  // One by one: a rank that waits for a plug-in holds its replicas' mutex, and no other call may wait for that.
  for (const auto& replicas : alive) {
    std::lock_guard inner(replicas->mutex);
    impl_->add(*replicas, stats);
    if (replicas->cache) stats.cached_blocks += replicas->cache->num_indexed();
  }
  stats.replicas = alive.size();
  stats.stored_blocks = impl_->stored.load(std::memory_order_relaxed);
  stats.evicted_blocks = impl_->evicted_blocks.load(std::memory_order_relaxed);
  stats.refused = impl_->refused.load(std::memory_order_relaxed);
  return stats;
}

}  // namespace sage
