// GCC calls __sanitizer_cov_trace_pc on every edge; this file itself must be compiled without that.

#include "coverage.h"

namespace sage::fuzz {
namespace {

constexpr std::size_t kMapSize = std::size_t{1} << 16;

struct Map {
  std::uint8_t counts[kMapSize];
  std::uint32_t touched[kMapSize];  // the places in `counts` that are not 0
  std::size_t num_touched;
  std::uintptr_t last;
};

thread_local Map map;

std::uint32_t magnitude(std::uint32_t count) {
  std::uint32_t bits = 0;
  for (; count != 0; count >>= 1) ++bits;
  return bits;
}

}  // namespace

bool has_coverage() { return map.num_touched != 0; }

void start_coverage() {
  for (std::size_t i = 0; i < map.num_touched; ++i) map.counts[map.touched[i]] = 0;
  map.num_touched = 0;
}

std::vector<std::uint32_t> covered() {
  std::vector<std::uint32_t> features;
  features.reserve(map.num_touched);
  for (std::size_t i = 0; i < map.num_touched; ++i) {
    features.push_back(map.touched[i] * 16 + magnitude(map.counts[map.touched[i]]));
  }
  return features;
}

}  // namespace sage::fuzz

extern "C" __attribute__((visibility("default"))) void __sanitizer_cov_trace_pc();
extern "C" void __sanitizer_cov_trace_pc() {
  using sage::fuzz::map;
  const auto here = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  const std::size_t edge = (here ^ (map.last >> 1)) & (sage::fuzz::kMapSize - 1);
  map.last = here;
  std::uint8_t& count = map.counts[edge];
  if (count == 0) map.touched[map.num_touched++] = static_cast<std::uint32_t>(edge);
  if (count != 255) ++count;
}
