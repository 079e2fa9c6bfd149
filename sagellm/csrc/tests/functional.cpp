// The prefix index where the fuzz target seldom or never comes: equal hashes, full tables, long sequences, damaged snapshots.
// Its answers to each call are checked there, against a model.

#include <algorithm>
#include <cstdint>
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
  const sage::Match match = lookup(*copy, {1, 2, 3, 4}, false, "a");
  EXPECT(match.path.blocks == Ids({0, 1}) && copy->entry(match.entry).metadata == "{\"user\": 1}");
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    EXPECT_ERROR(kArgument, PrefixIndex::restore(damaged));
    EXPECT_ERROR(kArgument, PrefixIndex::restore(bytes.substr(0, i)));
  }
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
  a_snapshot_holds_everything_but_locks();
  equal_hashes_are_no_hit();
  full_tables_stay_whole();
  long_sequences_cost_what_they_hold();
  std::puts("functional: passed");
  return 0;
}
