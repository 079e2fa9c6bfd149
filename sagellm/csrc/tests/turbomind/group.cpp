#include "group.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <set>

namespace sage::host {

struct Group::Collective {
  SageComm comm;
  void* token;
};

namespace {

// Another engine of the process has another number.
GroupOptions numbered(GroupOptions options) {
  static std::atomic<std::uint64_t> next{1};
  options.engine.engine = next++;
  return options;
}

bool holds_blocks(const SequenceView& view) { return view.status != SAGE_SEQUENCE_CACHED && !view.blocks.empty(); }

}  // namespace

Group::Group(EngineFactory factory, const GroupOptions& options, const SageHooks* table, const SageHooks* steering)
    : factory_(std::move(factory)),
      options_(numbered(options)),
      num_ranks_(options.engine.num_ranks),
      engines_(static_cast<std::size_t>(options.engine.num_ranks)),
      pending_(engines_.size()),
      ranks_(options.engine.num_ranks) {
  wake(table, steering);
}

std::atomic<std::uint64_t> Group::all_digests{0};

Group::~Group() {
  all_digests += digest_;
  for (std::unique_ptr<Engine>& engine : engines_) engine.reset();
}

void Group::guarded(int rank, const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    findings_.add(said("rank", rank) + " failed: " + error.what());
  }
}

void Group::wake(const SageHooks* table, const SageHooks* steering) {
  ++generation_;
  EngineOptions options = options_.engine;
  options.generation = generation_;
  spy_ = std::make_unique<Spy>(table, steering, options, options_.strict, findings_);
  hooked_ = table != nullptr || steering != nullptr;
  ranks_.run([&](int rank) {
    guarded(rank, [&] {
      EngineOptions own = options;
      own.rank = rank;
      own.hooks = hooked_ ? spy_->hooks() : nullptr;
      engines_[static_cast<std::size_t>(rank)] = factory_(own);
      spy_->attach(rank, &engine(rank));
    });
  });
  findings_.raise();
}

void Group::sleep() {
  ranks_.run([&](int rank) {
    guarded(rank, [&] {
      for (const Collective& done : pending_[static_cast<std::size_t>(rank)]) {
        spy_->hooks()->comm_end(spy_->hooks()->ctx, &done.comm, done.token, 0.25F);
      }
      pending_[static_cast<std::size_t>(rank)].clear();
    });
  });
  // Not on the threads of the ranks: the caller that puts an engine to sleep takes its managers away.
  for (std::unique_ptr<Engine>& engine : engines_) engine.reset();
  for (const SeqId seq_id : running_) requests_.at(seq_id).state = RequestState::kLost;
  running_.clear();
  last_active_.clear();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (hooked_ && spy_->tally(rank).resets != 1) findings_.add("an engine went to sleep without telling reset");
  }
  findings_.raise();
}

Tokens Group::continued(const Tokens& prompt, int num_new) {
  Tokens tokens = prompt;
  std::uint64_t state = 7;
  for (const Token token : prompt) state = state * 31 + static_cast<std::uint64_t>(token);
  for (int i = 0; i < num_new; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    tokens.push_back(static_cast<Token>(state >> 33) % 1000);
  }
  return tokens;
}

SeqId Group::submit(const Tokens& prompt, int num_new) {
  Request request;
  request.seq_id = next_seq_id_++;
  request.order = next_order_++;
  request.tokens = continued(prompt, num_new);
  request.num_prompt = request.context_len = static_cast<int>(prompt.size());
  for (int rank = 0; rank < num_ranks_; ++rank) {
    request.kv.push_back(compute_kv(request.tokens.data(), request.tokens.size(), rank));
  }
  queue_.push_back(request.seq_id);
  return requests_.emplace(request.seq_id, std::move(request)).first->first;
}

void Group::cancel(SeqId seq_id) {
  Request& request = requests_.at(seq_id);
  if (request.state == RequestState::kRunning) request.cancelled = true;
  if (request.state == RequestState::kQueued) {
    request.state = RequestState::kCancelled;
    queue_.erase(std::find(queue_.begin(), queue_.end(), seq_id));
  }
}

bool Group::is_active(SeqId seq_id) const {
  return std::find(last_active_.begin(), last_active_.end(), seq_id) != last_active_.end();
}

int Group::drain(int max_steps) {
  for (int i = 0; i < max_steps; ++i) {
    if (queue_.empty() && running_.empty()) return i;
    step();
  }
  throw Violation("requests did not come to an end");
}

void Group::step() {
  Decision decision;
  ranks_.run_first([&](int) { guarded(0, [&] { decide(decision); }); });
  ++num_steps_;
  std::vector<RankStep> done(engines_.size());
  ranks_.run([&](int rank) {
    guarded(rank, [&] { run_rank(rank, decision, done[static_cast<std::size_t>(rank)]); });
  });
  findings_.raise();
  settle(decision, done.front());
  for (int rank = 0; rank < num_ranks_; ++rank) {
    check_rank(rank, decision, done[static_cast<std::size_t>(rank)]);
    if (rank == 0) add_to_digest(done.front());
    if (rank > 0) check_replica(rank, done.front(), done[static_cast<std::size_t>(rank)]);
  }
  findings_.raise();
}

void Group::decide(Decision& decision) {
  for (const SeqId seq_id : running_) {
    if (requests_.at(seq_id).cancelled) decision.cancelled.push_back(seq_id);
  }
  const auto stays = [this](SeqId seq_id) { return !requests_.at(seq_id).cancelled; };
  admit(decision);
  for (const auto& ids : {running_, decision.admitted}) {
    for (const SeqId seq_id : ids) {
      const Request& request = requests_.at(seq_id);
      if (stays(seq_id)) decision.candidates.push_back({seq_id, request.context_len, request.order});
    }
  }
  decision.budget = options_.budget;
  if (spy_->hooks()->schedule != nullptr && !decision.candidates.empty()) schedule(decision);
  decision.budget = std::min(std::max(decision.budget, 1), options_.max_budget);
  const auto held = [](const Candidate& candidate) { return candidate.priority == SAGE_PRIORITY_HOLD; };
  decision.all_held = !decision.candidates.empty() &&
                      std::all_of(decision.candidates.begin(), decision.candidates.end(), held);
  if (decision.all_held) {
    // One runs whatever is held: the one that the engine itself would have run first.
    const auto earlier = [this](const Candidate& a, const Candidate& b) {
      return requests_.at(a.seq_id).order < requests_.at(b.seq_id).order;
    };
    std::min_element(decision.candidates.begin(), decision.candidates.end(), earlier)->priority = 0;
  }
}

void Group::admit(Decision& decision) {
  const int room = options_.max_batch - static_cast<int>(running_.size());
  std::vector<std::int32_t> admitted(std::max(queue_.size(), static_cast<std::size_t>(options_.max_batch)));
  std::int32_t n = -1;
  if (room > 0 && spy_->hooks()->admit != nullptr && !queue_.empty()) {
    std::vector<SageRequest> requests;
    for (const SeqId seq_id : queue_) {
      const Request& request = requests_.at(seq_id);
      requests.push_back({seq_id, request.num_prompt, static_cast<int>(request.tokens.size()) - request.num_prompt});
    }
    n = spy_->hooks()->admit(spy_->hooks()->ctx, options_.engine.engine, options_.engine.group, requests.data(),
                             static_cast<std::int32_t>(requests.size()), room, admitted.data());
  }
  std::vector<SeqId> waiting(queue_.begin(), queue_.end());
  if (n < 0) {
    n = std::min(std::max(room, 0), static_cast<int>(waiting.size()));
    for (std::int32_t i = 0; i < n; ++i) admitted[static_cast<std::size_t>(i)] = i;
  }
  for (std::int32_t i = 0; i < std::min(n, room); ++i) {
    const std::int32_t place = admitted[static_cast<std::size_t>(i)];
    if (place < 0 || place >= static_cast<std::int32_t>(waiting.size())) continue;
    const SeqId seq_id = waiting[static_cast<std::size_t>(place)];
    const auto queued = std::find(queue_.begin(), queue_.end(), seq_id);
    if (queued == queue_.end()) continue;  // named twice
    queue_.erase(queued);
    decision.admitted.push_back(seq_id);
  }
}

void Group::schedule(Decision& decision) {
  std::vector<SequenceView> views;
  std::vector<SageSequence> sequences;
  std::vector<std::uint64_t> priorities;
  for (const Candidate& candidate : decision.candidates) {
    const bool is_new = requests_.at(candidate.seq_id).state == RequestState::kQueued;
    views.push_back(is_new ? SequenceView{SAGE_SEQUENCE_CACHED, 0, 0, {}, {}} : view(candidate.seq_id));
  }
  for (std::size_t i = 0; i < views.size(); ++i) {
    const Request& request = requests_.at(decision.candidates[i].seq_id);
    const bool in_prompt = views[i].cache_len < request.num_prompt;
    const Token* const prompt = in_prompt ? request.tokens.data() : nullptr;
    sequences.push_back({request.seq_id, request.order, views[i].status, request.context_len, views[i].cache_len,
                         static_cast<std::int32_t>(views[i].blocks.size()), views[i].blocks.data(),
                         views[i].unique_ids.data(), prompt, in_prompt ? request.num_prompt : 0, 0});
    priorities.push_back(request.order);
  }
  SageStep step{};
  step.struct_size = sizeof step;
  step.group = options_.engine.group;
  step.engine = options_.engine.engine;
  step.step = num_steps_;
  step.max_batch = options_.max_batch;
  step.default_budget = options_.budget;
  step.max_budget = options_.max_budget;
  for (const SageBlockInfo& info : blocks()) {
    ++(info.state == SAGE_BLOCK_FREE ? step.free_blocks
       : info.state == SAGE_BLOCK_CACHED ? step.cached_blocks
                                         : step.active_blocks);
  }
  std::int32_t budget = options_.budget;
  if (spy_->hooks()->schedule(spy_->hooks()->ctx, &step, sequences.data(), static_cast<std::int32_t>(sequences.size()),
                              priorities.data(), &budget) != 0) {
    return;
  }
  std::set<std::uint64_t> seen;
  for (const std::uint64_t priority : priorities) {
    if (priority != SAGE_PRIORITY_HOLD && !seen.insert(priority).second) return;
  }
  decision.budget = budget;
  for (std::size_t i = 0; i < priorities.size(); ++i) decision.candidates[i].priority = priorities[i];
}

void Group::run_rank(int rank, const Decision& decision, RankStep& done) {
  Engine& engine = this->engine(rank);
  done.num_releases = spy_->tally(rank).releases;
  for (const SeqId seq_id : decision.admitted) {
    const Request& request = requests_.at(seq_id);
    engine.create(seq_id, Tokens(request.tokens.begin(), request.tokens.begin() + request.num_prompt));
  }
  for (const SeqId seq_id : decision.cancelled) {
    const Request& request = requests_.at(seq_id);
    if (holds_blocks(engine.sequence(seq_id))) ++done.num_releases;
    engine.cache_generation(seq_id, Tokens(request.tokens.begin(), request.tokens.begin() + request.context_len));
    if (!engine.erase(seq_id)) throw std::logic_error("a sequence that was cancelled is not there");
  }
  std::map<SeqId, SequenceView> before;
  for (const Candidate& candidate : decision.candidates) before.emplace(candidate.seq_id, engine.sequence(candidate.seq_id));
  engine.materialize(decision.candidates, decision.budget);
  collectives(rank);
  std::vector<SeqId> active;
  for (const Candidate& candidate : decision.candidates) {
    const SequenceView then = before.at(candidate.seq_id), now = engine.sequence(candidate.seq_id);
    if (then.cache_len == 0 && now.cache_len > 0) done.hits[candidate.seq_id] = now.cache_len;
    if (then.status != SAGE_SEQUENCE_CACHED && now.status == SAGE_SEQUENCE_CACHED) {
      done.preempted.push_back(candidate.seq_id);
      if (holds_blocks(then)) ++done.num_releases;
    }
    if (now.status != SAGE_SEQUENCE_ACTIVE) continue;
    active.push_back(candidate.seq_id);
    forward(rank, requests_.at(candidate.seq_id), done);
  }
  engine.cache_prompt(active);
  int num_tokens = 0, num_finished = 0;
  for (const Part& part : done.active) {
    if (part.finished) finish(rank, requests_.at(part.seq_id), done);
    num_tokens += part.input_len;
    num_finished += part.finished ? 1 : 0;
  }
  if (rank == 0 && spy_->hooks()->step_end != nullptr && !active.empty()) {
    const SageStepResult result{sizeof result, options_.engine.group, options_.engine.engine, num_steps_,
                                static_cast<std::int32_t>(active.size()), num_tokens, num_finished, 0};
    spy_->hooks()->step_end(spy_->hooks()->ctx, &result);
  }
}

// Attention reads the KV of every earlier token, and writes that of the new ones.
void Group::forward(int rank, const Request& request, RankStep& done) {
  Engine& engine = this->engine(rank);
  const SequenceView view = engine.sequence(request.seq_id);
  const Kv& kv = request.kv[static_cast<std::size_t>(rank)];
  const int end = view.cache_len + view.input_len, block_len = options_.engine.block_len;
  if (view.input_len < 1 || end > request.context_len || end > static_cast<int>(view.blocks.size()) * block_len) {
    findings_.add(said("rank", rank) + said(": sequence", request.seq_id) +
                  said(" was given nothing to do, or no blocks for it:", view.cache_len, view.input_len,
                       request.context_len, view.blocks.size()));
    return;
  }
  if (!holds(engine, view.blocks.data(), block_len, kv, view.cache_len)) {
    findings_.add(said("rank", rank) + said(": sequence", request.seq_id) + " reads KV that was not computed for it");
  }
  for (int i = view.cache_len; i < end; ++i) {
    void* const block = engine.memory(view.blocks[static_cast<std::size_t>(i / block_len)]);
    static_cast<std::uint64_t*>(block)[i % block_len] = kv[static_cast<std::size_t>(i)];
  }
  engine.advance(request.seq_id);
  const bool partial = end < request.context_len;
  const bool finished = !partial && request.context_len + 1 >= static_cast<int>(request.tokens.size());
  done.active.push_back({request.seq_id, view.input_len, partial, finished});
}

void Group::finish(int rank, const Request& request, RankStep& done) {
  Engine& engine = this->engine(rank);
  const SequenceView view = engine.sequence(request.seq_id);
  if (holds_blocks(view)) ++done.num_releases;
  done.given_up.insert(done.given_up.end(), view.blocks.begin(), view.blocks.end());
  engine.cache_generation(request.seq_id, Tokens(request.tokens.begin(), request.tokens.begin() + request.context_len + 1));
  engine.erase(request.seq_id);
}

void Group::collectives(int rank) {
  const SageHooks& hooks = *spy_->hooks();
  auto& pending = pending_[static_cast<std::size_t>(rank)];
  const bool timed = (hooks.flags & SAGE_TIME_COMM) != 0 && hooks.comm_end != nullptr;
  for (int i = 0; i < options_.num_collectives; ++i) {
    for (const Collective& done : pending) hooks.comm_end(hooks.ctx, &done.comm, done.token, 0.25F);
    pending.clear();
    SageComm comm{};
    comm.struct_size = sizeof comm;
    comm.op = i % 2 == 0 ? SAGE_COMM_ALL_REDUCE_RMSNORM : SAGE_COMM_ALL_GATHER;
    comm.rank = rank;
    comm.n_ranks = num_ranks_;
    comm.bytes = 1024;
    void* const token = hooks.comm_begin != nullptr ? hooks.comm_begin(hooks.ctx, &comm) : nullptr;
    if (timed) {
      pending.push_back({comm, token});
    } else if (hooks.comm_end != nullptr) {
      hooks.comm_end(hooks.ctx, &comm, token, -1);
    }
  }
}

void Group::settle(const Decision& decision, const RankStep& done) {
  for (const SeqId seq_id : decision.admitted) {
    requests_.at(seq_id).state = RequestState::kRunning;
    running_.push_back(seq_id);
  }
  for (const SeqId seq_id : decision.cancelled) requests_.at(seq_id).state = RequestState::kCancelled;
  for (const auto& [seq_id, hit_tokens] : done.hits) requests_.at(seq_id).hit_tokens += hit_tokens;
  for (const SeqId seq_id : done.preempted) ++requests_.at(seq_id).num_preempted;
  last_active_.clear();
  last_num_tokens_ = 0;
  for (const Part& part : done.active) {
    Request& request = requests_.at(part.seq_id);
    last_active_.push_back(part.seq_id);
    last_num_tokens_ += part.input_len;
    ++request.num_steps;
    if (!part.partial) ++request.context_len;
    if (part.finished) request.state = RequestState::kFinished;
  }
  const auto over = [this](SeqId seq_id) { return requests_.at(seq_id).state != RequestState::kRunning; };
  running_.erase(std::remove_if(running_.begin(), running_.end(), over), running_.end());
}

}  // namespace sage::host
