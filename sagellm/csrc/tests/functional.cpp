// The library as a C++ engine uses it, one behaviour a function, with answers written out by hand.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "expect.h"
#include "sagellm/prefix_index.h"

namespace {

using sage::BlockId;
using sage::PrefixIndex;
using sage::Tier;
using sage::Token;
using Ids = std::vector<BlockId>;
using Tokens = std::vector<Token>;

sage::Entry insert(PrefixIndex& index, const Tokens& tokens, const Ids& ids, Tier tier = Tier::kGpu,
                   const char* name = "", const char* metadata = "") {
  return index.insert(name, tokens.data(), tokens.size(), ids.data(), ids.size(), tier, metadata);
}

sage::Match lookup(PrefixIndex& index, const Tokens& tokens, bool lock = false, const char* name = "") {
  sage::Match match;
  index.lookup(name, tokens.data(), tokens.size(), match, true, lock);
  return match;
}

void longest_prefix_is_found() {
  PrefixIndex index(2);
  const sage::Entry entry = insert(index, {1, 2, 3, 4, 5}, {10, 11});
  EXPECT(entry.num_blocks == 2 && entry.num_new_blocks == 2);
  EXPECT(lookup(index, {1, 2, 3, 4, 5, 6}).path.blocks == Ids({10, 11}));
  EXPECT(lookup(index, {1, 2, 3, 9}).path.blocks == Ids({10}));
  EXPECT(lookup(index, {1, 2, 3}).path.blocks == Ids({10}));
  EXPECT(lookup(index, {2, 1}).path.blocks.empty() && lookup(index, {}).path.blocks.empty());
  EXPECT(lookup(index, {1, 2, 3, 4}, false, "another").path.blocks.empty());
  index.check();
}

void what_is_cached_stays_and_slower_copies_give_way() {
  PrefixIndex index(1);
  insert(index, {1, 2}, {0, 1}, Tier::kCpu);
  const sage::Entry again = insert(index, {1, 2, 3}, {5, 6, 7});
  EXPECT(again.path.blocks == Ids({5, 6, 7}) && again.path.tiers.empty() && again.num_new_blocks == 1);
  EXPECT(again.replaced.blocks.size() == 2 && again.replaced.tiers == std::vector<Tier>(2, Tier::kCpu));
  EXPECT(insert(index, {1, 2, 3}, {8, 9, 10}).path.blocks == Ids({5, 6, 7}));
  EXPECT(index.num_blocks(Tier::kGpu) == 3 && index.num_blocks(Tier::kCpu) == 0);
  EXPECT_ERROR(kBlockReuse, insert(index, {4}, {5}));
  EXPECT_ERROR(kBlockReuse, insert(index, {4, 5}, {20, 20}));
  EXPECT_ERROR(kArgument, insert(index, {4, 5}, {20}));
  EXPECT_ERROR(kArgument, insert(index, {-4}, {20}));
  index.check();
}

void eviction_takes_the_least_recent_leaf_first() {
  PrefixIndex index(1);
  insert(index, {1, 2, 3}, {0, 1, 2});
  insert(index, {1, 7}, {0, 3});
  insert(index, {9}, {4});
  lookup(index, {1, 2, 3});
  EXPECT(index.select_lru(9) == Ids({3, 4, 2, 1, 0}));
  EXPECT(index.evict_lru(3).blocks == Ids({3, 4, 2}));
  EXPECT(lookup(index, {1, 2, 3}).path.blocks == Ids({0, 1}));
  EXPECT_ERROR(kArgument, index.evict(Ids{0}.data(), 1, Tier::kGpu, sage::RemovalReason::kPolicy));
  EXPECT(index.evict(Ids({0, 1}).data(), 2, Tier::kGpu, sage::RemovalReason::kPolicy).blocks == Ids({1, 0}));
  EXPECT(index.num_blocks(Tier::kGpu) == 0 && index.namespaces().empty());
  index.check();
}

void a_lock_keeps_its_path_and_can_be_extended() {
  PrefixIndex index(2);
  insert(index, {1, 2, 3, 4}, {0, 1});
  const sage::LockId lock = lookup(index, {1, 2}, true).lock;
  EXPECT(lock != 0);
  EXPECT(index.evict_lru(9).blocks == Ids({1}));
  const Tokens rest{5, 6, 7, 8};
  const sage::Entry longer = index.extend(lock, rest.data(), rest.size(), Ids({2, 3}).data(), 2);
  EXPECT(longer.num_blocks == 3 && longer.path.blocks == Ids({2, 3}));
  EXPECT(index.evict_lru(9).blocks.empty());
  EXPECT_ERROR(kLock, index.invalidate_all());
  index.unlock(lock);
  EXPECT_ERROR(kLock, index.unlock(lock));
  EXPECT(index.evict_lru(9).blocks == Ids({3, 2, 0}));
  index.check();
}

void blocks_move_between_tiers() {
  PrefixIndex index(1);
  insert(index, {1, 2, 3}, {0, 1, 2});
  index.move(Ids({1, 2}).data(), Ids({40, 41}).data(), 2, Tier::kGpu, Tier::kNvme);
  const sage::Match match = lookup(index, {1, 2, 3});
  EXPECT(match.path.blocks == Ids({0, 40, 41}));
  EXPECT(match.path.tiers == std::vector<Tier>({Tier::kGpu, Tier::kNvme, Tier::kNvme}));
  const Tokens tokens{1, 2, 3};
  const auto candidates = index.lookup_tiers("", tokens.data(), tokens.size());
  EXPECT(candidates.size() == 2 && candidates[0].path.blocks.size() == 3 && candidates[1].path.blocks == Ids({0}));
  // With the last block of a tier goes what hangs below it on others.
  const sage::Removal removal = index.evict_lru(1);
  EXPECT(removal.blocks == Ids({41, 40, 0}) && removal.tiers.back() == Tier::kGpu);
  index.check();
}

void what_is_invalidated_goes_with_what_only_led_to_it() {
  PrefixIndex index(1);
  insert(index, {1, 2, 3, 4}, {0, 1, 2, 3});
  insert(index, {1, 2, 8}, {0, 1, 4});
  const Tokens tokens{1, 2, 3};
  EXPECT(index.invalidate("", tokens.data(), tokens.size()).blocks == Ids({3, 2}));
  EXPECT(lookup(index, {1, 2, 8}).path.blocks == Ids({0, 1, 4}));
  EXPECT(index.invalidate_blocks(Ids({1, 77}).data(), 2, Tier::kGpu).blocks == Ids({4, 1}));
  EXPECT(index.invalidate_namespace("").blocks == Ids({0}));
  index.check();
}

void a_snapshot_holds_everything_but_locks() {
  PrefixIndex index(2, 8);
  insert(index, {1, 2, 3, 4}, {0, 1}, Tier::kGpu, "a", "{\"user\": 1}");
  insert(index, {1, 2, 9, 9}, {0, 2}, Tier::kGpu, "a");
  lookup(index, {1, 2}, true, "a");
  const std::string bytes = index.snapshot();
  const auto copy = PrefixIndex::restore(bytes, 8);
  copy->check();
  EXPECT(copy->snapshot() == bytes && copy->block_size() == 2);
  EXPECT(copy->entries("a").size() == 2 && copy->select_lru(9) == Ids({1, 2, 0}));
  const Tokens tokens{1, 2, 3, 4};
  sage::Match match;
  copy->lookup("a", tokens.data(), tokens.size(), match);
  EXPECT(match.path.blocks == Ids({0, 1}) && copy->entry(match.entry).metadata == "{\"user\": 1}");
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    EXPECT_ERROR(kArgument, PrefixIndex::restore(damaged));
    EXPECT_ERROR(kArgument, PrefixIndex::restore(bytes.substr(0, i)));
  }
}

void events_tell_what_changed() {
  PrefixIndex index(1, 2);
  insert(index, {1, 2}, {0, 1});
  const sage::Events first = index.events(0);
  EXPECT(first.events.size() == 1 && first.num_lost == 0 && first.last_sequence == 1);
  EXPECT(first.events[0].kind == sage::EventKind::kStored && first.events[0].block_ids == Ids({0, 1}));
  index.evict_lru(1);
  index.clear();
  const sage::Events later = index.events(0);
  EXPECT(later.num_lost == 1 && later.events.size() == 2 && later.last_sequence == 3);
  EXPECT(later.events[0].kind == sage::EventKind::kRemoved && later.events[1].kind == sage::EventKind::kCleared);
}

// Not for passing: tells the index of more tokens than there are.
void overrun() {
  PrefixIndex index(2);
  insert(index, {1, 2, 3, 4}, {0, 1});
  const Tokens tokens{1, 2};
  sage::Match match;
  index.lookup("", tokens.data(), tokens.size() + 2, match);
}

// Enough children that some have the same 32 bits in the table: by their first block, and below different parents.
void equal_hashes_are_no_hit() {
  PrefixIndex index(1);
  constexpr Token kNumParents = 200000;
  for (Token token = 0; token < kNumParents; ++token) {
    EXPECT(insert(index, {token, 7}, {2 * token, 2 * token + 1}).num_new_blocks == 2);
    EXPECT(lookup(index, {token}).path.blocks == Ids({2 * token}));  // this splits the node
  }
  for (Token token = 0; token < kNumParents; ++token) {
    EXPECT(lookup(index, {token, 7}).path.blocks == Ids({2 * token, 2 * token + 1}));
  }
  EXPECT(index.metrics().collisions > 0);
}

// Tables that fill their smallest size and grow out of it, and emptying them in every way: searches run
// over many slots here, and evictions are long enough to run behind a look ahead.
void full_tables_stay_whole() {
  constexpr BlockId kNumLeaves = 1000;
  std::uint32_t state = 1;
  const auto below = [&](std::uint32_t limit) { return (state = state * 1664525u + 1013904223u) / 65536 % limit; };
  for (const BlockId num_leaves : {409, kNumLeaves}) {
    PrefixIndex index(1);
    std::vector<BlockId> left;
    for (BlockId id = 0; id < num_leaves; ++id) {
      insert(index, {0, id + 1}, {num_leaves, id});
      left.push_back(id);
    }
    index.check();
    while (left.size() > 100) {
      const std::size_t place = below(static_cast<std::uint32_t>(left.size()));
      const Ids victim{left[place]};
      EXPECT(index.evict(victim.data(), 1, Tier::kGpu, sage::RemovalReason::kPolicy).blocks == victim);
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(place));
      if (left.size() % 8 == 0) index.check();
    }
    for (const BlockId id : left) EXPECT(lookup(index, {0, id + 1}).path.blocks == Ids({num_leaves, id}));
    for (BlockId id = 0; id < kNumLeaves; ++id) insert(index, {0, id + 1}, {num_leaves, id < num_leaves ? id : id + 1});
    Ids order;
    for (BlockId i = 0; i < 2 * kNumLeaves; ++i) {
      const auto token = static_cast<Token>(below(kNumLeaves)) + 1;
      const BlockId id = lookup(index, {0, token}).path.blocks[1];
      order.push_back(id);
    }
    const Ids some(order.end() - 3, order.end());
    const BlockId free_ids[] = {0, 1, 2};
    if (some[0] != some[1] && some[1] != some[2] && some[0] != some[2]) {
      index.move(some.data(), free_ids, 3, Tier::kGpu, Tier::kCpu);
    }
    Ids gone;
    for (const std::size_t count : {1u, 17u, 200u, 2000u}) {
      const sage::Removal removal = index.evict_lru(count);
      for (std::size_t i = 0; i < removal.blocks.size(); ++i) {
        if (removal.tiers[i] == Tier::kGpu) gone.push_back(removal.blocks[i]);
      }
      index.check();
    }
    EXPECT(index.num_blocks(Tier::kGpu) == 0 && index.num_blocks(Tier::kCpu) == 0);
    // In the order of their last lookups, those that were not looked up first.
    std::vector<std::ptrdiff_t> last(2 * kNumLeaves, -1);
    for (std::size_t i = 0; i < order.size(); ++i) last[static_cast<std::size_t>(order[i])] = static_cast<std::ptrdiff_t>(i);
    std::ptrdiff_t before = -1;
    for (const BlockId id : gone) {
      if (id == num_leaves) continue;
      EXPECT(last[static_cast<std::size_t>(id)] >= before);
      before = last[static_cast<std::size_t>(id)];
    }
  }
}

void long_sequences_cost_what_they_hold() {
  PrefixIndex index(16);
  const std::size_t num_blocks = 20000;
  Tokens tokens(num_blocks * 16);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<Token>(i % 1000);
  Ids ids(num_blocks);
  for (std::size_t i = 0; i < num_blocks; ++i) ids[i] = static_cast<BlockId>(i);
  insert(index, tokens, ids);
  EXPECT(lookup(index, tokens).path.blocks == ids);
  EXPECT(index.memory_bytes() >= tokens.size() * sizeof(Token));
  EXPECT(index.evict_lru(num_blocks).blocks.size() == num_blocks);
  EXPECT(index.metrics().removed_blocks[0] == num_blocks && index.metrics().hits == 1);
  index.check();
}

}  // namespace

int main() {
  if (planted("overrun")) overrun();
  longest_prefix_is_found();
  what_is_cached_stays_and_slower_copies_give_way();
  eviction_takes_the_least_recent_leaf_first();
  a_lock_keeps_its_path_and_can_be_extended();
  blocks_move_between_tiers();
  what_is_invalidated_goes_with_what_only_led_to_it();
  a_snapshot_holds_everything_but_locks();
  events_tell_what_changed();
  equal_hashes_are_no_hit();
  full_tables_stay_whole();
  long_sequences_cost_what_they_hold();
  std::puts("functional: passed");
  return 0;
}
