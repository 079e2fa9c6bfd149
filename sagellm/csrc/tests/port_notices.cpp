// Notices through the port of plug-ins: when they come, which are lost, and what is known of stored blocks.

#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include "expect.h"
#include "port.h"

namespace {

void notices_come_before_the_question_and_in_order() {
  PluginPort port(options(kLong));
  const Ids ids{4, 6};
  for (std::uint64_t seq = 0; seq < 5; ++seq) {
    SageSequence sequence{};
    sequence.seq_id = seq;
    sequence.n_prompt = 12;
    sequence.blocks = ids.data();
    sequence.n_blocks = 2;
    port.matched(manager(), sequence, 2);
  }
  std::thread server([&] {
    PortDelivery delivery;
    std::uint64_t expected = 0;
    do {
      EXPECT(port.next(kLong, delivery));
      for (const auto& notice : delivery.notices) {
        EXPECT(notice.topic == sage::kTellMatched && notice.seq_id == expected++);
        EXPECT(notice.ids == (Ids{4, 6}) && notice.num_tokens == 12 && notice.num_blocks == 2);
      }
    } while (!delivery.question);
    EXPECT(expected == 5);
    EXPECT(port.answer(delivery.question->number, chosen({1})));
  });
  Ids victims;
  EXPECT(ask_victims(port, {1}, 1, victims));
  server.join();
}

void what_was_told_before_the_end_is_handed_over() {
  PluginPort port(options(kLong));
  port.step_end(SageStepResult{sizeof(SageStepResult), 0, 5, 1, 2, 2, 0, 0});
  port.close();
  port.step_end(SageStepResult{sizeof(SageStepResult), 0, 5, 2, 2, 2, 0, 0});
  PortDelivery delivery;
  EXPECT(port.next(kLong, delivery) && delivery.notices.size() == 1 && delivery.notices[0].result.step == 1);
  EXPECT(!port.next(kLong, delivery) && !port.fault());
}

void a_full_queue_drops_the_oldest() {
  PortOptions small = options(kLong);
  small.queue_bytes = 3 * sizeof(sage::PortNotice);
  PluginPort port(small);
  for (std::uint64_t step = 1; step <= 10; ++step) {
    port.step_end(SageStepResult{sizeof(SageStepResult), 0, 5, step, 2, 2, 0, 0});
  }
  PortDelivery delivery;
  EXPECT(port.next(kLong, delivery) && !delivery.question && delivery.notices.size() == 3);
  EXPECT(delivery.notices.front().result.step == 8 && delivery.notices.back().result.step == 10);
  EXPECT(port.stats().told == 10 && port.stats().lost == 7);
  EXPECT(port.next(0, delivery) && delivery.notices.empty());
}

void only_new_blocks_are_told() {
  PluginPort port(options(kLong, sage::kTellStored));
  std::vector<std::int32_t> tokens(16);
  std::iota(tokens.begin(), tokens.end(), 100);
  const Ids ids{8, 9, 10, 11};
  const auto told = [&](const SageManager& where, std::int32_t num_blocks) {
    const std::uint64_t before = port.stats().told;
    port.stored(where, 3, SAGE_STORE_PROMPT, tokens.data(), ids.data(), num_blocks);
    PortDelivery delivery;
    EXPECT(port.next(port.stats().told > before ? kLong : 0, delivery));
    return delivery.notices;
  };
  auto notices = told(manager(), 2);
  EXPECT(notices.size() == 1 && notices[0].ids == (Ids{8, 9}) && notices[0].first_token == 0);
  notices = told(manager(), 4);
  EXPECT(notices.size() == 1 && notices[0].ids == (Ids{10, 11}) && notices[0].first_token == 8);
  EXPECT(notices[0].tokens.size() == 8 && notices[0].tokens.front() == 108);
  EXPECT(told(manager(), 4).empty());
  port.evicted(manager(), ids.data() + 2, 1);
  EXPECT(told(manager(), 4).at(0).ids == (Ids{10, 11}));
  EXPECT(told(manager(2), 4).at(0).ids.size() == 4);  // a new generation knows nothing
}

void candidates_know_what_they_continue() {
  sage::StoredBlocks blocks;
  Ids parents, depths;
  const auto describe = [&](const Ids& ids) {
    blocks.describe(manager(), ids.data(), static_cast<std::int32_t>(ids.size()), parents, depths);
  };
  const Ids path{3, 1, 2}, branch{3, 1, 7};
  EXPECT(blocks.stored(manager(), path.data(), 3) == 0);
  EXPECT(blocks.stored(manager(), branch.data(), 3) == 2);
  describe({1, 2, 3, 6, 7, 99});
  EXPECT((parents == Ids{3, 1, -1, -1, 1, -1}) && (depths == Ids{8, 12, 4, 0, 12, 0}));
  describe({2, 3});  // block 1 is in use: its child hangs on no candidate
  EXPECT((parents == Ids{-1, -1}));
  const std::int32_t gone = 1;
  blocks.evicted(manager(), &gone, 1);
  const Ids other{1};
  EXPECT(blocks.stored(manager(), other.data(), 1) == 0);  // block 1 comes back as something else
  describe({1, 2, 3});
  EXPECT((parents == Ids{-1, -1, -1}) && (depths == Ids{4, 12, 4}));
}

}  // namespace

int main() {
  notices_come_before_the_question_and_in_order();
  what_was_told_before_the_end_is_handed_over();
  a_full_queue_drops_the_oldest();
  only_new_blocks_are_told();
  candidates_know_what_they_continue();
  std::puts("port_notices: passed");
  return 0;
}
