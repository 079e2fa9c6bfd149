#include "native_tables.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <random>

#include "sagellm/hook_table.h"

namespace sage::host {

namespace {

class Dice final : public Advisor {
 public:
  bool select_victims(const SageManager&, const std::int32_t* cached, std::int32_t n, std::int32_t count,
                      std::vector<std::int32_t>& victims) noexcept override {
    const std::lock_guard guard(mutex_);
    if (random_() % 8 == 0) return false;
    victims.assign(cached, cached + n);
    std::shuffle(victims.begin(), victims.end(), random_);
    victims.resize(static_cast<std::size_t>(count));
    return true;
  }
  bool schedule(const SageStep& step, const SageSequence*, std::int32_t n, std::uint64_t* priorities,
                std::int32_t* budget) noexcept override {
    const std::lock_guard guard(mutex_);
    if (random_() % 8 == 0) return false;
    std::iota(priorities, priorities + n, std::uint64_t{1});
    std::shuffle(priorities, priorities + n, random_);
    for (std::int32_t i = 0; i < n; ++i) {
      if (random_() % 8 == 0) priorities[i] = SAGE_PRIORITY_HOLD;
    }
    *budget = 1 + static_cast<std::int32_t>(random_() % static_cast<unsigned>(step.max_budget));
    return true;
  }
  bool admit(std::uint64_t, std::int32_t, const SageRequest*, std::int32_t n, std::int32_t max_admitted,
             std::vector<std::int32_t>& admitted) noexcept override {
    const std::lock_guard guard(mutex_);
    if (random_() % 4 == 0) return false;
    admitted.resize(static_cast<std::size_t>(n));
    std::iota(admitted.begin(), admitted.end(), 0);
    std::shuffle(admitted.begin(), admitted.end(), random_);
    admitted.resize(static_cast<std::size_t>(std::min(n, max_admitted)));
    return true;
  }

 private:
  std::mutex mutex_;
  std::mt19937 random_{std::random_device{}()};  // no seed on purpose: nothing may depend on what it answers
};

Table checked(HookTable& table) {
  const auto check = [&table] {
    const HookTableStats stats = table.stats();
    require(stats.divergences == 0, said("ranks asked for different things, times", stats.divergences));
    require(stats.refused == 0, said("calls made no sense to the table:", stats.refused));
    require(stats.lookups > 0 && stats.decisions > 0, "the table was not asked");
    require(stats.replicas == 0 && stats.cached_blocks == 0, "the table keeps what its engines no longer have");
  };
  return {nullptr, table.hooks(), check};
}

}  // namespace

Table native_table() { return checked(HookTable::make({})); }

Table native_random_table() {
  HookTableOptions options;
  options.schedule = options.admit = true;
  return checked(HookTable::make(options, std::make_shared<Dice>()));
}

}  // namespace sage::host
