// Which block continues which, from what was stored and evicted: the trees that victims are chosen from.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "sage_hooks.h"

namespace sage {

// Kept for each set of replicas by itself; a new generation of it begins with nothing. Safe for several threads.
class StoredBlocks {
 public:
  // The first blocks of a sequence are stored. Returns how many of them, from the first one on, were so already.
  std::int32_t stored(const SageManager& manager, const std::int32_t* ids, std::int32_t num_blocks);
  void evicted(const SageManager& manager, const std::int32_t* ids, std::int32_t n);
  void forget(const SageManager& manager);  // all of a set of replicas
  // For candidates in ascending order: the candidate each one continues, or -1; and the tokens of its prefix up to its end,
  // or 0 if it is not known to be in one. O(n).
  void describe(const SageManager& manager, const std::int32_t* ids, std::int32_t n, std::vector<std::int32_t>& parents,
                std::vector<std::int32_t>& depths);

 private:
  struct Row {
    std::uint64_t serial = 0;         // of this stay in the cache; 0 while not stored
    std::uint64_t parent_serial = 0;  // a parent that was evicted and came back as another block is no parent
    std::int32_t parent = -1, depth = 0;
  };
  struct Pool {
    std::uint64_t generation = 0;
    std::vector<Row> rows;  // by block id
  };
  Pool& pool_of(const SageManager& manager);

  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::int32_t>, Pool> pools_;  // by engine and group
  std::uint64_t last_serial_ = 0;
};

}  // namespace sage
