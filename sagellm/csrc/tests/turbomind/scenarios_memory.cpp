// Memory runs short: cached blocks go, sequences are preempted and come back, and requests are cancelled in every state.

#include "scenarios.h"

namespace sage::host {

namespace {

GroupOptions small(int num_blocks, UniqueId first_unique_id = 1) {
  GroupOptions options;
  options.engine.num_blocks = num_blocks;
  options.engine.first_unique_id = first_unique_id;
  return options;
}

void crowd(Group& group, int num_requests, int num_prompt, int num_new) {
  std::vector<SeqId> seq_ids;
  for (int i = 0; i < num_requests; ++i) seq_ids.push_back(group.submit(text(i % 7, num_prompt + i % 5), num_new));
  group.drain();
  for (const SeqId seq_id : seq_ids) {
    require(group.request(seq_id).state == RequestState::kFinished, "a request did not finish");
  }
}

void pressure(const Lab& lab) {
  const Table table = lab.make_table();
  Group group(lab.engines, small(24), table.hooks);
  crowd(group, 30, 20, 8);
  require(!lab.has_table() || group.tally().evicted_blocks > 20, "no cached block had to go");
  // A prompt that takes all there is.
  group.submit(text(9, 90), 3);
  group.drain();
}

void preempt(const Lab& lab, UniqueId first_unique_id) {
  const Table table = lab.make_table();
  Group group(lab.engines, small(12, first_unique_id), table.hooks);
  const SeqId first = group.submit(text(1, 12), 20), second = group.submit(text(2, 12), 20);
  const SeqId third = group.submit(text(3, 12), 20);
  group.drain();
  require(group.request(first).num_preempted == 0, "the first request was preempted");
  require(group.request(second).num_preempted + group.request(third).num_preempted > 0, "nothing was preempted");
  require(group.request(third).state == RequestState::kFinished, "a request that was preempted did not finish");
}

void preemption(const Lab& lab) { preempt(lab, 1); }

// Steps until the request was preempted, and is.
void until_preempted(Group& group, SeqId seq_id) {
  for (int i = 0; i < 100; ++i) {
    group.step();
    if (group.request(seq_id).num_preempted > 0 && group.view(seq_id).status == SAGE_SEQUENCE_CACHED) return;
  }
  throw Violation("nothing was preempted");
}

void cancellation(const Lab& lab) {
  const Table table = lab.make_table();
  Group group(lab.engines, small(12), table.hooks);
  const auto cancel = [&group](SeqId seq_id) {
    group.cancel(seq_id);
    group.step();
    require(group.request(seq_id).state == RequestState::kCancelled, "a request was not cancelled");
  };
  const SeqId first = group.submit(text(1, 40), 6), waits = group.submit(text(2, 20), 6);
  group.step();  // 16 of the 40 tokens
  require(group.is_active(first) && !group.is_active(waits), "the second request ought to wait");
  cancel(waits);
  cancel(first);  // in the middle of its prompt
  const SeqId same = group.submit(text(1, 40), 6);
  group.drain();
  require(group.request(same).hit_tokens == 32, "what a cancelled request computed was not found");

  group.submit(text(3, 12), 20);
  const SeqId preempted = group.submit(text(4, 12), 20);
  until_preempted(group, preempted);
  cancel(preempted);
  const SeqId decodes = group.submit(text(5, 6), 9);
  group.drain();
  group.submit(text(6, 6), 9);
  group.step();
  group.step();
  const SeqId again = group.submit(text(5, 6), 9), queued = group.submit(text(7, 6), 9);
  group.cancel(queued);
  group.step();
  group.step();
  cancel(again);
  group.drain();
  require(group.request(decodes).state == RequestState::kFinished, "a request did not finish");
  group.submit(text(8, 6), 1);
  group.submit(text(8, 6), 1);
  group.step();  // finished in the step they came in
  group.drain();
}

// Whether a sequence that was preempted has lost a block and still has one behind it.
bool has_gap(Group& group, SeqId seq_id) {
  const SequenceView view = group.view(seq_id);
  const std::vector<SageBlockInfo> infos = group.blocks();
  bool lost = false;
  for (std::size_t i = 0; view.status == SAGE_SEQUENCE_CACHED && i < view.blocks.size(); ++i) {
    const bool valid = infos[static_cast<std::size_t>(view.blocks[i])].unique_id == view.unique_ids[i];
    if (lost && valid) return true;
    lost = lost || !valid;
  }
  return false;
}

// Two requests compute the same prefix at once, a third one finds the first blocks of one and the next ones of the other. When
// the other is preempted, its first blocks may go while the third holds on to the next: it is not the end that is lost.
void lost_in_the_middle(const Lab& lab) {
  const Table table = lab.make_table();
  GroupOptions options = small(22);
  options.budget = options.max_budget = 128;
  Group group(lab.engines, options, table.hooks);
  const Tokens prefix = text(1, 20);
  group.submit(text(2, 40), 40);
  group.submit(prefix + text(3, 40), 4);  // does not fit beside it, and waits
  const SeqId longer = group.submit(prefix, 30);
  group.submit(Tokens(prefix.begin(), prefix.begin() + 8) + text(4, 1), 30);
  bool seen = false;
  for (int i = 0; i < 40; ++i) {
    group.step();
    seen = seen || (group.request(longer).state == RequestState::kRunning && has_gap(group, longer));
  }
  require(seen || lab.has_table(), "no sequence lost a block out of its middle");
  group.drain();
}

void large_unique_ids(const Lab& lab) {
  for (const UniqueId first : {(UniqueId{1} << 31) - 5, (UniqueId{1} << 32) - 5, (UniqueId{1} << 63) - 5}) {
    preempt(lab, first);
    const Table table = lab.make_table();
    Group group(lab.engines, small(24, first), table.hooks);
    crowd(group, 20, 12, 6);
    const SeqId again = group.submit(text(19 % 7, 12 + 19 % 5), 2);
    group.drain();
    require(group.request(again).hit_tokens > 0, "nothing was found under large unique ids");
  }
}

// The engine has to live with invalid answers of the ranks of a group: invalid victims are passed over, blocks that have gone
// are cut off.
void nonsense(const Lab& lab) {
  for (const TableFault fault : {TableFault::kUncachedVictims, TableFault::kRepeatedVictims, TableFault::kFewVictims,
                                 TableFault::kManyVictims, TableFault::kForgetEvicted, TableFault::kWrongUniqueIds}) {
    NaiveTable table(fault);
    GroupOptions options = small(24);
    options.strict = false;
    Group group(lab.engines, options, table.hooks());
    crowd(group, 30, 20, 8);
    crowd(group, 30, 9, 20);
    require(group.tally().evictions > 0, "the table was not asked for victims");
  }
}

}  // namespace

std::vector<Scenario> memory_scenarios() {
  return {{"pressure", pressure},
          {"preemption", preemption},
          {"cancellation", cancellation, RunsWith::kEngineOrder},
          {"lost-in-the-middle", lost_in_the_middle, RunsWith::kEngineOrder},
          {"large-unique-ids", large_unique_ids},
          {"nonsense", nonsense, RunsWith::kItsOwn}};
}

}  // namespace sage::host
