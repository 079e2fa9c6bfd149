// One scheduling round of the host engine: who runs, whose blocks are given up for it, which cached ones go.

#include <algorithm>
#include <climits>
#include <stdexcept>

#include "host_engine.h"

namespace sage::host {

struct HostEngine::Plan {
  struct Part {
    Sequence* sequence;
    int context_len;
    bool held;
  };
  std::vector<Part> parts;  // by priority, those held last
  std::size_t end = 0;      // from here on they give up their blocks, or have none
  std::vector<std::pair<Sequence*, int>> active;  // and how many blocks each needs
  std::vector<Sequence*> idle, preempted;
  std::vector<int> holders;  // of each block, if the plan so far were carried out
  int available = 0;         // free or cached then, and not promised to anybody
  int num_new = 0;
};

// Has sequences behind `first` give up their blocks, the last one first, until `missing` more are available. Returns how many
// became available; 0, and nothing is given up, if all of them are too few.
int HostEngine::preempt_for(Plan& plan, std::size_t first, int missing) {
  std::vector<int> holders = plan.holders;
  std::vector<Sequence*> victims;
  int gained = 0;
  for (std::size_t i = plan.end; i-- > first + 1;) {
    Sequence& victim = *plan.parts[i].sequence;
    if (victim.view.status == SAGE_SEQUENCE_CACHED) continue;
    victims.push_back(&victim);
    for (const BlockId id : victim.view.blocks) gained += --holders[static_cast<std::size_t>(id)] == 0 ? 1 : 0;
    if (gained < missing) continue;
    plan.holders = std::move(holders);
    plan.preempted.insert(plan.preempted.end(), victims.begin(), victims.end());
    plan.end = i;
    return gained;
  }
  return 0;
}

HostEngine::Plan HostEngine::plan(const std::vector<Candidate>& order, int budget) {
  Plan plan;
  for (const Candidate& candidate : order) {
    const bool held = candidate.priority == SAGE_PRIORITY_HOLD && fault_ != EngineFault::kIgnoreHold;
    plan.parts.push_back({&at(candidate.seq_id), candidate.context_len, held});
  }
  for (const auto& part : plan.parts) take_back(*part.sequence);
  for (const auto& part : plan.parts) look_up(*part.sequence);
  may_move_ = false;
  plan.end = plan.parts.size();
  plan.available = blocks_.num_free() + blocks_.num_cached();
  for (BlockId id = 0; id < blocks_.num_blocks(); ++id) plan.holders.push_back(blocks_.use_count(id));

  for (std::size_t i = 0; i < plan.end; ++i) {
    auto& [sequence, context_len, held] = plan.parts[i];
    const int wanted = (context_len + 1 + options_.block_len - 1) / options_.block_len;
    const int need = std::max(0, wanted - static_cast<int>(sequence->view.blocks.size()));
    sequence->view.input_len = 0;
    if (!held && budget > 0) {
      if (need > plan.available) plan.available += preempt_for(plan, i, need - plan.available);
      if (need <= plan.available) {
        plan.available -= need;
        plan.num_new += need;
        plan.active.emplace_back(sequence, need);
        sequence->view.input_len = std::min(context_len - sequence->view.cache_len, budget);
        budget -= sequence->view.input_len;
        continue;
      }
    }
    plan.idle.push_back(sequence);
  }
  for (std::size_t i = plan.end; i < plan.parts.size(); ++i) {
    plan.parts[i].sequence->view.input_len = 0;
    plan.idle.push_back(plan.parts[i].sequence);
  }
  return plan;
}

Outcome HostEngine::materialize(const std::vector<Candidate>& candidates, int budget) {
  ++manager_.epoch;
  commit();
  std::vector<Candidate> order = candidates;
  std::stable_sort(order.begin(), order.end(),
                   [](const Candidate& a, const Candidate& b) { return a.priority < b.priority; });
  if (fault_ == EngineFault::kIgnoreOrder) std::reverse(order.begin(), order.end());
  Plan plan = this->plan(order, fault_ == EngineFault::kIgnoreBudget ? INT_MAX : budget);

  Outcome outcome;
  outcome.allocated = plan.num_new;
  for (const auto& [sequence, need] : plan.active) outcome.swapped_in += sequence->view.status != SAGE_SEQUENCE_ACTIVE;
  for (const Sequence* sequence : plan.idle) outcome.swapped_out += sequence->view.status == SAGE_SEQUENCE_ACTIVE;

  for (Sequence* sequence : plan.preempted) give_up(*sequence);
  commit();
  if (plan.num_new > blocks_.num_free()) evict(plan.num_new - blocks_.num_free());
  const std::vector<BlockId> ids = blocks_.allocate(plan.num_new);
  auto next = ids.begin();
  for (const auto& [sequence, need] : plan.active) {
    for (int i = 0; i < need; ++i, ++next) {
      sequence->view.blocks.push_back(*next);
      sequence->view.unique_ids.push_back(blocks_.unique_id(*next));
    }
    sequence->view.status = SAGE_SEQUENCE_ACTIVE;
  }
  for (Sequence* sequence : plan.idle) {
    if (sequence->view.status == SAGE_SEQUENCE_ACTIVE) sequence->view.status = SAGE_SEQUENCE_LOCKED;
  }
  may_move_ = true;
  return outcome;
}

void HostEngine::evict(int count) {
  std::set<BlockId> victims;
  if (hooks_.evict != nullptr) {
    const std::vector<BlockId> cached = blocks_.cached();
    std::vector<BlockId> chosen(static_cast<std::size_t>(count), -1);
    const int n = hooks_.evict(hooks_.ctx, &manager_, cached.data(), static_cast<std::int32_t>(cached.size()), count,
                               chosen.data());
    for (int i = 0; i < (n > count ? 0 : n); ++i) {
      const BlockId id = chosen[static_cast<std::size_t>(i)];
      if (blocks_.is_cached(id) || fault_ == EngineFault::kTrustVictims) victims.insert(id);
    }
  }
  const std::vector<BlockId> rest = blocks_.least_recent(count - static_cast<int>(victims.size()), victims);
  victims.insert(rest.begin(), rest.end());
  set_free({victims.begin(), victims.end()});
}

void HostEngine::set_free(const std::vector<BlockId>& ids) {
  if (ids.empty()) return;
  std::vector<UniqueId> unique_ids;
  for (const BlockId id : ids) {
    unique_ids.push_back(blocks_.unique_id(id) + (fault_ == EngineFault::kWrongUniqueId ? 1 : 0));
  }
  const auto tell = [&] {
    if (hooks_.evicted == nullptr || fault_ == EngineFault::kSilentEviction) return;
    const bool could_move = may_move_;
    may_move_ = false;
    hooks_.evicted(hooks_.ctx, &manager_, ids.data(), unique_ids.data(), static_cast<std::int32_t>(ids.size()));
    may_move_ = could_move;
  };
  if (fault_ != EngineFault::kLateEviction) tell();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    own_.drop_with_extensions({ids[i], unique_ids[i]});
    blocks_.free(ids[i]);
  }
  if (fault_ == EngineFault::kLateEviction) tell();
}

}  // namespace sage::host
