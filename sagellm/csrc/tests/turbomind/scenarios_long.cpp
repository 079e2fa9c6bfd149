// Everything at once, at random, for as many steps as asked for.

#include <algorithm>
#include <random>

#include "scenarios.h"

namespace sage::host {

namespace {

// Conversations over a few texts: prompts share beginnings, go on where others ended, and repeat.
class Clients {
 public:
  Clients(Group& group, std::uint64_t seed) : group_(group), random_(static_cast<unsigned>(seed * 2654435761u + 1)) {}

  void act() {
    if (below(100) < 35) submit();
    if (!seq_ids_.empty() && below(100) < 8) group_.cancel(seq_ids_[seq_ids_.size() - 1 - below(std::min<std::size_t>(seq_ids_.size(), 10))]);
  }
  std::size_t below(std::size_t n) { return random_() % n; }

 private:
  void submit() {
    Tokens prompt = text(static_cast<int>(below(5)), static_cast<int>(1 + below(24)));
    if (below(3) > 0) prompt = prompt + text(10 + static_cast<int>(below(4)), static_cast<int>(1 + below(20)));
    if (!seq_ids_.empty() && below(4) == 0) {
      const Request& earlier = group_.request(seq_ids_[seq_ids_.size() - 1 - below(std::min<std::size_t>(seq_ids_.size(), 30))]);
      if (earlier.tokens.size() < 60) prompt = earlier.tokens + text(20, static_cast<int>(1 + below(6)));
    }
    seq_ids_.push_back(group_.submit(prompt, static_cast<int>(1 + below(12))));
  }

  Group& group_;
  std::minstd_rand random_;
  std::vector<SeqId> seq_ids_;
};

void run(const Lab& lab, const Table& table, int num_ranks) {
  GroupOptions options;
  options.engine.num_ranks = num_ranks;
  options.engine.num_blocks = 30;
  options.engine.first_unique_id = (UniqueId{1} << 31) - 500;
  options.budget = 24;
  options.num_collectives = 2;
  Group group(lab.engines, options, table.hooks);
  Clients clients(group, lab.seed);
  int next_sleep = 300;
  for (int i = 0; i < lab.num_steps; ++i) {
    clients.act();
    group.step();
    if (i != next_sleep) continue;
    next_sleep += 200 + static_cast<int>(clients.below(800));
    group.sleep();
    group.wake(table.hooks);
  }
  group.drain();
  group.sleep();
}

void mixed(const Lab& lab) { run(lab, lab.make_table(), 1); }
void mixed_at_random(const Lab& lab) { run(lab, lab.make_random_table(), 1); }
void ranks(const Lab& lab) { run(lab, lab.make_table(), 4); }
void ranks_at_random(const Lab& lab) { run(lab, lab.make_random_table(), 4); }

}  // namespace

std::vector<Scenario> long_scenarios() {
  return {{"mixed", mixed},
          {"mixed-at-random", mixed_at_random},
          {"ranks", ranks},
          {"ranks-at-random", ranks_at_random}};
}

std::vector<Scenario> all_scenarios() {
  std::vector<Scenario> all;
  for (const auto& part : {prefix_scenarios(), memory_scenarios(), lifecycle_scenarios(), steering_scenarios(),
                           migration_scenarios(), long_scenarios()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace sage::host
