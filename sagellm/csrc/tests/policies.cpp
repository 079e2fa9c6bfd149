// Parts of the policies: the map of keys, the set of places, the ranking; and one walk through each policy.

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "expect.h"
#include "policies/heap.h"
#include "policies/key_map.h"
#include "policies/queue.h"
#include "sagellm/object_cache.h"
#include "sagellm/prefix_replay.h"

namespace {

#define EXPECT_REFUSED(call)             \
  do {                                   \
    bool refused = false;                \
    try {                                \
      call;                              \
    } catch (const sage::PolicyError&) { \
      refused = true;                    \
    }                                    \
    EXPECT(refused);                     \
  } while (false)

void keys_are_found_while_others_leave() {
  std::mt19937_64 random(1);
  sage::KeyMap map;
  std::unordered_map<std::uint64_t, sage::Slot> plain;
  for (sage::Slot step = 0; step < 60000; ++step) {
    const std::uint64_t key = (random() % 3000) << (random() % 2 * 40);
    const auto found = plain.find(key);
    EXPECT(map.find(key) == (found == plain.end() ? sage::kNoSlot : found->second));
    if (found == plain.end()) {
      map.insert(key, step);
      plain.emplace(key, step);
    } else if (random() % 4 != 0) {
      map.erase(key);
      plain.erase(found);
    }
    EXPECT(map.size() == plain.size());
  }
}

void places_are_found_in_order() {
  std::mt19937_64 random(2);
  for (const std::size_t bound : {1, 64, 65, 5000, 300000}) {
    sage::PlaceSet set;
    set.reset(bound);
    std::set<std::size_t> plain;
    for (int step = 0; step < 4000; ++step) {
      const std::size_t place = random() % bound, from = random() % (bound + 70);
      if (random() % 2 != 0) {
        set.insert(place);
        plain.insert(place);
      } else {
        set.erase(place);
        plain.erase(place);
      }
      const auto next = plain.lower_bound(from);
      EXPECT(set.next(from) == (next == plain.end() ? sage::PlaceSet::kNone : *next));
    }
  }
}

// Against a list that is walked, with what a caller may do in any order.
void a_queue_gives_the_oldest_that_may_go() {
  std::mt19937_64 random(3);
  sage::Books books;
  sage::PinnedHost host(books);
  sage::PinnedQueue<sage::PinnedHost> queue(host);
  std::vector<sage::Slot> plain;
  std::set<sage::Slot> pinned;
  for (int step = 0; step < 20000; ++step) {
    const auto slot = static_cast<sage::Slot>(random() % 300);
    const auto found = std::find(plain.begin(), plain.end(), slot);
    host.ensure(slot);
    if (found == plain.end()) {
      host[slot].is_evictable = pinned.count(slot) == 0;
      queue.push(slot);
      plain.push_back(slot);
    } else if (random() % 3 == 0) {
      queue.erase(slot);
      plain.erase(found);
    } else if (random() % 2 == 0) {
      queue.move_to_newest(slot);
      plain.erase(found);
      plain.push_back(slot);
    } else {
      const bool was_pinned = pinned.erase(slot) != 0;
      if (!was_pinned) pinned.insert(slot);
      queue.set_evictable(slot, was_pinned);
    }
    sage::Slot first = sage::kNoSlot;
    for (const sage::Slot one : plain) {
      if (pinned.count(one) != 0) continue;
      first = one;
      break;
    }
    EXPECT(queue.first() == first && queue.size() == plain.size());
  }
}

void a_ranking_gives_the_lowest_that_may_go() {
  std::mt19937_64 random(4);
  sage::Books books;
  sage::PinnedHost host(books);
  sage::Ranking<sage::PinnedHost, std::uint64_t> ranking(host);
  std::map<sage::Slot, std::uint64_t> plain;
  std::set<sage::Slot> pinned;
  for (int step = 0; step < 20000; ++step) {
    const auto slot = static_cast<sage::Slot>(random() % 200);
    const std::uint64_t key = random() % 100000 * 200 + slot;
    host.ensure(slot);
    if (plain.count(slot) == 0) {
      host[slot].is_evictable = true;
      pinned.erase(slot);
      ranking.insert(slot, key);
      plain[slot] = key;
    } else if (random() % 3 == 0) {
      ranking.erase(slot);
      plain.erase(slot);
    } else if (random() % 2 == 0) {
      ranking.update(slot, key);
      plain[slot] = key;
    } else {
      const bool was_pinned = pinned.erase(slot) != 0;
      if (!was_pinned) pinned.insert(slot);
      ranking.set_evictable(slot, was_pinned);
    }
    sage::Slot first = sage::kNoSlot;
    for (const auto& [one, own] : plain) {
      if (pinned.count(one) == 0 && (first == sage::kNoSlot || own < plain[first])) first = one;
    }
    EXPECT(ranking.first() == first);
  }
}

std::vector<std::uint64_t> skewed(std::size_t count, std::uint64_t num_objects) {
  std::mt19937_64 random(5);
  std::vector<std::uint64_t> keys(count);
  for (auto& key : keys) key = std::min(random() % num_objects, random() % num_objects);
  return keys;
}

void every_policy_keeps_within_its_capacity() {
  const std::vector<std::uint64_t> keys = skewed(20000, 400);
  for (const std::string& name : sage::policy_names()) {
    for (const std::int64_t capacity : {1, 2, 33, 399}) {
      sage::PolicyOptions options;
      if (name == "belady") options.future = sage::foreseen(keys);
      const auto cache = sage::make_object_cache(name, capacity, options);
      std::uint64_t misses = 0;
      for (const std::uint64_t key : keys) {
        const bool was_there = cache->contains(key);
        EXPECT(cache->access(key) == was_there && cache->contains(key));
        EXPECT(cache->size() <= static_cast<std::size_t>(capacity));
        misses += !was_there;
      }
      const std::vector<std::uint64_t> left = cache->keys();
      EXPECT(left.size() == cache->size() && std::unordered_set<std::uint64_t>(left.begin(), left.end()).size() == left.size());
      EXPECT(cache->num_evicted() == misses - cache->size());
    }
  }
}

// Sessions that branch, several running, with outputs that preempt.
void every_policy_replays_prefixes() {
  std::mt19937_64 random(6);
  std::vector<std::uint64_t> keys;
  std::vector<std::int64_t> offsets{0};
  std::vector<std::int32_t> outputs;
  for (int request = 0; request < 3000; ++request) {
    const std::uint64_t session = random() % 40, length = 1 + random() % 12;
    for (std::uint64_t i = 0; i < length; ++i) keys.push_back(session << 32 | i);
    offsets.push_back(static_cast<std::int64_t>(keys.size()));
    outputs.push_back(static_cast<std::int32_t>(random() % 6));
  }
  const sage::PrefixTrace trace{keys.data(), keys.size(), offsets.data(), outputs.size(), outputs.data()};
  for (const std::string& name : sage::policy_names()) {
    for (const std::int64_t capacity : {24, 60, 120}) {
      const auto done = sage::replay_prefix(name, capacity, trace, sage::PrefixReplayOptions{4, -1}, {});
      EXPECT(done.num_evicted > 0 && done.num_evicted_soon <= done.num_evicted);
      EXPECT((done.num_preempted > 0) == (capacity < 60));
      std::int64_t retries = 0;
      for (const std::int64_t one : done.retries) retries += one;
      EXPECT(retries == done.num_preempted);
    }
    const sage::PrefixTrace alone{keys.data(), keys.size(), offsets.data(), outputs.size(), nullptr};
    const auto done = sage::replay_prefix(name, 9, alone, {}, {});
    EXPECT(done.num_oversized > 0 && done.num_evicted > 0);
  }
}

void what_cannot_be_is_refused() {
  EXPECT_REFUSED(sage::make_object_cache("best", 3, {}));
  EXPECT_REFUSED(sage::make_object_cache("lru", 0, {}));
  EXPECT_REFUSED(sage::make_object_cache("belady", 3, {}));
  sage::PolicyOptions options;
  options.numbers["protected_ratio"] = 2;
  EXPECT_REFUSED(sage::make_object_cache("slru", 3, options));
  EXPECT_REFUSED(sage::make_object_cache("lru", 3, options));
  const std::uint64_t keys[] = {1, 1};
  const std::int64_t offsets[] = {0, 2}, too_far[] = {0, 3};
  EXPECT_REFUSED(sage::replay_prefix("lru", 3, {keys, 2, offsets, 1, nullptr}, {}, {}));
  EXPECT_REFUSED(sage::replay_prefix("lru", 3, {keys, 2, too_far, 1, nullptr}, {}, {}));
}

}  // namespace

int main() {
  keys_are_found_while_others_leave();
  places_are_found_in_order();
  a_queue_gives_the_oldest_that_may_go();
  a_ranking_gives_the_lowest_that_may_go();
  every_policy_keeps_within_its_capacity();
  every_policy_replays_prefixes();
  what_cannot_be_is_refused();
  std::puts("policies: passed");
}
