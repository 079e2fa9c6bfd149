// Scenarios for engines and tables. Each scenario is a function on the interfaces; the checks of the host run in each.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine.h"
#include "group.h"
#include "naive_table.h"

namespace sage::host {

// A table, and what keeps it alive.
struct Table {
  std::shared_ptr<const void> owner;
  const SageHooks* hooks = nullptr;
  std::function<void()> check;  // once its engines are gone; throws Violation
};

struct Lab {
  EngineFactory engines;
  std::string table = "naive";  // "none": the engine's own prefix cache; "naive", "native", "example"
  std::uint64_t seed = 1;
  int num_steps = 1000;  // of the long runs

  Table make_table() const;
  // As make_table, and decides at random who goes, who runs and who comes in: differently for each rank that asks, unless
  // the table itself sees to it that the ranks of a group are answered alike.
  Table make_random_table() const;
  bool has_table() const { return table != "none"; }
};

enum class RunsWith {
  kEveryTable,
  kEngineOrder,  // every table that leaves the order of requests to the engine
  kItsOwn        // one run is enough
};

struct Scenario {
  const char* name;
  void (*run)(const Lab& lab);
  RunsWith tables = RunsWith::kEveryTable;
};

std::vector<Scenario> prefix_scenarios();
std::vector<Scenario> memory_scenarios();
std::vector<Scenario> lifecycle_scenarios();
std::vector<Scenario> steering_scenarios();
std::vector<Scenario> migration_scenarios();
std::vector<Scenario> long_scenarios();
std::vector<Scenario> all_scenarios();

// Plants one fault after the other, in the engine or in the table, and throws unless it is found by the words it should be
// found by, or coped with where an engine must cope.
void find_planted_faults(std::uint64_t seed);

inline void require(bool fine, const std::string& what) {
  if (!fine) throw Violation(what);
}

// `count` tokens that no other `text` begins with.
inline Tokens text(int number, int count) {
  Tokens tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(number * 100000 + i);
  return tokens;
}
inline Tokens operator+(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace sage::host
