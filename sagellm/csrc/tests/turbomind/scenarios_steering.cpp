// Order, hold, budget, admission and the end of steps, as a table asks for them.

#include <functional>
#include <map>
#include <set>

#include "../../examples/short_prompts_first.h"
#include "scenarios.h"

namespace sage::host {

namespace {

class Steering : public TableBase {
 public:
  Steering() : TableBase(kSchedule | kAdmit | kStepEnd) {}
  std::function<int(const SageStep&, const SageSequence*, int, std::uint64_t*, int*)> on_schedule;
  std::function<int(const SageRequest*, int, int, std::int32_t*)> on_admit;
  std::vector<SageStepResult> results;

  int schedule(const SageStep& step, const SageSequence* sequences, int n, std::uint64_t* priorities, int* budget) override {
    return on_schedule ? on_schedule(step, sequences, n, priorities, budget) : 1;
  }
  int admit(const SageRequest* requests, int n, int max_admitted, std::int32_t* admitted) override {
    return on_admit ? on_admit(requests, n, max_admitted, admitted) : -1;
  }
  void step_end(const SageStepResult& result) override { results.push_back(result); }
};

void order(const Lab& lab) {
  const Table table = lab.make_table();
  Steering steering;
  steering.on_schedule = [](const SageStep&, const SageSequence* sequences, int n, std::uint64_t* priorities, int*) {
    for (int i = 0; i < n; ++i) priorities[i] = 1000 - sequences[i].seq_id;
    return 0;
  };
  GroupOptions options;
  options.engine.num_blocks = 8;
  options.budget = 64;
  Group group(lab.engines, options, table.hooks, steering.hooks());
  const SeqId first = group.submit(text(1, 20), 4);
  group.step();
  const SeqId last = group.submit(text(2, 20), 4);
  group.step();
  require(group.is_active(last) && !group.is_active(first), "the last request was to go first");
  require(group.request(first).num_preempted == 1, "the first request was to make room");
  group.drain();

  // Two of the same priority: the answer is not used, and the engine's own order stands.
  steering.on_schedule = [](const SageStep&, const SageSequence*, int n, std::uint64_t* priorities, int*) {
    for (int i = 0; i < n; ++i) priorities[i] = 7;
    return 0;
  };
  options.strict = false;
  Group other(lab.engines, options, table.hooks, steering.hooks());
  const SeqId early = other.submit(text(1, 20), 4), late = other.submit(text(2, 20), 4);
  other.step();
  require(other.is_active(early) && !other.is_active(late), "the engine's own order does not stand");
  other.drain();
}

void hold(const Lab& lab) {
  const Table table = lab.make_table();
  Steering steering;
  std::set<SeqId> held;
  steering.on_schedule = [&held](const SageStep&, const SageSequence* sequences, int n, std::uint64_t* priorities, int*) {
    for (int i = 0; i < n; ++i) {
      if (held.count(sequences[i].seq_id) != 0) priorities[i] = SAGE_PRIORITY_HOLD;
    }
    return 0;
  };
  GroupOptions options;
  options.engine.num_blocks = 16;
  Group group(lab.engines, options, table.hooks, steering.hooks());
  const SeqId first = group.submit(text(1, 8), 10), second = group.submit(text(2, 8), 10);
  group.step();
  group.step();
  held = {first};
  for (int i = 0; i < 3; ++i) {
    group.step();
    require(group.is_active(second) && !group.is_active(first), "a sequence takes part that is held");
    require(group.view(first).status == SAGE_SEQUENCE_LOCKED, "a sequence that is held gave up its blocks for nobody");
  }
  held = {first, second};
  group.step();
  require(group.is_active(first) && !group.is_active(second), "all are held: the engine's first runs");
  held = {first};
  const SeqId large = group.submit(text(3, 40), 8);  // with 12 blocks, where 4 are held
  for (int i = 0; i < 30 && group.request(large).state != RequestState::kFinished; ++i) group.step();
  require(group.request(large).state == RequestState::kFinished, "what is held kept others from running");
  held.clear();
  group.drain();
  require(group.request(first).state == RequestState::kFinished, "a request that was held did not finish");
}

void budget(const Lab& lab) {
  const Table table = lab.make_table();
  for (const int wanted : {3, 1, 64}) {
    Steering steering;
    steering.on_schedule = [wanted](const SageStep&, const SageSequence*, int, std::uint64_t*, int* tokens) {
      *tokens = wanted;
      return 0;
    };
    Group group(lab.engines, {}, table.hooks, steering.hooks());
    for (int i = 0; i < 5; ++i) group.submit(text(i, 13), 4);
    group.step();
    require(group.num_tokens() == std::min(wanted, 5 * 13), "another number of tokens than the budget");
    group.drain();
  }
  for (const int nonsense : {0, -5, 1 << 30}) {
    Steering steering;
    steering.on_schedule = [nonsense](const SageStep&, const SageSequence*, int, std::uint64_t*, int* tokens) {
      *tokens = nonsense;
      return 0;
    };
    GroupOptions options;
    options.strict = false;
    Group group(lab.engines, options, table.hooks, steering.hooks());
    for (int i = 0; i < 5; ++i) group.submit(text(i, 20), 4);
    group.step();
    require(group.num_tokens() >= 1 && group.num_tokens() <= options.max_budget, "a budget that cannot be was used");
    group.drain();
  }
}

void admission(const Lab& lab) {
  const Table table = lab.make_table();
  Steering steering;
  steering.on_admit = [](const SageRequest* requests, int n, int, std::int32_t* admitted) {
    // The shortest one, and no long one at all while there is another.
    int best = 0;
    for (int i = 1; i < n; ++i) {
      if (requests[i].n_tokens < requests[best].n_tokens) best = i;
    }
    admitted[0] = best;
    return 1;
  };
  GroupOptions options;
  options.max_batch = 3;
  Group group(lab.engines, options, table.hooks, steering.hooks());
  const SeqId longest = group.submit(text(1, 30), 3), middle = group.submit(text(2, 20), 3);
  const SeqId shortest = group.submit(text(3, 10), 3);
  group.step();
  require(group.is_active(shortest) && group.num_running() == 1, "the shortest request was to come first, alone");
  group.step();
  require(group.request(middle).state == RequestState::kRunning, "the next one was to come second");
  require(group.request(longest).state == RequestState::kQueued, "a request came in that was not admitted");
  group.drain();
  require(group.request(longest).state == RequestState::kFinished, "a request did not finish");

  options.strict = false;
  Group other(lab.engines, options, table.hooks, steering.hooks());
  steering.on_admit = [](const SageRequest*, int, int max_admitted, std::int32_t* admitted) {
    for (int i = 0; i < max_admitted; ++i) admitted[i] = i == 0 ? -1 : i == 1 ? 1 << 20 : 0;
    return max_admitted;
  };
  for (int i = 0; i < 8; ++i) other.submit(text(i, 10), 3);
  other.drain();

  int largest = 0;
  steering.on_admit = [&largest](const SageRequest*, int, int max_admitted, std::int32_t*) {
    largest = std::max(largest, max_admitted);
    return -1;
  };
  for (int i = 0; i < 8; ++i) other.submit(text(i, 10), 3);
  other.step();
  require(largest == 3 && other.num_running() == 3, "left to the engine, the batch is filled");
  other.drain();
}

void step_ends(const Lab& lab) {
  const Table table = lab.make_table();
  Steering steering;
  Group group(lab.engines, {}, table.hooks, steering.hooks());
  int num_tokens = 0, num_finished = 0;
  for (int i = 0; i < 7; ++i) group.submit(text(i, 11), 4);
  while (group.num_steps() == 0 || group.num_running() > 0) {
    group.step();
    const SageStepResult& result = steering.results.back();
    require(static_cast<int>(steering.results.size()) == group.num_steps(), "not every step was told, or more");
    require(result.n_tokens == group.num_tokens(), "another number of tokens was told than was computed");
    num_tokens += result.n_tokens;
    num_finished += result.n_finished;
  }
  // A prompt, and each token that is generated but the last one.
  require(num_finished == 7 && num_tokens == 7 * (11 + 3), said("told were", num_finished, num_tokens));
}

// The promises of sagellm/csrc/examples/short_prompts_first.cpp.
void example(const Lab& lab) {
  GroupOptions options;
  options.engine.num_blocks = 16;
  options.engine.num_ranks = 2;
  Group group(lab.engines, options, short_prompts_first());
  const SeqId long_one = group.submit(text(1, 40), 2), short_one = group.submit(text(2, 16), 2);
  group.step();
  require(group.is_active(short_one) && !group.is_active(long_one), "the short prompt was to go first");
  group.drain();
  group.sleep();

  group.wake(short_prompts_first());
  const auto hits = [&group](const Tokens& prompt, int num_new) {
    const SeqId seq_id = group.submit(prompt, num_new);
    group.drain();
    return group.request(seq_id).hit_tokens;
  };
  hits(text(3, 20), 1);  // 6 blocks, then 6 more, and then 10 for which 6 have to go
  hits(text(4, 20), 1);
  hits(text(5, 36), 1);
  require(hits(text(3, 20), 1) == 16, "what was used long ago was to stay");
}

}  // namespace

std::vector<Scenario> steering_scenarios() {
  return {{"order", order},
          {"hold", hold},
          {"budget", budget},
          {"admission", admission},
          {"step-end", step_ends},
          {"example", example, RunsWith::kItsOwn}};
}

}  // namespace sage::host
