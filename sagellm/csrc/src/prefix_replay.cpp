#include "sagellm/prefix_replay.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>

#include "policies/key_map.h"

namespace sage {

namespace {

// The keys of a trace as numbers from 0 on, and the block before each.
class Interned {
 public:
  explicit Interned(const PrefixTrace& trace) : trace_(trace), ids_(trace.num_keys) {
    check_offsets();
    KeyMap map;
    for (std::size_t request = 0; request < trace.num_requests; ++request) {
      Slot above = kNoSlot;
      for (std::size_t i = begin(request); i < begin(request + 1); ++i) {
        constexpr std::size_t kAhead = 8;
        if (i + kAhead < ids_.size()) map.prefetch(trace.keys[i + kAhead]);
        above = ids_[i] = intern(map, trace.keys[i], above, request);
      }
    }
  }

  std::size_t begin(std::size_t request) const { return static_cast<std::size_t>(trace_.offsets[request]); }
  std::size_t length(std::size_t request) const { return begin(request + 1) - begin(request); }
  const Slot* of(std::size_t request) const { return ids_.data() + begin(request); }
  Slot above(Slot id) const { return above_[id]; }
  std::uint64_t key(Slot id) const { return keys_[id]; }
  std::size_t num_blocks() const { return keys_.size(); }

 private:
  void check_offsets() const {
    const std::int64_t* const offsets = trace_.offsets;
    bool is_good = offsets[0] == 0 && offsets[trace_.num_requests] == static_cast<std::int64_t>(trace_.num_keys);
    for (std::size_t i = 0; i < trace_.num_requests; ++i) is_good &= offsets[i] <= offsets[i + 1];
    if (!is_good) throw PolicyError("offsets must rise from 0 to the number of keys, " + std::to_string(trace_.num_keys) + ".");
  }

  Slot intern(KeyMap& map, std::uint64_t key, Slot above, std::size_t request) {
    Slot id = map.find(key);
    if (id == kNoSlot) {
      id = static_cast<Slot>(keys_.size());
      keys_.push_back(key);
      above_.push_back(above);
      map.insert(key, id);
    } else if (above_[id] != above) {
      throw PolicyError("key " + std::to_string(key) + " of request " + std::to_string(request) +
                        " has another block before it than where it was first; a key must name its whole prefix.");
    }
    return id;
  }

  const PrefixTrace& trace_;
  std::vector<Slot> ids_;
  std::vector<std::uint64_t> keys_;
  std::vector<Slot> above_;
};

// Next uses in rows that were not admitted yet, as places in the trace.
class RowsToCome final : public NextUse {
 public:
  RowsToCome(const Interned& blocks, std::size_t num_requests, std::size_t longest)
      : blocks_(blocks), longest_(longest), next_(blocks.begin(num_requests), kNever), of_(blocks.num_blocks(), kNever) {
    for (std::size_t request = num_requests; request-- > 0;) {
      for (std::size_t i = 0; i < std::min(longest_, blocks.length(request)); ++i) {
        const Slot id = blocks.of(request)[i];
        next_[blocks.begin(request) + i] = std::exchange(of_[id], blocks.begin(request) + i);
      }
    }
  }

  void admit(std::size_t request) {
    for (std::size_t i = 0; i < std::min(longest_, blocks_.length(request)); ++i) {
      of_[blocks_.of(request)[i]] = next_[blocks_.begin(request) + i];
    }
  }
  std::uint64_t at(Slot slot, std::uint64_t) override { return of_[slot]; }

 private:
  const Interned& blocks_;
  const std::size_t longest_;
  std::vector<std::uint64_t> next_, of_;
};

class PrefixReplay final : public Books {
 public:
  PrefixReplay(const std::string& name, std::int64_t capacity, const PrefixTrace& trace, const PrefixReplayOptions& how,
               PolicyOptions options)
      : trace_(trace), blocks_(trace), states_(blocks_.num_blocks()), capacity_(capacity), num_running_(how.running),
        soon_(how.soon < 0 ? capacity : how.soon), block_bytes_(how.block_bytes) {
    if (name == "belady" && capacity >= 1) {
      future_ = std::make_shared<RowsToCome>(blocks_, trace.num_requests, static_cast<std::size_t>(capacity));
      options.future = future_;
    }
    policy_ = make_policy(name, capacity, options, *this);
    if (how.running < 1) throw PolicyError("running " + std::to_string(how.running) + "; at least 1 request must run.");
    result_.hit_blocks.resize(trace.num_requests);
    result_.retries.resize(trace.num_requests);
    result_.retry_hit_blocks.resize(trace.num_requests);
    result_.retry_blocks.resize(trace.num_requests);
  }

  PrefixReplayResult run() {
    for (std::size_t request = 0; request < trace_.num_requests; ++request) {
      retry_all();
      if (future_ != nullptr) future_->admit(request);
      result_.num_oversized += static_cast<std::int64_t>(blocks_.length(request)) > capacity_;
      result_.hit_blocks[request] = static_cast<std::int32_t>(admit(request));
    }
    retry_all();
    return std::move(result_);
  }

  Slot resident_parent(Slot id) override {
    const Slot above = blocks_.above(id);
    return above != kNoSlot && states_[above].is_resident ? above : kNoSlot;
  }

 private:
  struct State {
    std::uint32_t pins = 0;  // requests that hold the block, and blocks that are there and continue it
    bool is_resident = false;
    std::int64_t evicted_at = -1;
  };
  struct Running {
    std::size_t request;
    std::int64_t admission, num_outputs;
  };

  // Blocks of the request that take part.
  std::size_t length(std::size_t request) const {
    return std::min(blocks_.length(request), static_cast<std::size_t>(capacity_));
  }
  std::int64_t num_free() const { return capacity_ - num_resident_ - num_outputs_; }

  void retry_all() {
    // Each admission ends a request or leaves one more running, unless requests preempt each other in a circle.
    for (std::size_t in_vain = 0; !preempted_.empty();) {
      const std::size_t request = preempted_.front();
      preempted_.pop_front();
      const std::int64_t num_ended = num_ended_;
      ++result_.retries[request];
      result_.retry_blocks[request] += static_cast<std::int64_t>(blocks_.length(request));
      result_.retry_hit_blocks[request] += static_cast<std::int64_t>(admit(request));
      in_vain = num_ended_ == num_ended ? in_vain + 1 : 0;
      if (in_vain > 16 * (preempted_.size() + running_.size() + 64)) {
        throw CapacityError("request " + std::to_string(request) + " and others preempt each other for good with capacity " +
                          std::to_string(capacity_) + "; give more capacity, or let fewer run.");
      }
    }
  }

  // How many of its blocks were there.
  std::size_t admit(std::size_t request) {
    while (static_cast<std::int64_t>(running_.size()) >= num_running_) end_first();
    clock_ += static_cast<std::int64_t>(blocks_.length(request));
    const Slot* const ids = blocks_.of(request);
    const std::size_t count = length(request);
    std::size_t num_hits = 0;
    while (num_hits < count && states_[ids[num_hits]].is_resident) ++num_hits;
    for (std::size_t i = 0; i < num_hits; ++i) pin(ids[i]);
    for (std::size_t i = num_hits; i-- > 0;) policy_->hit(ids[i]);
    const auto need = static_cast<std::int64_t>(count - num_hits);
    while (need > num_free()) {
      evict(need - num_free(), ids + num_hits, ids + count);
      if (need > num_free()) end_first();
    }
    for (std::size_t i = count; i-- > num_hits;) insert(ids[i], i + 1);
    running_.push_back(Running{request, ++num_admissions_, 0});
    if (trace_.output_blocks != nullptr) grow_all();
    return num_hits;
  }

  void pin(Slot id) {
    State& state = states_[id];
    if (state.pins++ == 0 && state.is_resident) policy_->set_evictable(id, false);
  }
  void unpin(Slot id) {
    State& state = states_[id];
    if (--state.pins == 0 && state.is_resident) policy_->set_evictable(id, true);
  }

  // And locks it for the request that it comes for.
  void insert(Slot id, std::size_t depth) {
    if (blocks_.above(id) != kNoSlot) pin(blocks_.above(id));
    State& state = states_[id];
    ++state.pins;
    result_.num_evicted_soon += state.evicted_at >= 0 && clock_ - state.evicted_at < soon_;
    state.evicted_at = -1;
    BlockFacts facts;
    facts.depth = depth;
    facts.size_bytes = block_bytes_;
    policy_->insert(id, blocks_.key(id), facts, false);
    state.is_resident = true;
    ++num_resident_;
  }

  // At most `count` blocks, for the blocks from `first` to before `last` of a request, the last of which comes first.
  void evict(std::int64_t count, const Slot* first, const Slot* last) {
    victims_.clear();
    while (static_cast<std::int64_t>(victims_.size()) < count) {
      const Slot incoming = first == last ? kNoSlot : *--last;
      if (incoming != kNoSlot) policy_->notice(incoming);
      const Slot victim = policy_->choose(incoming);
      if (victim == kNoSlot) break;
      victims_.push_back(victim);
      policy_->set_evictable(victim, false);
      if (blocks_.above(victim) != kNoSlot) unpin(blocks_.above(victim));
    }
    for (const Slot victim : victims_) {
      policy_->remove(victim, true);
      states_[victim].is_resident = false;
      states_[victim].evicted_at = clock_;
    }
    num_resident_ -= static_cast<std::int64_t>(victims_.size());
    result_.num_evicted += static_cast<std::int64_t>(victims_.size());
  }

  void stop(std::size_t index) {
    const Running gone = running_[index];
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
    for (std::size_t i = 0; i < length(gone.request); ++i) unpin(blocks_.of(gone.request)[i]);
    num_outputs_ -= gone.num_outputs;
  }

  void end_first() {
    stop(0);
    ++num_ended_;
  }

  void preempt(std::size_t index) {
    preempted_.push_back(running_[index].request);
    stop(index);
    ++result_.num_preempted;
  }

  void grow_all() {
    for (std::size_t index = 0; index < running_.size(); ++index) {
      const Running own = running_[index];
      const std::int64_t age = num_admissions_ - own.admission;
      const std::int64_t target = (trace_.output_blocks[own.request] * age + num_running_ - 1) / num_running_;
      const std::int64_t more = target - own.num_outputs;
      while (more > num_free()) {
        evict(more - num_free(), nullptr, nullptr);
        if (more <= num_free()) break;
        if (running_.size() == 1) return preempt(0);
        const bool is_last = index + 1 == running_.size();
        preempt(running_.size() - (is_last ? 2 : 1));
        index -= is_last;
      }
      if (more <= 0) continue;
      running_[index].num_outputs = target;
      num_outputs_ += more;
    }
  }

  const PrefixTrace& trace_;
  const Interned blocks_;
  std::vector<State> states_;
  const std::int64_t capacity_, num_running_, soon_;
  const double block_bytes_;
  std::shared_ptr<RowsToCome> future_;
  std::unique_ptr<Policy> policy_;
  std::deque<Running> running_;
  std::deque<std::size_t> preempted_;
  std::vector<Slot> victims_;
  std::int64_t num_resident_ = 0, num_outputs_ = 0, num_admissions_ = 0, num_ended_ = 0;
  std::int64_t clock_ = 0;  // block accesses so far
  PrefixReplayResult result_;
};

}  // namespace

PrefixReplayResult replay_prefix(const std::string& name, std::int64_t capacity, const PrefixTrace& trace,
                                 const PrefixReplayOptions& how, const PolicyOptions& options) {
  return PrefixReplay(name, capacity, trace, how, options).run();
}

}  // namespace sage
