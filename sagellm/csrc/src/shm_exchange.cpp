#include "sagellm/shm_exchange.h"

#include <algorithm>
#include <chrono>

#include "shm_wait.h"

namespace sage {

namespace {

std::uint64_t clock_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

std::string label_of(const char* what, std::size_t count) {
  return std::string(what) + " of a step, " + std::to_string(count) + " numbers";
}

}  // namespace

ShmExchange::ShmExchange(std::shared_ptr<ShmGroup> group, double timeout_s, std::vector<std::uint64_t> bounds_ns,
                         std::uint64_t delay_ns)
    : group_(std::move(group)), timeout_s_(timeout_s), bounds_ns_(std::move(bounds_ns)), delay_ns_(delay_ns) {
  for (Costs& each : costs_) each.latencies.resize(bounds_ns_.size() + 1);
}

void ShmExchange::add_up(float* numbers, std::size_t count) {
  const std::uint64_t begun_ns = clock_ns();
  group_->add_up(numbers, count, ShmNumber::kFloat32, label_of("sum", count), deadline());
  this->count(kAddUp, count * sizeof(float), begun_ns, 0);
}

void ShmExchange::begin_sum(float* numbers, std::size_t count) {
  const std::uint64_t begun_ns = clock_ns();
  const bool is_large = count > group_->most_to_begin(ShmNumber::kFloat32);
  if (is_large) {  // at once, after those that are under way
    for (Begun& other : begun_) {
      if (!other.is_done) group_->end_sum(deadline());
      other.is_done = true;
    }
    group_->add_up(numbers, count, ShmNumber::kFloat32, label_of("sum", count), deadline());
  } else {
    group_->begin_sum(numbers, count, ShmNumber::kFloat32, label_of("piece", count), deadline());
  }
  begun_.push_back({count, begun_ns, is_large});
}

void ShmExchange::end_sum() {
  const std::uint64_t now = clock_ns();
  const Begun sum = begun_.front();
  begun_.pop_front();
  if (!sum.is_done) group_->end_sum(deadline());
  count(kAddUp, sum.count * sizeof(float), sum.at_ns, now - sum.at_ns);
}

void ShmExchange::gather(float* numbers, std::size_t rows, std::size_t columns, std::size_t part) {
  const std::uint64_t begun_ns = clock_ns();
  group_->gather_columns(numbers, rows, columns, part, label_of("gathering", rows * part), deadline());
  count(kGather, rows * columns * sizeof(float), begun_ns, 0);
}

ShmExchange::Costs ShmExchange::costs(Kind kind) const {
  const std::lock_guard lock(mutex_);
  return costs_[kind];
}

double ShmExchange::deadline() const { return shm_now() + timeout_s_; }

void ShmExchange::count(Kind kind, std::size_t bytes, std::uint64_t begun_ns, std::uint64_t computed_ns) {
  std::uint64_t now = clock_ns();
  for (; now < begun_ns + delay_ns_; now = clock_ns()) shm_pause();
  const std::uint64_t ns = now - begun_ns;
  const auto bucket = std::lower_bound(bounds_ns_.begin(), bounds_ns_.end(), ns) - bounds_ns_.begin();
  const std::lock_guard lock(mutex_);
  Costs& costs = costs_[kind];
  ++costs.count;
  costs.bytes += bytes;
  costs.ns += ns;
  costs.exposed_ns += ns - computed_ns;
  ++costs.latencies[static_cast<std::size_t>(bucket)];
}

}  // namespace sage
