// Runs scenarios on the host engine: turbomind_test --help.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "../expect.h"
#include "host_engine.h"
#include "scenarios.h"

namespace {

using namespace sage::host;

constexpr const char* kUsage =
    "Usage: turbomind_test [--table none|naive|native|example|all] [--steps N] [--seed N] [--faults] [--list] [SCENARIO ...]\n"
    "\n"
    "  --table   the table between engine and scenarios; all: each in turn (default)\n"
    "  --steps   of the long runs (1000)\n"
    "  --seed    of the random ones (1)\n"
    "  --faults  only plants faults, and sees that they are found\n"
    "  --list    names the scenarios\n"
    "\n"
    "Exit codes: 0 fine, 1 a finding, 2 misuse.\n";

int misuse() {
  std::fputs(kUsage, stderr);
  return 2;
}

bool run(const Scenario& scenario, const Lab& lab) {
  const auto start = std::chrono::steady_clock::now();
  const std::uint64_t before = Group::digest();
  try {
    scenario.run(lab);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "finding: %s with table %s, seed %llu, %d steps: %s\n", scenario.name, lab.table.c_str(),
                 static_cast<unsigned long long>(lab.seed), lab.num_steps, error.what());
    return false;
  }
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  std::printf("%-20s %-8s %016llx %8.1f ms\n", scenario.name, lab.table.c_str(),
              static_cast<unsigned long long>(Group::digest() - before), took.count());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Lab lab;
  const EngineFault fault = planted("uncomputed") ? EngineFault::kPublishUncomputed : EngineFault::kNone;
  lab.engines = [fault](const EngineOptions& options) { return std::make_unique<HostEngine>(options, fault); };
  lab.table = "all";
  std::vector<std::string> wanted;
  bool only_faults = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (option == "--list") {
      for (const Scenario& scenario : all_scenarios()) std::puts(scenario.name);
      return 0;
    }
    if (option == "--help") {
      std::fputs(kUsage, stdout);
      return 0;
    }
    if (option == "--faults") {
      only_faults = true;
    } else if (option.rfind("--", 0) != 0) {
      wanted.push_back(option);
    } else if (value == nullptr) {
      return misuse();
    } else {
      ++i;
      if (option == "--table") {
        lab.table = value;
      } else if (option == "--steps") {
        lab.num_steps = std::atoi(value);
      } else if (option == "--seed") {
        lab.seed = std::strtoull(value, nullptr, 10);
      } else {
        return misuse();
      }
    }
  }
  if (lab.num_steps < 1) return misuse();
  std::vector<Scenario> chosen;
  for (const Scenario& scenario : all_scenarios()) {
    bool named = wanted.empty();
    for (const std::string& name : wanted) named = named || name == scenario.name;
    if (named) chosen.push_back(scenario);
  }
  if (!wanted.empty() && chosen.size() != wanted.size()) {
    std::fputs("there is no such scenario; --list names them\n", stderr);
    return 2;
  }
  const std::vector<std::string> tables = {"none", "naive", "native", "example"};
  bool fine = true, known = false, first = true;
  for (const std::string& table : tables) {
    if (lab.table != "all" && lab.table != table) continue;
    known = true;
    Lab one = lab;
    one.table = table;
    for (const Scenario& scenario : only_faults ? std::vector<Scenario>{} : chosen) {
      const bool left_out = (scenario.tables == RunsWith::kEngineOrder && table == "example") ||
                            (scenario.tables == RunsWith::kItsOwn && !first);
      if (!left_out) fine = run(scenario, one) && fine;
    }
    first = false;
  }
  if (!known) return misuse();
  if (only_faults || wanted.empty()) {
    try {
      find_planted_faults(lab.seed);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "finding: %s\n", error.what());
      fine = false;
    }
  }
  if (fine) std::puts("turbomind: passed");
  return fine ? 0 : 1;
}
