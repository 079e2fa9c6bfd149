// The tables that scenarios run with.

#include <algorithm>
#include <numeric>

#include "../../examples/short_prompts_first.h"
#include "native_tables.h"
#include "scenarios.h"

namespace sage::host {

namespace {

// Order, hold, budget and admission at random. Asked on rank 0 alone, so it may be.
template <typename Base>
class AtRandom : public Base {
 public:
  template <typename... Arguments>
  explicit AtRandom(std::uint64_t seed, Arguments... arguments)
      : Base(arguments...), random_(static_cast<unsigned>(seed) * 7919 + 1) {}

  int schedule(const SageStep& step, const SageSequence*, int n, std::uint64_t* priorities, int* budget) override {
    if (random_() % 8 == 0) return 1;
    std::iota(priorities, priorities + n, std::uint64_t{1});
    std::shuffle(priorities, priorities + n, random_);
    for (int i = 0; i < n; ++i) {
      if (random_() % 8 == 0) priorities[i] = SAGE_PRIORITY_HOLD;
    }
    *budget = 1 + static_cast<int>(random_() % static_cast<unsigned>(step.max_budget));
    return 0;
  }
  int admit(const SageRequest*, int n, int max_admitted, std::int32_t* admitted) override {
    std::vector<std::int32_t> places(static_cast<std::size_t>(n));
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), random_);
    const int count = std::min<int>(n, 1 + static_cast<int>(random_() % static_cast<unsigned>(max_admitted)));
    std::copy_n(places.begin(), count, admitted);
    return count;
  }

 private:
  std::minstd_rand random_;
};

// Victims at random, the same on each rank because they depend on the round alone.
class RandomVictims : public NaiveTable {
 public:
  explicit RandomVictims(std::uint64_t seed) : NaiveTable(TableFault::kNone, kSchedule | kAdmit), seed_(seed) {}
  int evict(const SageManager& manager, const BlockId* cached, int n, int count, BlockId* victims) override {
    std::minstd_rand random(static_cast<unsigned>(manager.epoch * 31 + seed_));
    std::vector<BlockId> order(cached, cached + n);
    std::shuffle(order.begin(), order.end(), random);
    std::copy_n(order.begin(), count, victims);
    return count;
  }

 private:
  const std::uint64_t seed_;
};

template <typename Kind, typename... Arguments>
Table own(Arguments... arguments) {
  const auto table = std::make_shared<Kind>(arguments...);
  return {table, table->hooks(), nullptr};
}

}  // namespace

Table Lab::make_table() const {
  if (table == "naive") return own<NaiveTable>();
  if (table == "native") return native_table();
  if (table == "example") return {nullptr, short_prompts_first(), nullptr};
  return {};
}

Table Lab::make_random_table() const {
  if (table == "naive") return own<AtRandom<RandomVictims>>(seed, seed);
  if (table == "native") return native_random_table();
  if (table == "none") return own<AtRandom<TableBase>>(seed, unsigned{TableBase::kSchedule | TableBase::kAdmit});
  return make_table();
}

}  // namespace sage::host
