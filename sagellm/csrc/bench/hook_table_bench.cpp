// The time that the hook table adds to a step of TurboMind: all its calls of a step together.
//
//   hook_table_bench [BLOCKS [STEPS]]
//
// A pool of BLOCKS blocks of 64 tokens, all of them in use or cached, and 256 sequences that decode. A sequence has one of 64
// system prompts of 16 blocks, a document of 4 to 12 blocks of its own, and generates 8 blocks. When it ends another one comes,
// which is looked up, and victims are asked for as blocks are needed. The pool is played by a free list and use counts, so that
// next to nothing but the table is timed. Prints one JSON object; microseconds a step, CPU time of the thread.

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "sagellm/hook_table.h"

namespace {

constexpr std::int32_t kBlockLen = 64, kSequences = 256;
constexpr std::int32_t kSystems = 64, kSystemBlocks = 16, kDocumentBlocks[] = {4, 12}, kGeneratedBlocks = 8;

double now_us() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

class Pool {
 public:
  explicit Pool(std::int32_t num_blocks) : unique_ids_(size(num_blocks)), use_counts_(size(num_blocks)) {
    for (std::int32_t id = num_blocks; id-- > 0;) free_.push_back(id);
  }
  std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
  std::int32_t take() {
    const std::int32_t id = free_.back();
    free_.pop_back();
    unique_ids_[size(id)] = ++last_unique_id_;
    use_counts_[size(id)] = 1;
    return id;
  }
  void give(std::int32_t id) {
    if (unique_ids_[size(id)] == 0 || use_counts_[size(id)] != 0) std::abort();  // no victim that a pool could give up
    unique_ids_[size(id)] = 0;
    free_.push_back(id);
  }
  void hold(std::int32_t id) { ++use_counts_[size(id)]; }
  void release(std::int32_t id) { --use_counts_[size(id)]; }
  std::uint64_t unique_id(std::int32_t id) const { return unique_ids_[size(id)]; }

  static std::int32_t block_info(void* manager, const std::int32_t* ids, std::int32_t n, SageBlockInfo* out) {
    const auto& pool = *static_cast<const Pool*>(manager);
    for (std::int32_t i = 0; i < n; ++i) {
      const std::size_t id = size(ids[i]);
      out[i] = SageBlockInfo{};
      out[i].id = ids[i];
      out[i].use_count = pool.use_counts_[id];
      out[i].unique_id = pool.unique_ids_[id];
      out[i].state = pool.use_counts_[id] > 0 ? SAGE_BLOCK_ACTIVE : out[i].unique_id ? SAGE_BLOCK_CACHED : SAGE_BLOCK_FREE;
    }
    return n;
  }
  static void counts(void* manager, SageCounts* out) {
    out->max_blocks = static_cast<std::int32_t>(static_cast<const Pool*>(manager)->unique_ids_.size());
  }

 private:
  static std::size_t size(std::int32_t value) { return static_cast<std::size_t>(value); }
  std::vector<std::uint64_t> unique_ids_;
  std::vector<std::int32_t> use_counts_, free_;
  std::uint64_t last_unique_id_ = 0;
};

struct Sequence {
  std::uint64_t id = 0;
  std::vector<std::int32_t> tokens, blocks;
  std::vector<std::uint64_t> unique_ids;
  std::int32_t num_left = 0;  // tokens to generate
};

class Engine {
 public:
  Engine(std::int32_t num_blocks, const SageHooks& hooks) : hooks_(hooks), pool_(num_blocks) {
    manager_.struct_size = sizeof manager_;
    manager_.manager = &pool_;
    manager_.api = &api_;
    manager_.engine = manager_.generation = 1;
    manager_.n_ranks = 1;
    manager_.block_len = kBlockLen;
    for (auto& system : systems_) system = text(kSystemBlocks * kBlockLen);
    for (auto& sequence : sequences_) begin(sequence);
    while (pool_.num_free() > 0) replace(sequences_[random_() % kSequences]);
    for (auto& sequence : sequences_) sequence.num_left = 1 + static_cast<std::int32_t>(random_() % kGeneratedTokens);
  }

  // Microseconds inside the table.
  double step() {
    spent_us_ = 0;
    ++manager_.epoch;
    for (auto& sequence : sequences_) {
      if (--sequence.num_left == 0) {
        replace(sequence);
      } else if (sequence.num_left % kBlockLen == 0) {
        for (std::int32_t i = 0; i < kBlockLen; ++i) sequence.tokens.push_back(token());
        grow(sequence, 1);
      }
    }
    return spent_us_;
  }

  std::uint64_t num_evicted = 0, num_arrived = 0, num_topped_up = 0;

 private:
  static constexpr std::int32_t kGeneratedTokens = kGeneratedBlocks * kBlockLen;

  std::int32_t token() { return static_cast<std::int32_t>(random_() & 0x1ffff); }
  std::vector<std::int32_t> text(std::int32_t num_tokens) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(num_tokens));
    for (auto& value : tokens) value = token();
    return tokens;
  }
  template <typename Call>
  auto timed(Call&& call) {
    const double start = now_us();
    const auto result = call();
    spent_us_ += now_us() - start - clock_us_;
    return result;
  }

  void begin(Sequence& sequence) {
    sequence = Sequence{};
    sequence.id = ++num_arrived;
    sequence.tokens = systems_[random_() % kSystems];
    constexpr std::uint32_t kChoices = kDocumentBlocks[1] - kDocumentBlocks[0] + 1;
    const auto document = text((kDocumentBlocks[0] + static_cast<std::int32_t>(random_() % kChoices)) * kBlockLen);
    sequence.tokens.insert(sequence.tokens.end(), document.begin(), document.end());
    sequence.num_left = kGeneratedTokens;

    const auto num_blocks = static_cast<std::int32_t>(sequence.tokens.size()) / kBlockLen;
    sequence.blocks.resize(static_cast<std::size_t>(num_blocks));
    sequence.unique_ids.resize(static_cast<std::size_t>(num_blocks));
    SageSequence seen{};
    seen.seq_id = sequence.id;
    seen.prompt = sequence.tokens.data();
    seen.n_prompt = static_cast<std::int32_t>(sequence.tokens.size());
    const std::int32_t found = timed([&] {
      return hooks_.prefix_lookup(hooks_.ctx, &manager_, &seen, num_blocks - 1, sequence.blocks.data(),
                                  sequence.unique_ids.data());
    });
    sequence.blocks.resize(static_cast<std::size_t>(found));
    sequence.unique_ids.resize(static_cast<std::size_t>(found));
    for (const std::int32_t id : sequence.blocks) pool_.hold(id);
    grow(sequence, num_blocks - found);
    store(sequence, SAGE_STORE_PROMPT);
  }

  void replace(Sequence& sequence) {
    store(sequence, SAGE_STORE_GENERATION);
    timed([&] {
      hooks_.released(hooks_.ctx, &manager_, sequence.id, sequence.blocks.data(), sequence.unique_ids.data(),
                      static_cast<std::int32_t>(sequence.blocks.size()));
      return 0;
    });
    for (const std::int32_t id : sequence.blocks) pool_.release(id);
    begin(sequence);
  }

  void store(Sequence& sequence, std::int32_t kind) {
    const auto num_blocks = static_cast<std::int32_t>(sequence.tokens.size()) / kBlockLen;
    timed([&] {
      hooks_.prefix_store(hooks_.ctx, &manager_, sequence.id, kind, sequence.tokens.data(), sequence.blocks.data(),
                          sequence.unique_ids.data(), num_blocks);
      return 0;
    });
  }

  void grow(Sequence& sequence, std::int32_t count) {
    const std::int32_t missing = count - pool_.num_free();
    if (missing > 0) {
      std::vector<std::int32_t> victims(static_cast<std::size_t>(missing));
      std::vector<std::uint64_t> unique_ids;
      const std::int32_t n = timed([&] { return hooks_.evict(hooks_.ctx, &manager_, nullptr, 0, missing, victims.data()); });
      if (n < missing) std::abort();  // an engine would take any cached block; here the table knows of all
      for (const std::int32_t id : victims) unique_ids.push_back(pool_.unique_id(id));
      timed([&] {
        hooks_.evicted(hooks_.ctx, &manager_, victims.data(), unique_ids.data(), n);
        return 0;
      });
      for (const std::int32_t id : victims) pool_.give(id);
      num_evicted += static_cast<std::uint64_t>(n);
    }
    for (std::int32_t i = 0; i < count; ++i) {
      sequence.blocks.push_back(pool_.take());
      sequence.unique_ids.push_back(pool_.unique_id(sequence.blocks.back()));
    }
  }

  static double clock_cost_us() {
    const double start = now_us();
    for (int i = 0; i < 1000; ++i) now_us();
    return (now_us() - start) / 1001;
  }

  const SageHooks& hooks_;
  const SageKvApi api_{SAGE_HOOKS_ABI, sizeof(SageKvApi), Pool::block_info, Pool::counts, nullptr};
  Pool pool_;
  SageManager manager_{};
  std::mt19937 random_{1};
  std::vector<std::int32_t> systems_[kSystems];
  Sequence sequences_[kSequences];
  double spent_us_ = 0;
  const double clock_us_ = clock_cost_us();
};

}  // namespace

int main(int argc, char** argv) {
  const std::int32_t num_blocks = argc > 1 ? std::atoi(argv[1]) : 10'000;
  const int num_steps = argc > 2 ? std::atoi(argv[2]) : 2'000;
  if (num_blocks < kSequences * (kSystemBlocks + kDocumentBlocks[1] + kGeneratedBlocks + 1) || num_steps < 4) {
    std::fprintf(stderr, "usage: hook_table_bench [BLOCKS [STEPS]]; at least 9472 blocks and 4 steps\n");
    return 2;
  }
  sage::HookTable& table = sage::HookTable::make({});
  Engine engine(num_blocks, *table.hooks());
  const std::uint64_t arrived = engine.num_arrived, evicted = engine.num_evicted;
  const sage::HookTableStats before = table.stats();
  std::vector<double> steps;
  double total = 0;
  for (int i = 0; i < num_steps; ++i) {
    steps.push_back(engine.step());
    total += steps.back();
  }
  std::sort(steps.begin(), steps.end());
  const auto quantile = [&](double share) { return steps[static_cast<std::size_t>(share * (num_steps - 1))]; };
  const sage::HookTableStats stats = table.stats();
  std::printf(
      "{\"blocks\": %d, \"steps\": %d, \"us_a_step\": {\"mean\": %.2f, \"p25\": %.2f, \"p50\": %.2f, \"p75\": %.2f, "
      "\"p99\": %.2f}, \"arrivals_a_step\": %.2f, \"victims_a_step\": %.2f, \"hit_tokens\": %.3f, \"refused\": %llu}\n",
      num_blocks, num_steps, total / num_steps, quantile(.25), quantile(.5), quantile(.75), quantile(.99),
      static_cast<double>(engine.num_arrived - arrived) / num_steps,
      static_cast<double>(engine.num_evicted - evicted) / num_steps,
      static_cast<double>(stats.hit_tokens - before.hit_tokens) / static_cast<double>(stats.query_tokens - before.query_tokens),
      static_cast<unsigned long long>(stats.refused));
  return stats.refused == 0 ? 0 : 1;
}
