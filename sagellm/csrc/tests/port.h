// Helpers of tests of the port of plug-ins: its options, an engine that asks, an answer.
#pragma once

#include "sagellm/plugin_port.h"

#include <cstdint>
#include <utility>
#include <vector>

using sage::PluginPort;
using sage::PortAnswer;
using sage::PortDelivery;
using sage::PortOptions;
using sage::PortQuestion;
using Ids = std::vector<std::int32_t>;

inline constexpr double kLong = 60, kShort = 0.05;  // seconds
inline constexpr std::uint32_t kEverything = ~0u;

inline PortOptions options(double time_limit_s, std::uint32_t topics = kEverything) {
  PortOptions out;
  out.time_limit_s = time_limit_s;
  out.topics = topics;
  return out;
}

inline std::int32_t block_info(void*, const std::int32_t* ids, std::int32_t n, SageBlockInfo* out) {
  for (std::int32_t i = 0; i < n; ++i) {
    out[i] = SageBlockInfo{};
    out[i].id = ids[i];
    out[i].timestamp = 1000u + static_cast<std::uint64_t>(ids[i]);
  }
  return n;
}

inline void counts(void*, SageCounts* out) { out->total = 77; }

inline const SageKvApi kApi{SAGE_HOOKS_ABI, sizeof(SageKvApi), block_info, counts, nullptr};

inline SageManager manager(std::uint64_t generation = 1) {
  SageManager out{};
  out.struct_size = sizeof(SageManager);
  out.api = &kApi;
  out.engine = 5;
  out.n_ranks = 1;
  out.block_len = 4;
  out.generation = generation;
  return out;
}

inline PortAnswer chosen(Ids ids) {
  PortAnswer answer;
  answer.is_default = false;
  answer.chosen = std::move(ids);
  return answer;
}

inline bool ask_victims(PluginPort& port, const Ids& cached, std::int32_t count, Ids& victims) {
  return port.select_victims(manager(), cached.data(), static_cast<std::int32_t>(cached.size()), count, victims);
}
