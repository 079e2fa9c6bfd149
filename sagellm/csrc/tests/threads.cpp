// Requests, readers, eviction, moves and listeners at once. A hit is checked against what was ever stored in its
// blocks, a locked prefix must not get shorter, and in the end every block is free or cached, none both and none lost.
// Fixed numbers of rounds, so that nothing here depends on the clock. Made to run under ThreadSanitizer.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
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

constexpr std::size_t kBlockSize = 4, kMaxBlocks = 12, kNumFamilies = 24;
constexpr std::size_t kPoolBlocks[] = {96, 64};

// The blocks of one tier, and every prefix that each of them ever held.
class Pool {
 public:
  explicit Pool(std::size_t num_blocks) : held_(num_blocks) {
    for (std::size_t i = 0; i < num_blocks; ++i) free_.push_back(static_cast<BlockId>(i));
  }
  // None if there are too few.
  Ids take(std::size_t count) {
    std::lock_guard guard(mutex_);
    if (free_.size() < count) return {};
    const Ids ids(free_.end() - static_cast<std::ptrdiff_t>(count), free_.end());
    free_.resize(free_.size() - count);
    return ids;
  }
  void give(BlockId id) {
    std::lock_guard guard(mutex_);
    free_.push_back(id);
  }
  void write(BlockId id, std::uint64_t prefix_hash) {
    std::lock_guard guard(mutex_);
    held_[static_cast<std::size_t>(id)].insert(prefix_hash);
  }
  bool ever_held(BlockId id, std::uint64_t prefix_hash) {
    std::lock_guard guard(mutex_);
    return held_.at(static_cast<std::size_t>(id)).count(prefix_hash) != 0;
  }
  Ids free() {
    std::lock_guard guard(mutex_);
    return free_;
  }

 private:
  std::mutex mutex_;
  Ids free_;
  std::vector<std::set<std::uint64_t>> held_;
};

struct World {
  PrefixIndex index{kBlockSize, 256};
  Pool pools[2] = {Pool(kPoolBlocks[0]), Pool(kPoolBlocks[1])};
  std::atomic<std::uint64_t> hits{0}, stored{0}, evicted{0}, moved{0}, promoted{0};
  std::atomic<int> requests_running{0};
  const bool has_race = planted("race");
  std::uint64_t unguarded = 0;

  Pool& pool(Tier tier) { return pools[static_cast<std::size_t>(tier)]; }
  void give_back(const sage::Removal& removal) {
    for (std::size_t i = 0; i < removal.blocks.size(); ++i) pool(removal.tiers[i]).give(removal.blocks[i]);
  }
};

std::string space_of(std::size_t family) { return family % 3 == 0 ? "b" : ""; }

// Families of a group of four share their first blocks.
Tokens sequence(std::size_t family, std::size_t num_tokens) {
  const std::size_t shared = kBlockSize * (1 + family % 4), group = family / 4;
  Tokens tokens(num_tokens);
  for (std::size_t i = 0; i < num_tokens; ++i)
    tokens[i] = static_cast<Token>((i < shared ? group : 100 + family) * 64 + i);
  return tokens;
}

std::vector<std::uint64_t> hashes(const Tokens& tokens) {
  std::vector<std::uint64_t> out(tokens.size() / kBlockSize);
  sage::prefix_hashes(tokens.data(), tokens.size(), kBlockSize, out.data());
  return out;
}

void check_path(World& world, const sage::BlockPath& path, const std::vector<std::uint64_t>& prefix,
                std::size_t first) {
  for (std::size_t i = 0; i < path.blocks.size(); ++i) {
    const Tier tier = path.tiers.empty() ? Tier::kGpu : path.tiers[i];
    EXPECT(world.pool(tier).ever_held(path.blocks[i], prefix.at(first + i)));
  }
}

void give_unused(World& world, const sage::Entry& entry, const Ids& ids) {
  world.give_back(entry.replaced);
  world.stored += entry.num_new_blocks;
  world.promoted += entry.replaced.blocks.size();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const bool used = entry.path.blocks[i] == ids[i] && (entry.path.tiers.empty() || entry.path.tiers[i] == Tier::kGpu);
    if (!used) world.pool(Tier::kGpu).give(ids[i]);
  }
}

// Ids of blocks into which the given prefixes were written; none if everything is locked, where an engine would wait.
Ids fresh_blocks(World& world, const std::uint64_t* prefix, std::size_t count) {
  Ids ids = world.pool(Tier::kGpu).take(count);
  while (ids.empty()) {
    const sage::Removal removal = world.index.evict_lru(count);
    world.evicted += removal.blocks.size();
    world.give_back(removal);
    if (removal.blocks.empty()) return ids;
    ids = world.pool(Tier::kGpu).take(count);
  }
  for (std::size_t i = 0; i < count; ++i) world.pool(Tier::kGpu).write(ids[i], prefix[i]);
  return ids;
}

// A request: what is cached is locked, the rest stored a few blocks at a time, then all is released.
void serve(World& world, const Tokens& tokens, const std::string& space) {
  const std::vector<std::uint64_t> prefix = hashes(tokens);
  sage::Match match, again;
  world.index.lookup(space, tokens.data(), tokens.size(), match, true, true);
  check_path(world, match.path, prefix, 0);
  world.hits += !match.path.blocks.empty();
  for (std::size_t done = match.path.blocks.size(); done < prefix.size();) {
    const std::size_t count = std::min<std::size_t>(3, prefix.size() - done);
    const Ids ids = fresh_blocks(world, &prefix[done], count);
    if (ids.empty()) break;
    const Token* rest = tokens.data() + done * kBlockSize;
    const sage::Entry entry = world.index.extend(match.lock, rest, count * kBlockSize, ids.data(), count);
    EXPECT(entry.path.blocks.size() == count && entry.token_hash == prefix[done + count - 1]);
    check_path(world, entry.path, prefix, done);
    give_unused(world, entry, ids);
    done += count;
  }
  world.index.lookup(space, tokens.data(), tokens.size(), again, false);
  EXPECT(again.path.blocks.size() >= match.path.blocks.size());
  world.index.unlock(match.lock);
}

// A request that computed everything anew: what lay on a slower tier comes back.
void store_all(World& world, const Tokens& tokens, const std::string& space) {
  const std::vector<std::uint64_t> prefix = hashes(tokens);
  const Ids ids = fresh_blocks(world, prefix.data(), prefix.size());
  if (ids.empty()) return;
  const sage::Entry entry = world.index.insert(space, tokens.data(), tokens.size(), ids.data(), ids.size());
  check_path(world, entry.path, prefix, 0);
  give_unused(world, entry, ids);
}

void run_requests(World& world, unsigned seed, std::size_t rounds) {
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < rounds; ++i) {
    if (world.has_race) ++world.unguarded;
    const std::size_t family = random() % kNumFamilies;
    const Tokens tokens = sequence(family, kBlockSize * (1 + random() % kMaxBlocks));
    (random() % 4 == 0 ? store_all : serve)(world, tokens, space_of(family));
  }
  --world.requests_running;
}

void read(World& world, unsigned seed, std::size_t rounds) {
  std::mt19937 random(seed);
  sage::Match match;
  for (std::size_t i = 0; i < rounds; ++i) {
    const std::size_t family = random() % kNumFamilies;
    const Tokens tokens = sequence(family, random() % (kMaxBlocks * kBlockSize + 1));
    world.index.lookup(space_of(family), tokens.data(), tokens.size(), match, random() % 2 == 0);
    check_path(world, match.path, hashes(tokens), 0);
    world.hits += !match.path.blocks.empty();
  }
}

// Moves the end of a prefix to the slower tier, under a lock, as one must whose bytes are to be copied first.
void demote(World& world, const Tokens& tokens, const std::string& space) {
  const std::vector<std::uint64_t> prefix = hashes(tokens);
  sage::Match match;
  world.index.lookup(space, tokens.data(), tokens.size(), match, false, true);
  Ids from;
  std::vector<std::uint64_t> held;
  for (std::size_t i = match.path.blocks.size() / 2; i < match.path.blocks.size(); ++i) {
    if (!match.path.tiers.empty() && match.path.tiers[i] != Tier::kGpu) continue;
    from.push_back(match.path.blocks[i]);
    held.push_back(prefix[i]);
  }
  const Ids to = world.pool(Tier::kCpu).take(from.size());
  if (to.empty()) {
    world.give_back(world.index.evict_lru(8, Tier::kCpu));
  } else {
    for (std::size_t i = 0; i < to.size(); ++i) world.pool(Tier::kCpu).write(to[i], held[i]);
    world.index.move(from.data(), to.data(), to.size(), Tier::kGpu, Tier::kCpu);
    world.moved += to.size();
    for (const BlockId id : from) world.pool(Tier::kGpu).give(id);
  }
  world.index.unlock(match.lock);
}

// Demotes, and now and then forgets a sequence.
void keep_house(World& world, unsigned seed, std::size_t rounds) {
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < rounds || world.requests_running > 0; ++i) {
    const std::size_t family = random() % kNumFamilies;
    const Tokens tokens = sequence(family, kBlockSize * (1 + random() % kMaxBlocks));
    if (random() % 16 != 0) {
      demote(world, tokens, space_of(family));
      continue;
    }
    try {
      world.give_back(world.index.invalidate(space_of(family), tokens.data(), tokens.size()));
    } catch (const sage::Error& error) {
      EXPECT(error.kind() == sage::ErrorKind::kLock);
    }
  }
}

// Everything that only reads, and must see the index at one moment. Not check(): an empty namespace outlives the last
// lock on it by a moment, which check() takes for a fault.
void watch(World& world) {
  std::uint64_t last = 0;
  while (world.requests_running > 0) {
    const auto copy = PrefixIndex::restore(world.index.snapshot());
    copy->check();
    const sage::Events news = world.index.events(last);
    EXPECT(news.num_lost + news.events.size() == news.last_sequence - last);
    last = news.last_sequence;
    const sage::Metrics metrics = world.index.metrics();
    EXPECT(metrics.hits <= metrics.lookups && metrics.blocks[0] <= kPoolBlocks[0]);
    for (const sage::Entry& entry : world.index.entries(std::nullopt)) EXPECT(entry.num_blocks <= kMaxBlocks);
    std::this_thread::yield();
  }
}

void account(World& world) {
  EXPECT(world.index.metrics().locks == 0);
  for (const Tier tier : {Tier::kGpu, Tier::kCpu}) {
    const sage::BlockTable table = world.index.blocks(tier, true);
    std::multiset<std::int64_t> places(table.block_ids.begin(), table.block_ids.end());
    for (const BlockId id : world.pool(tier).free()) places.insert(id);
    const std::size_t size = kPoolBlocks[static_cast<std::size_t>(tier)];
    EXPECT(places.size() == size && std::set<std::int64_t>(places.begin(), places.end()).size() == size);
  }
  world.index.check();
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 3000;
  World world;
  world.requests_running = 2;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 2; ++seed) threads.emplace_back(run_requests, std::ref(world), seed, rounds);
  for (unsigned seed = 10; seed < 13; ++seed) threads.emplace_back(read, std::ref(world), seed, 4 * rounds);
  threads.emplace_back(keep_house, std::ref(world), 20u, rounds);
  threads.emplace_back(watch, std::ref(world));
  for (std::thread& thread : threads) thread.join();
  account(world);
  const auto number = [](const std::atomic<std::uint64_t>& value) { return static_cast<unsigned long long>(value); };
  std::printf("threads: passed; %llu hits, %llu blocks stored, %llu evicted, %llu moved, %llu promoted\n",
              number(world.hits), number(world.stored), number(world.evicted), number(world.moved),
              number(world.promoted));
  EXPECT(world.hits > 0 && world.stored > 0 && world.evicted > 0 && world.moved > 0 && world.promoted > 0);
  return 0;
}
