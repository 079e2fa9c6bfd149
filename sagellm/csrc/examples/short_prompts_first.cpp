// A table in C++ without Python. Requests whose prompt is computed go first, then short prompts before long ones. The block
// that was used last is the first victim, which serves loops that are a little too long for the cache. The engine's own prefix
// cache stays.
//
// Both answers are functions of the arguments alone, so the ranks of a group agree without talking to each other.

#include "short_prompts_first.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <numeric>
#include <vector>

namespace {

// Nothing may be thrown from a hook: what cannot be decided is left to the engine.
std::int32_t evict(void* /*ctx*/, const SageManager* manager, const std::int32_t* cached, std::int32_t n, std::int32_t count,
                   std::int32_t* victims) noexcept {
  try {
    std::vector<SageBlockInfo> blocks(static_cast<std::size_t>(n));
    manager->api->block_info(manager->manager, cached, n, blocks.data());
    const auto newest_first = [](const SageBlockInfo& a, const SageBlockInfo& b) { return a.timestamp > b.timestamp; };
    std::partial_sort(blocks.begin(), blocks.begin() + count, blocks.end(), newest_first);
    for (std::int32_t i = 0; i < count; ++i) victims[i] = blocks[static_cast<std::size_t>(i)].id;
    return count;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

// Priorities must be distinct: the engine's own order decides between prompts of one length.
std::int32_t schedule(void* /*ctx*/, const SageStep* /*step*/, const SageSequence* sequences, std::int32_t n,
                      std::uint64_t* priorities, std::int32_t* /*budget*/) noexcept {
  try {
    std::vector<std::int32_t> order(static_cast<std::size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    const auto prompt_left = [sequences](std::int32_t i) { return sequences[i].prompt != nullptr ? sequences[i].n_prompt : 0; };
    std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      if (prompt_left(a) != prompt_left(b)) return prompt_left(a) < prompt_left(b);
      return sequences[a].priority < sequences[b].priority;
    });
    for (std::size_t place = 0; place < order.size(); ++place) priorities[order[place]] = place;
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

SageHooks make_table() {
  SageHooks hooks{};
  hooks.abi = SAGE_HOOKS_ABI;
  hooks.struct_size = sizeof hooks;
  hooks.evict = evict;
  hooks.schedule = schedule;
  return hooks;
}

}  // namespace

const SageHooks* short_prompts_first() {
  static const SageHooks hooks = make_table();
  return &hooks;
}
