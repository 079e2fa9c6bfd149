// Blocks that one set of replicas keeps and gives up.

#include "block_cache.h"

#include <cstdint>
#include <cstdio>
#include <vector>

#include "expect.h"

namespace {

using Ids = std::vector<std::int32_t>;
using UniqueIds = std::vector<std::uint64_t>;

struct Cache {
  explicit Cache(std::size_t max_blocks = 64) : blocks(2, max_blocks), busy(max_blocks) {}

  // Ids double as unique ids, plus 100.
  std::size_t store(const Ids& tokens, const Ids& ids) {
    UniqueIds unique;
    for (const std::int32_t id : ids) unique.push_back(static_cast<std::uint64_t>(id) + 100);
    return blocks.store(tokens.data(), ids.data(), unique.data(), ids.size(), path);
  }
  Ids lookup(const Ids& tokens) {
    Ids ids;
    UniqueIds unique;
    blocks.lookup(tokens.data(), tokens.size(), ids, unique);
    for (std::size_t i = 0; i < ids.size(); ++i) EXPECT(unique[i] == static_cast<std::uint64_t>(ids[i]) + 100);
    return ids;
  }
  void release(const Ids& ids, bool ended) {
    UniqueIds unique;
    for (const std::int32_t id : ids) unique.push_back(static_cast<std::uint64_t>(id) + 100);
    blocks.released(ids.data(), unique.data(), ids.size(), ended);
  }
  Ids victims(std::size_t count) {
    Ids out;
    blocks.choose_victims(
        count,
        [&](std::int32_t id, std::uint64_t unique) {
          return unique == static_cast<std::uint64_t>(id) + 100 && !busy[static_cast<std::size_t>(id)];
        },
        out);
    blocks.evicted(out.data(), out.size());
    for (const std::int32_t id : out) busy[static_cast<std::size_t>(id)] = true;  // free, or given out again
    blocks.check();
    return out;
  }

  sage::BlockCache blocks;
  std::vector<bool> busy;
  Ids path;
};

void remains_of_ended_sequences_go_first() {
  Cache cache;
  EXPECT(cache.store({1, 2, 3, 4}, {0, 1}) == 2);
  EXPECT(cache.store({1, 2, 3, 4, 5, 6}, {7, 8, 9}) == 1);  // 7 and 8 hold what 0 and 1 hold
  EXPECT(cache.path == Ids({0, 1, 9}) && cache.lookup({1, 2, 3, 4, 5, 6}) == cache.path);
  cache.release({7, 8, 9, 10}, true);
  EXPECT(cache.victims(3) == Ids({10, 8, 7}));
  EXPECT(cache.victims(3) == Ids({9, 1, 0}));
  EXPECT(cache.victims(3).empty() && cache.blocks.num_indexed() == 0);
}

void what_a_preempted_sequence_holds_ages() {
  Cache cache;
  cache.store({1, 1}, {0});
  cache.release({20, 21}, false);
  cache.store({2, 2}, {1});
  cache.release({20}, true);  // it came back, ended, and is in both queues
  EXPECT(cache.victims(1) == Ids({20}));
  EXPECT(cache.victims(4) == Ids({0, 21, 1}));
}

void a_preempted_sequence_loses_its_end_first() {
  Cache cache;
  cache.store({1, 1, 2, 2, 3, 3}, {0, 1, 2});
  cache.store({9, 9}, {8});
  cache.release({0, 1, 2, 30, 31}, false);  // it has run since, and goes on from the first block that it lost
  EXPECT(cache.victims(9) == Ids({8, 31, 30, 2, 1, 0}));
}

void what_was_queued_and_stored_since_goes_once() {
  Cache cache;
  cache.release({3}, false);
  cache.store({1, 1}, {3});  // it came back, and was preempted again
  cache.release({3}, false);
  EXPECT(cache.victims(4) == Ids({3}));
}

void blocks_in_use_are_no_victims() {
  Cache cache;
  cache.store({1, 1, 2, 2, 3, 3}, {0, 1, 2});
  cache.store({9, 9}, {3});
  cache.busy[0] = cache.busy[1] = true;
  EXPECT(cache.victims(4) == Ids({2, 3}));
  EXPECT(cache.lookup({1, 1, 2, 2, 3, 3}) == Ids({0, 1}));
  cache.busy[1] = false;
  EXPECT(cache.victims(4) == Ids({1}));
  cache.release({5}, true);
  cache.busy[5] = true;
  EXPECT(cache.victims(4).empty());
  cache.busy[5] = false;
  EXPECT(cache.victims(4).empty());  // its holder tells when it is released again
}

void what_continues_an_evicted_block_is_of_no_use() {
  Cache cache;
  cache.store({1, 1, 2, 2, 3, 3}, {0, 1, 2});
  const Ids middle{1};
  cache.blocks.evicted(middle.data(), 1);  // by someone else's choice
  EXPECT(cache.lookup({1, 1, 2, 2, 3, 3}) == Ids({0}));
  EXPECT(cache.victims(1) == Ids({2}));
}

void queues_stay_small_whoever_chooses() {
  Cache cache(8);
  for (std::uint64_t turn = 0; turn < 10'000; ++turn) {
    const Ids id{static_cast<std::int32_t>(turn % 8)};
    const UniqueIds unique_id{1000 + turn};
    cache.blocks.released(id.data(), unique_id.data(), 1, turn % 3 != 0);
    cache.blocks.released(id.data(), unique_id.data(), 1, false);
    cache.blocks.evicted(id.data(), 1);
    EXPECT(cache.blocks.num_queued() <= 32);
  }
}

void an_id_that_comes_back_unannounced_is_another_block() {
  Cache cache;
  cache.store({1, 1, 2, 2}, {0, 1});
  const Ids tokens{5, 5}, ids{0};
  const UniqueIds unique{777};
  EXPECT(cache.blocks.store(tokens.data(), ids.data(), unique.data(), 1, cache.path) == 1);
  cache.blocks.check();
  EXPECT(cache.lookup({1, 1, 2, 2}).empty());
  const Ids far{64};
  EXPECT_ERROR(kArgument, cache.blocks.evicted(far.data(), 1));
}

}  // namespace

int main() {
  remains_of_ended_sequences_go_first();
  what_a_preempted_sequence_holds_ages();
  a_preempted_sequence_loses_its_end_first();
  what_was_queued_and_stored_since_goes_once();
  blocks_in_use_are_no_victims();
  what_continues_an_evicted_block_is_of_no_use();
  queues_stay_small_whoever_chooses();
  an_id_that_comes_back_unannounced_is_another_block();
  std::puts("block_cache: passed");
  return 0;
}
