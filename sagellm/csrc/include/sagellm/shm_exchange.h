// The exchange of ranks that are processes of one host, and what it costs.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "sagellm/exchange.h"
#include "sagellm/shm_group.h"

namespace sage {

class ShmExchange final : public Exchange {
 public:
  enum Kind { kAddUp, kGather, kKinds };
  struct Costs {
    std::uint64_t count = 0, bytes = 0;
    std::uint64_t ns = 0, exposed_ns = 0;  // from begin to end; the caller's time
    std::vector<std::uint64_t> latencies;  // operations by time: one for each bound, and one for what takes longer
  };

  // `bounds_ns`: upper bounds of the times that are told apart, rising. `delay_ns`: what an exchange takes at least, to try what a
  // slower link does.
  ShmExchange(std::shared_ptr<ShmGroup> group, double timeout_s, std::vector<std::uint64_t> bounds_ns,
              std::uint64_t delay_ns = 0);

  void add_up(float* numbers, std::size_t count) override;
  void begin_sum(float* numbers, std::size_t count) override;
  void end_sum() override;
  void gather(float* numbers, std::size_t rows, std::size_t columns, std::size_t part) override;
  Costs costs(Kind kind) const;  // since the start; of any thread

 private:
  struct Begun {
    std::size_t count;
    std::uint64_t at_ns;
    bool is_done;  // already: it, or one that began after it, is too large for two calls
  };
  double deadline() const;
  // Waits for what is left of the delay, and counts the operation. `computed_ns`: of its time, in which the caller did something
  // else.
  void count(Kind kind, std::size_t bytes, std::uint64_t begun_ns, std::uint64_t computed_ns);

  const std::shared_ptr<ShmGroup> group_;
  const double timeout_s_;
  const std::vector<std::uint64_t> bounds_ns_;
  const std::uint64_t delay_ns_;
  std::deque<Begun> begun_;
  mutable std::mutex mutex_;
  std::array<Costs, kKinds> costs_;
};

}  // namespace sage
