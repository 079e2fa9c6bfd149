// Invariants of every rank after every step.

#include <algorithm>
#include <map>
#include <tuple>

#include "group.h"

namespace sage::host {

namespace {

auto as_tuple(const SageBlockInfo& info) {
  return std::tuple(info.id, info.state, info.use_count, info.unique_id, info.timestamp);
}

auto as_tuple(const SequenceView& view) {
  return std::tie(view.status, view.cache_len, view.input_len, view.blocks, view.unique_ids);
}

}  // namespace

void Group::check_rank(int rank, const Decision& decision, const RankStep& done) {
  const auto expect = [&](bool fine, const char* what, auto... values) {
    if (!fine) findings_.add(said("rank", rank) + said(", step", num_steps_) + said(std::string(": ") + what, values...));
  };
  const std::vector<SageBlockInfo> infos = blocks(rank);
  std::map<BlockId, int> holders;
  for (const BlockId id : done.given_up) ++holders[id];
  for (const SeqId seq_id : running_) {
    const SequenceView view = this->view(seq_id, rank);
    if (view.status == SAGE_SEQUENCE_CACHED) continue;
    for (std::size_t i = 0; i < view.blocks.size(); ++i) {
      ++holders[view.blocks[i]];
      expect(infos.at(static_cast<std::size_t>(view.blocks[i])).unique_id == view.unique_ids[i],
             "a sequence holds a block that is another one by now");
    }
  }
  expect(static_cast<int>(infos.size()) == options_.engine.num_blocks, "free, cached and active blocks are not all blocks");
  for (const SageBlockInfo& info : infos) {
    const auto held = holders.find(info.id);
    expect(info.use_count == (held == holders.end() ? 0 : held->second), "wrong use count of block", info.id);
    expect((info.state == SAGE_BLOCK_ACTIVE) == (info.use_count > 0), "wrong state of block", info.id);
    expect((info.state == SAGE_BLOCK_FREE) == (info.unique_id == 0), "wrong unique id of block", info.id);
  }

  int num_partial = 0, num_tokens = 0;
  std::map<SeqId, std::uint64_t> priority;
  for (const Candidate& candidate : decision.candidates) priority[candidate.seq_id] = candidate.priority;
  for (const Part& part : done.active) {
    num_partial += part.partial ? 1 : 0;
    num_tokens += part.input_len;
    expect(priority.at(part.seq_id) != SAGE_PRIORITY_HOLD, "a sequence takes part that is held");
    for (const SeqId preempted : done.preempted) {
      expect(priority.at(preempted) > priority.at(part.seq_id) || priority.at(preempted) == SAGE_PRIORITY_HOLD,
             "a sequence was preempted before one that comes after it");
    }
  }
  expect(done.active.empty() == decision.candidates.empty(), "nothing runs");
  expect(num_partial <= 1, "more than one prompt was cut");
  expect(num_tokens <= decision.budget, "more new tokens than the budget:", num_tokens, decision.budget);
  expect(spy_->epoch(rank) <= num_steps_, "the epoch runs ahead");
  if (!hooked_) return;
  expect(spy_->tally(rank).releases >= done.num_releases, "a sequence gave up its blocks and that was not told");
  spy_->check_step(rank, infos);
}

void Group::add_to_digest(const RankStep& done) {
  const auto add = [this](std::uint64_t value) {
    digest_ = (digest_ ^ value) * 0x9e3779b97f4a7c15u;
    digest_ ^= digest_ >> 32;
  };
  for (const Part& part : done.active) {
    add(part.seq_id);
    add(static_cast<std::uint64_t>(part.input_len));
  }
  for (const SageBlockInfo& info : blocks()) {
    add(info.unique_id);
    add(static_cast<std::uint64_t>(info.use_count));
    add(static_cast<std::uint64_t>(info.state));
  }
}

void Group::check_replica(int rank, const RankStep& first, const RankStep& done) {
  const auto expect = [&](bool same, const char* what) {
    if (!same) findings_.add(said("step", num_steps_) + said(": rank", rank) + " and rank 0 diverge: " + what);
  };
  expect(first.active == done.active && first.preempted == done.preempted, "who takes part");
  expect(first.hits == done.hits, "hits");
  for (const SeqId seq_id : running_) {
    expect(as_tuple(view(seq_id, 0)) == as_tuple(view(seq_id, rank)), "sequences");
  }
  const std::vector<SageBlockInfo> mine = blocks(rank), theirs = blocks(0);
  const auto same = [](const SageBlockInfo& a, const SageBlockInfo& b) { return as_tuple(a) == as_tuple(b); };
  expect(std::equal(mine.begin(), mine.end(), theirs.begin(), theirs.end(), same), "blocks");
}

}  // namespace sage::host
