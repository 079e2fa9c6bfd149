// The exchange of ranks that are processes of one host, and what it costs.
#pragma once

#include <array>
#include <cstdint>
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
    std::uint64_t count = 0, bytes = 0, ns = 0;
    std::vector<std::uint64_t> latencies;  // operations by time: one for each bound, and one for what takes longer
  };

  // `bounds_ns`: upper bounds of the times that are told apart, rising.
  ShmExchange(std::shared_ptr<ShmGroup> group, double timeout_s, std::vector<std::uint64_t> bounds_ns);

  void add_up(float* numbers, std::size_t count) override;
  void gather(const float* own, std::size_t count, float* all) override;
  Costs costs(Kind kind) const;  // since the start; of any thread

 private:
  template <typename Call>
  void timed(Kind kind, std::size_t bytes, const Call& call);

  const std::shared_ptr<ShmGroup> group_;
  const double timeout_s_;
  const std::vector<std::uint64_t> bounds_ns_;
  mutable std::mutex mutex_;
  std::array<Costs, kKinds> costs_;
};

}  // namespace sage
