// Everything at once, at random, for as many steps as asked for.

#include <algorithm>
#include <exception>
#include <random>
#include <thread>

#include "scenarios.h"

namespace sage::host {

namespace {

// Conversations over a few texts: prompts share beginnings, go on where others ended, and repeat.
class Clients {
 public:
  Clients(Group& group, std::uint64_t seed) : group_(group), random_(static_cast<unsigned>(seed * 2654435761u + 1)) {}

  // Sends or cancels, or does neither; fewer than `kMaxQueued` wait, so that all come to an end.
  void act() {
    if (below(100) < 35 && group_.num_queued() < kMaxQueued) submit();
    if (!seq_ids_.empty() && below(100) < 8) group_.cancel(recent(10));
  }
  const std::vector<SeqId>& seq_ids() const { return seq_ids_; }
  std::size_t below(std::size_t n) { return random_() % n; }

 private:
  static constexpr int kMaxQueued = 6;

  SeqId recent(std::size_t n) { return seq_ids_[seq_ids_.size() - 1 - below(std::min(seq_ids_.size(), n))]; }
  void submit() {
    Tokens prompt = text(static_cast<int>(below(5)), static_cast<int>(1 + below(24)));
    if (below(3) > 0) prompt = prompt + text(10 + static_cast<int>(below(4)), static_cast<int>(1 + below(20)));
    if (!seq_ids_.empty() && below(4) == 0) {
      const Request& earlier = group_.request(recent(30));
      if (earlier.tokens.size() < 60) prompt = earlier.tokens + text(20, static_cast<int>(1 + below(6)));
    }
    seq_ids_.push_back(group_.submit(prompt, static_cast<int>(1 + below(12))));
  }

  Group& group_;
  std::minstd_rand random_;
  std::vector<SeqId> seq_ids_;
};

void run(const Lab& lab, const Table& table, int num_ranks, std::uint64_t seed) {
  GroupOptions options;
  options.engine.num_ranks = num_ranks;
  options.engine.num_blocks = 30;
  options.engine.first_unique_id = (UniqueId{1} << 31) - 500;
  options.budget = 24;
  options.num_collectives = 2;
  Group group(lab.engines, options, table.hooks);
  Clients clients(group, seed);
  int next_sleep = 300, num_evicted = 0;
  for (int i = 0; i < lab.num_steps; ++i) {
    clients.act();
    group.step();
    if (i != next_sleep) continue;
    next_sleep += 200 + static_cast<int>(clients.below(800));
    num_evicted += group.tally().evicted_blocks;
    group.sleep();
    group.wake(table.hooks);
  }
  group.drain();
  num_evicted += group.tally().evicted_blocks;
  group.sleep();

  int num_hits = 0, num_preempted = 0, num_cancelled = 0;
  for (const SeqId seq_id : clients.seq_ids()) {
    const Request& request = group.request(seq_id);
    num_hits += request.hit_tokens > 0 ? 1 : 0;
    num_preempted += request.num_preempted;
    num_cancelled += request.state == RequestState::kCancelled ? 1 : 0;
    require(request.state != RequestState::kQueued && request.state != RequestState::kRunning, "a request was forgotten");
  }
  const bool eventful = num_hits > 0 && num_preempted > 0 && num_cancelled > 0 && (num_evicted > 0 || table.hooks == nullptr);
  require(eventful || lab.num_steps < 1000, "too little happened");
}

void run_checked(const Lab& lab, const Table& table, int num_ranks) {
  run(lab, table, num_ranks, lab.seed);
  if (table.check) table.check();
}

void mixed(const Lab& lab) { run_checked(lab, lab.make_table(), 1); }
void mixed_at_random(const Lab& lab) { run_checked(lab, lab.make_random_table(), 1); }
void ranks(const Lab& lab) { run_checked(lab, lab.make_table(), 4); }
void ranks_at_random(const Lab& lab) { run_checked(lab, lab.make_random_table(), 4); }

// Two engines of a process share the table and nothing else.
void two_engines(const Lab& lab) {
  const Table table = lab.make_table();
  std::exception_ptr failed[2];
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      try {
        run(lab, table, 2, lab.seed + i);
      } catch (...) {
        failed[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& one : failed) {
    if (one) std::rethrow_exception(one);
  }
  if (table.check) table.check();
}

// Where nothing has to go, what is found does not depend on who keeps the index: the plain twin is the oracle, request by
// request.
void twin(const Lab& lab) {
  NaiveTable naive;
  const Table table = lab.make_table();
  GroupOptions options;
  options.engine.num_blocks = 20 * std::min(lab.num_steps, 100) + 200;
  Group one(lab.engines, options, table.hooks), other(lab.engines, options, naive.hooks());
  Clients clients(one, lab.seed), same(other, lab.seed);
  for (int i = 0; i < std::min(lab.num_steps, 100); ++i) {
    clients.act();
    same.act();
    one.step();
    other.step();
  }
  one.drain();
  other.drain();
  require(one.tally().evicted_blocks + other.tally().evicted_blocks == 0, "something had to go");
  for (const SeqId seq_id : clients.seq_ids()) {
    const int found = one.request(seq_id).hit_tokens, expected = other.request(seq_id).hit_tokens;
    require(found == expected, said("of a request, found and to be found:", seq_id, found, expected));
  }
}

}  // namespace

std::vector<Scenario> long_scenarios() {
  return {{"mixed", mixed},
          {"mixed-at-random", mixed_at_random},
          {"ranks", ranks},
          {"ranks-at-random", ranks_at_random},
          {"two-engines", two_engines},
          {"twin", twin, RunsWith::kEngineOrder}};
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
