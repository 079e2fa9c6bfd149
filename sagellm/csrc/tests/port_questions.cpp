// Questions through the port of plug-ins, between an engine and a plug-in: answers, time-outs, many askers.
// Threads wait for what happened, never for a while; the only clock is the port's own time limit.

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "expect.h"
#include "port.h"

namespace {

// Answers every question until the port is closed.
class Server {
 public:
  Server(PluginPort& port, std::function<PortAnswer(const PortQuestion&)> decide)
      : port_(port), thread_([this, decide = std::move(decide)] {
          PortDelivery delivery;
          while (port_.next(kLong, delivery)) {
            if (delivery.question) port_.answer(delivery.question->number, decide(*delivery.question));
          }
        }) {}
  ~Server() {
    port_.close();
    thread_.join();
  }

 private:
  PluginPort& port_;
  std::thread thread_;
};

PortAnswer scheduled(std::vector<std::uint64_t> priorities, std::int32_t budget) {
  PortAnswer answer;
  answer.is_default = false;
  answer.priorities = std::move(priorities);
  answer.budget = budget;
  return answer;
}

bool ask_schedule(PluginPort& port, std::vector<std::uint64_t>& priorities, std::int32_t& budget) {
  std::vector<SageSequence> sequences(priorities.size());
  for (std::size_t i = 0; i < sequences.size(); ++i) sequences[i].seq_id = 100 + i;
  SageStep step{};
  step.struct_size = sizeof step;
  step.default_budget = budget;
  step.max_budget = 64;
  return port.schedule(step, sequences.data(), static_cast<std::int32_t>(sequences.size()), priorities.data(), &budget);
}

bool ask_admit(PluginPort& port, std::int32_t n, std::int32_t max_admitted, Ids& admitted) {
  const std::vector<SageRequest> requests(static_cast<std::size_t>(n), SageRequest{9, 3, 2});
  return port.admit(5, 0, requests.data(), n, max_admitted, admitted);
}

// ---- answers

void answers_are_used() {
  PluginPort port(options(kLong));
  Server server(port, [](const PortQuestion& question) {
    if (question.topic == sage::kAskVictims) {
      EXPECT(question.engine == 5 && question.count == 2 && question.block_len == 4);
      EXPECT((question.ids == Ids{2, 3, 7}) && (question.timestamps == std::vector<std::uint64_t>{1002, 1003, 1007}));
      EXPECT(question.counts.has_value() && question.counts->total == 77);
      return chosen({7, 2, 3});  // one more than asked for
    }
    if (question.topic == sage::kAskAdmit) return chosen({2, 0});
    EXPECT(question.sequences.size() == 3 && question.sequences[2].seq_id == 102 && question.sequences[2].priority == 30);
    return scheduled({30, SAGE_PRIORITY_HOLD, SAGE_PRIORITY_HOLD}, 8);
  });
  Ids victims, admitted;
  EXPECT(ask_victims(port, {2, 3, 7}, 2, victims) && (victims == Ids{7, 2}));
  EXPECT(ask_admit(port, 3, 2, admitted) && (admitted == Ids{2, 0}));
  std::vector<std::uint64_t> priorities{10, 20, 30};
  std::int32_t budget = 16;
  EXPECT(ask_schedule(port, priorities, budget) && budget == 8);
  EXPECT((priorities == std::vector<std::uint64_t>{30, SAGE_PRIORITY_HOLD, SAGE_PRIORITY_HOLD}));
  EXPECT(!port.fault() && port.stats().asked == 3 && port.stats().answered == 3);
}

void what_nobody_decides_is_not_asked() {
  PluginPort port(options(kLong, sage::kAskVictims | sage::kAskAdmit));  // it has no server: a question would wait
  std::vector<std::uint64_t> priorities{1};
  std::int32_t budget = 4;
  Ids out;
  EXPECT(!ask_schedule(port, priorities, budget));
  EXPECT(!ask_victims(port, {}, 1, out) && !ask_victims(port, {1}, 0, out));
  port.leave(sage::kAskVictims);
  EXPECT(!ask_victims(port, {1}, 1, out) && port.topics() == sage::kAskAdmit);
  EXPECT(port.stats().asked == 0 && !port.fault());
}

void default_leaves_it_to_the_engine() {
  PluginPort port(options(kLong));
  Server server(port, [](const PortQuestion&) { return PortAnswer{}; });
  Ids victims{4};
  EXPECT(!ask_victims(port, {1, 2}, 1, victims) && (victims == Ids{4}));
  EXPECT(!port.fault() && port.stats().answered == 1);
}

void nonsense_switches_off() {
  const std::vector<std::pair<std::function<bool(PluginPort&)>, PortAnswer>> cases{
      {[](PluginPort& p) { Ids v; return ask_victims(p, {1, 2, 5}, 2, v); }, chosen({3})},
      {[](PluginPort& p) { Ids v; return ask_victims(p, {1, 2, 5}, 2, v); }, chosen({-1})},
      {[](PluginPort& p) { Ids v; return ask_victims(p, {1, 2, 5}, 2, v); }, chosen({5, 5})},
      {[](PluginPort& p) { Ids v; return ask_admit(p, 3, 2, v); }, chosen({3})},
      {[](PluginPort& p) { Ids v; return ask_admit(p, 3, 2, v); }, chosen({1, 1})},
      {[](PluginPort& p) { Ids v; return ask_admit(p, 3, 2, v); }, chosen({0, 1, 2})},
      {[](PluginPort& p) { std::vector<std::uint64_t> o{1, 2}; std::int32_t b = 8; return ask_schedule(p, o, b); },
       scheduled({1}, 8)},
      {[](PluginPort& p) { std::vector<std::uint64_t> o{1, 2}; std::int32_t b = 8; return ask_schedule(p, o, b); },
       scheduled({1, 1}, 8)},
      {[](PluginPort& p) { std::vector<std::uint64_t> o{1, 2}; std::int32_t b = 8; return ask_schedule(p, o, b); },
       scheduled({1, 2}, 0)},
      {[](PluginPort& p) { std::vector<std::uint64_t> o{1, 2}; std::int32_t b = 8; return ask_schedule(p, o, b); },
       scheduled({1, 2}, 65)}};
  for (const auto& [ask, answer] : cases) {
    PluginPort port(options(kLong));
    Server server(port, [copy = answer](const PortQuestion&) { return copy; });
    EXPECT(!ask(port));
    const auto fault = port.fault();
    EXPECT(fault && fault->kind == "nonsense" && !fault->hook.empty() && !fault->detail.empty());
    EXPECT(!ask(port) && port.stats().asked == 1 && port.topics() == 0);
  }
}

// ---- time limits

void silence_costs_the_limit_once() {
  PluginPort port(options(kShort));
  Ids victims;
  EXPECT(!ask_victims(port, {1}, 1, victims));
  const auto fault = port.fault();
  EXPECT(fault && fault->kind == "overran" && fault->hook == "select_victims");
  for (int i = 0; i < 1000; ++i) EXPECT(!ask_victims(port, {1}, 1, victims));
  EXPECT(port.stats().asked == 1);
  PortDelivery delivery;
  EXPECT(!port.next(kLong, delivery));
}

void late_answers_are_dropped() {
  PluginPort port(options(0.5));  // long enough for the other thread to take the question
  std::thread server([&] {
    PortDelivery delivery;
    EXPECT(port.next(kLong, delivery) && delivery.question);
    while (!port.is_closed()) std::this_thread::yield();
    EXPECT(!port.answer(delivery.question->number, chosen({1})));
  });
  Ids victims{9};
  EXPECT(!ask_victims(port, {1}, 1, victims) && (victims == Ids{9}));
  server.join();
  EXPECT(port.stats().late == 1 && port.stats().answered == 0);
}

void answers_to_other_questions_are_dropped() {
  PluginPort port(options(kLong));
  std::thread server([&] {
    PortDelivery delivery;
    EXPECT(port.next(kLong, delivery) && delivery.question);
    const std::uint64_t number = delivery.question->number;
    EXPECT(!port.answer(number + 1, chosen({2})) && !port.answer(number - 1, chosen({2})));
    EXPECT(port.answer(number, chosen({1})) && !port.answer(number, chosen({2})));
  });
  Ids victims;
  EXPECT(ask_victims(port, {1, 2}, 1, victims) && (victims == Ids{1}));
  server.join();
}

void limit_includes_waiting_for_the_place() {
  PluginPort port(options(kShort));
  std::atomic<int> refused{0};
  std::vector<std::thread> askers;
  for (int i = 0; i < 6; ++i) {
    askers.emplace_back([&] {
      Ids victims;
      if (!ask_victims(port, {1}, 1, victims)) ++refused;
    });
  }
  for (auto& asker : askers) asker.join();
  EXPECT(refused == 6 && port.stats().asked <= 1);  // all gave up when the first did
}

void close_frees_who_waits() {
  PluginPort port(options(kLong));
  std::thread closer([&] {
    PortDelivery delivery;
    EXPECT(port.next(kLong, delivery) && delivery.question);
    port.close();
  });
  Ids victims;
  EXPECT(!ask_victims(port, {1}, 1, victims) && !port.fault() && port.is_closed());
  closer.join();
}

// ---- many threads

void every_asker_gets_its_own_answer() {
  PluginPort port(options(kLong));
  Server server(port, [](const PortQuestion& question) {
    // The answer is a function of the question: the last candidate, or nothing where it is odd.
    return question.ids.back() % 2 == 1 ? PortAnswer{} : chosen({question.ids.back()});
  });
  std::vector<std::thread> askers;
  for (std::int32_t asker = 0; asker < 6; ++asker) {
    askers.emplace_back([&port, asker] {
      for (std::int32_t round = 0; round < 200; ++round) {
        const std::int32_t last = asker * 1000 + round;
        Ids victims;
        const bool used = ask_victims(port, {-5, last}, 1, victims);
        EXPECT(used == (last % 2 == 0) && (!used || victims == Ids{last}));
        const SageStepResult result{sizeof(SageStepResult), asker, 5, static_cast<std::uint64_t>(round), 1, 1, 0, 0};
        port.step_end(result);
      }
    });
  }
  for (auto& asker : askers) asker.join();
  EXPECT(port.stats().answered == 1200 && port.stats().told == 1200 && !port.fault());
}

void engines_go_on_after_the_end() {
  auto port = std::make_shared<PluginPort>(options(kLong));
  std::atomic<bool> stop{false};
  std::atomic<int> answered{0};
  std::vector<std::thread> engines;
  for (int i = 0; i < 4; ++i) {
    engines.emplace_back([&, port] {
      const Ids ids{1, 2, 3};
      const std::vector<std::int32_t> tokens(12, 7);
      Ids victims;
      while (!stop) {
        answered += ask_victims(*port, ids, 1, victims);
        port->stored(manager(), 8, SAGE_STORE_PROMPT, tokens.data(), ids.data(), 3);
        port->evicted(manager(), ids.data(), 3);
      }
    });
  }
  {
    Server server(*port, [](const PortQuestion& question) { return chosen({question.ids.front()}); });
    while (answered < 50) std::this_thread::yield();
  }
  stop = true;  // they were asking while the server went away
  for (auto& engine : engines) engine.join();
  EXPECT(!port->fault());
}

}  // namespace

int main() {
  answers_are_used();
  what_nobody_decides_is_not_asked();
  default_leaves_it_to_the_engine();
  nonsense_switches_off();
  silence_costs_the_limit_once();
  late_answers_are_dropped();
  answers_to_other_questions_are_dropped();
  limit_includes_waiting_for_the_place();
  close_frees_who_waits();
  every_asker_gets_its_own_answer();
  engines_go_on_after_the_end();
  std::puts("port_questions: passed");
  return 0;
}
