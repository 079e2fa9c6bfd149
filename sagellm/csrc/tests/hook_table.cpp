// The table without an engine: each rank gets one answer, whichever rank decides, and an invalid answer harms no other.

#include "sagellm/hook_table.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "expect.h"

namespace {

using Ids = std::vector<std::int32_t>;
using UniqueIds = std::vector<std::uint64_t>;

// A manager with nothing behind it: every block is cached, and its unique id is its id plus one.
struct Ranks {
  explicit Ranks(std::int32_t num_ranks, std::uint64_t generation = 1) {
    for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
      SageManager manager{};
      manager.struct_size = sizeof manager;
      manager.api = &api;
      manager.engine = 7;
      manager.rank = rank;
      manager.n_ranks = num_ranks;
      manager.block_len = 2;
      manager.generation = generation;
      managers.push_back(manager);
    }
  }

  static std::int32_t block_info(void*, const std::int32_t* ids, std::int32_t n, SageBlockInfo* out) {
    for (std::int32_t i = 0; i < n; ++i) {
      out[i] = SageBlockInfo{};
      out[i].id = ids[i];
      out[i].state = SAGE_BLOCK_CACHED;
      out[i].unique_id = static_cast<std::uint64_t>(ids[i]) + 1;
    }
    return n;
  }
  static void counts(void*, SageCounts* out) { out->max_blocks = 1024; }

  SageKvApi api{SAGE_HOOKS_ABI, sizeof(SageKvApi), block_info, counts, nullptr};
  std::vector<SageManager> managers;
};

class Dice final : public sage::Advisor {
 public:
  bool select_victims(const SageManager&, const std::int32_t* cached, std::int32_t n, std::int32_t count,
                      std::vector<std::int32_t>& victims) noexcept override {
    static std::atomic<unsigned> seed{0};
    std::mt19937 random(seed++);
    victims.assign(cached, cached + n);
    std::shuffle(victims.begin(), victims.end(), random);
    victims.resize(static_cast<std::size_t>(count));
    return true;
  }
};

// Each rank runs at its own pace; what it is answered is written down and compared in the end.
void ranks_get_one_answer() {
  constexpr int kRanks = 4, kSteps = 10'000;
  sage::HookTable& table = sage::HookTable::make({}, std::make_shared<Dice>());
  const SageHooks& hooks = *table.hooks();
  Ranks ranks(kRanks);
  std::vector<Ids> answers(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937 random(1);  // the same calls on every rank
      SageManager manager = ranks.managers[static_cast<std::size_t>(rank)];
      Ids& seen = answers[static_cast<std::size_t>(rank)];
      Ids ids(64), cached(32);
      UniqueIds unique(64);
      for (int step = 0; step < kSteps; ++step) {
        manager.epoch = static_cast<std::uint64_t>(step);
        const auto first = static_cast<std::int32_t>(random() % 900);
        std::iota(cached.begin(), cached.end(), first);
        const std::int32_t n = hooks.evict(hooks.ctx, &manager, cached.data(), 32, 4, ids.data());
        seen.insert(seen.end(), ids.begin(), ids.begin() + n);
        for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) unique[i] = static_cast<std::uint64_t>(ids[i]) + 1;
        hooks.evicted(hooks.ctx, &manager, ids.data(), unique.data(), n);
        const auto token = static_cast<std::int32_t>(random() % 50);
        const Ids prompt{token, token, 1, 1, 0};
        SageSequence sequence{};
        sequence.seq_id = random();
        sequence.prompt = prompt.data();
        sequence.n_prompt = 5;
        const std::int32_t hit = hooks.prefix_lookup(hooks.ctx, &manager, &sequence, 2, ids.data(), unique.data());
        seen.insert(seen.end(), ids.begin(), ids.begin() + hit);
        const Ids fresh{first, first + 1};
        const UniqueIds fresh_unique{static_cast<std::uint64_t>(first) + 1, static_cast<std::uint64_t>(first) + 2};
        hooks.prefix_store(hooks.ctx, &manager, sequence.seq_id, SAGE_STORE_PROMPT, prompt.data(), fresh.data(),
                           fresh_unique.data(), 2);
      }
      hooks.reset(hooks.ctx, &manager);
    });
  }
  for (auto& thread : threads) thread.join();
  for (int rank = 1; rank < kRanks; ++rank) EXPECT(answers[static_cast<std::size_t>(rank)] == answers[0]);
  const sage::HookTableStats stats = table.stats();
  EXPECT(stats.divergences == 0 && stats.replicas == 0 && stats.hits > 0);
  EXPECT(stats.decisions == kSteps * 4 && stats.replays == kSteps * 4 * (kRanks - 1));
}

void a_rank_that_goes_its_own_way_is_noticed() {
  sage::HookTable& table = sage::HookTable::make({});
  const SageHooks& hooks = *table.hooks();
  Ranks ranks(2);
  SageSequence sequence{};
  const Ids prompt{1, 2, 3};
  sequence.prompt = prompt.data();
  sequence.n_prompt = 3;
  Ids ids(8);
  UniqueIds unique(8);
  for (std::uint64_t id : {5, 6}) {
    sequence.seq_id = id;
    hooks.prefix_lookup(hooks.ctx, &ranks.managers[id - 5], &sequence, 1, ids.data(), unique.data());
  }
  EXPECT(table.stats().divergences == 1);
}

void a_generation_ends_with_its_last_rank() {
  sage::HookTable& table = sage::HookTable::make({});
  const SageHooks& hooks = *table.hooks();
  const Ids tokens{1, 2}, ids{3};
  const UniqueIds unique{4};
  Ranks ranks(2), after(2, 2);
  for (const SageManager& manager : ranks.managers) {
    hooks.prefix_store(hooks.ctx, &manager, 1, SAGE_STORE_PROMPT, tokens.data(), ids.data(), unique.data(), 1);
  }
  EXPECT(table.stats().cached_blocks == 1);
  hooks.reset(hooks.ctx, &ranks.managers[0]);
  EXPECT(table.stats().replicas == 1);
  hooks.reset(hooks.ctx, &ranks.managers[1]);
  EXPECT(table.stats().replicas == 0);
  SageSequence sequence{};
  sequence.prompt = tokens.data();
  sequence.n_prompt = 2;
  Ids found(2);
  UniqueIds found_unique(2);
  for (const SageManager& manager : after.managers) {
    EXPECT(hooks.prefix_lookup(hooks.ctx, &manager, &sequence, 1, found.data(), found_unique.data()) == 0);
  }
}

// An end without a block, as of a prompt with an image: what it held is of no use to anybody.
void an_end_without_blocks_is_one() {
  sage::HookTable& table = sage::HookTable::make({});
  const SageHooks& hooks = *table.hooks();
  Ranks ranks(1);
  const SageManager& manager = ranks.managers[0];
  const Ids tokens{1, 2}, useful{3}, useless{7};
  const UniqueIds useful_unique{4}, useless_unique{8};
  hooks.prefix_store(hooks.ctx, &manager, 1, SAGE_STORE_PROMPT, tokens.data(), useful.data(), useful_unique.data(), 1);
  hooks.prefix_store(hooks.ctx, &manager, 2, SAGE_STORE_GENERATION, tokens.data(), nullptr, nullptr, 0);
  hooks.released(hooks.ctx, &manager, 2, useless.data(), useless_unique.data(), 1);
  Ids victims(2);
  EXPECT(hooks.evict(hooks.ctx, &manager, nullptr, 0, 1, victims.data()) == 1 && victims[0] == 7);
  EXPECT(table.stats().refused == 0);
}

// Names one victim, whatever is asked for, and hears what is lost with others.
class Frugal final : public sage::Advisor {
 public:
  std::vector<std::int32_t> lost_ids;
  int num_resets = 0;
  bool select_victims(const SageManager&, const std::int32_t*, std::int32_t, std::int32_t,
                      std::vector<std::int32_t>& victims) noexcept override {
    victims = {5};
    return true;
  }
  void lost(const SageManager&, const std::int32_t* ids, std::size_t n) noexcept override { lost_ids.assign(ids, ids + n); }
  void reset(const SageManager&) noexcept override { ++num_resets; }
};

void what_an_advisor_leaves_open_is_the_natives() {
  const auto advisor = std::make_shared<Frugal>();
  sage::HookTable& table = sage::HookTable::make({}, advisor);
  const SageHooks& hooks = *table.hooks();
  Ranks ranks(1);
  const SageManager& manager = ranks.managers[0];
  const Ids tokens{1, 1, 2, 2, 3, 3}, ids{4, 5, 6};
  const UniqueIds unique{5, 6, 7};
  hooks.prefix_store(hooks.ctx, &manager, 1, SAGE_STORE_PROMPT, tokens.data(), ids.data(), unique.data(), 3);
  Ids victims(2);
  EXPECT(hooks.evict(hooks.ctx, &manager, nullptr, 0, 2, victims.data()) == 2);
  EXPECT(victims == Ids({5, 6}));  // the end of what it cut, not the same block twice
  hooks.evicted(hooks.ctx, &manager, victims.data(), unique.data(), 1);
  EXPECT(advisor->lost_ids.empty() && table.stats().cached_blocks == 1);
  hooks.prefix_store(hooks.ctx, &manager, 1, SAGE_STORE_PROMPT, tokens.data(), ids.data(), unique.data(), 3);
  hooks.evicted(hooks.ctx, &manager, ids.data(), unique.data(), 1);
  EXPECT(advisor->lost_ids == Ids({6, 5}));
  hooks.reset(hooks.ctx, &manager);
  EXPECT(advisor->num_resets == 1);
}

void a_block_length_that_the_index_has_not_costs_its_calls_only() {
  for (const bool prefix : {true, false}) {
    sage::HookTableOptions options;
    options.prefix = prefix;
    sage::HookTable& table = sage::HookTable::make(options, std::make_shared<Frugal>());
    const SageHooks& hooks = *table.hooks();
    Ranks ranks(1);
    ranks.managers[0].block_len = 512;
    Ids victims(1);
    const int chosen = hooks.evict(hooks.ctx, &ranks.managers[0], nullptr, 0, 1, victims.data());
    EXPECT(chosen == (prefix ? 0 : 1) && table.stats().refused == (prefix ? 1u : 0u));
    hooks.reset(hooks.ctx, &ranks.managers[0]);
    EXPECT(table.stats().replicas == 0);
  }
}

void a_sequence_that_waits_is_one_lookup() {
  sage::HookTable& table = sage::HookTable::make({});
  const SageHooks& hooks = *table.hooks();
  Ranks ranks(1);
  const SageManager& manager = ranks.managers[0];
  const Ids tokens{1, 2, 3}, ids{4};
  const UniqueIds unique{5};
  SageSequence sequence{};
  sequence.seq_id = 9;
  sequence.prompt = tokens.data();
  sequence.n_prompt = 3;
  Ids found(1);
  UniqueIds found_unique(1);
  const auto lookup = [&] { return hooks.prefix_lookup(hooks.ctx, &manager, &sequence, 1, found.data(), found_unique.data()); };
  for (int round = 0; round < 5; ++round) EXPECT(lookup() == 0);
  hooks.prefix_store(hooks.ctx, &manager, 1, SAGE_STORE_PROMPT, tokens.data(), ids.data(), unique.data(), 1);
  EXPECT(lookup() == 1);
  const sage::HookTableStats stats = table.stats();
  EXPECT(stats.lookups == 1 && stats.query_tokens == 3 && stats.hits == 1 && stats.hit_tokens == 2);
}

void nonsense_costs_nothing_but_its_answer() {
  sage::HookTable& table = sage::HookTable::make({});
  const SageHooks& hooks = *table.hooks();
  Ranks ranks(1);
  const Ids tokens{1, 2}, ids{5000};
  const UniqueIds unique{4};
  hooks.prefix_store(hooks.ctx, &ranks.managers[0], 1, SAGE_STORE_PROMPT, tokens.data(), ids.data(), unique.data(), 1);
  const Ids negative{-1, 2}, fine{5};
  hooks.prefix_store(hooks.ctx, &ranks.managers[0], 1, SAGE_STORE_PROMPT, negative.data(), fine.data(), unique.data(), 1);
  EXPECT(table.stats().refused == 2 && table.stats().cached_blocks == 0);
  EXPECT(hooks.schedule == nullptr && hooks.admit == nullptr && hooks.comm_end == nullptr);
}

}  // namespace

int main() {
  ranks_get_one_answer();
  a_rank_that_goes_its_own_way_is_noticed();
  a_generation_ends_with_its_last_rank();
  an_end_without_blocks_is_one();
  what_an_advisor_leaves_open_is_the_natives();
  a_block_length_that_the_index_has_not_costs_its_calls_only();
  a_sequence_that_waits_is_one_lookup();
  nonsense_costs_nothing_but_its_answer();
  std::puts("hook_table: passed");
  return 0;
}
