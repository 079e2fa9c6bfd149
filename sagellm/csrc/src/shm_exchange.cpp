#include "sagellm/shm_exchange.h"

#include <algorithm>
#include <chrono>

namespace sage {

ShmExchange::ShmExchange(std::shared_ptr<ShmGroup> group, double timeout_s, std::vector<std::uint64_t> bounds_ns)
    : group_(std::move(group)), timeout_s_(timeout_s), bounds_ns_(std::move(bounds_ns)) {
  for (Costs& each : costs_) each.latencies.resize(bounds_ns_.size() + 1);
}

void ShmExchange::add_up(float* numbers, std::size_t count) {
  timed(kAddUp, count * sizeof(float), [&](double deadline) {
    group_->add_up(numbers, count, ShmNumber::kFloat32, "sum of a step, " + std::to_string(count) + " numbers", deadline);
  });
}

void ShmExchange::gather(const float* own, std::size_t count, float* all) {
  timed(kGather, count * sizeof(float) * group_->segment()->world_size(), [&](double deadline) {
    group_->gather(own, count * sizeof(float), all, "gathering of a step, " + std::to_string(count) + " numbers", deadline);
  });
}

ShmExchange::Costs ShmExchange::costs(Kind kind) const {
  const std::lock_guard lock(mutex_);
  return costs_[kind];
}

template <typename Call>
void ShmExchange::timed(Kind kind, std::size_t bytes, const Call& call) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  call(std::chrono::duration<double>(begin.time_since_epoch()).count() + timeout_s_);
  const auto ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - begin).count());
  const auto bucket = std::lower_bound(bounds_ns_.begin(), bounds_ns_.end(), ns) - bounds_ns_.begin();
  const std::lock_guard lock(mutex_);
  Costs& costs = costs_[kind];
  ++costs.count;
  costs.bytes += bytes;
  costs.ns += ns;
  ++costs.latencies[static_cast<std::size_t>(bucket)];
}

}  // namespace sage
