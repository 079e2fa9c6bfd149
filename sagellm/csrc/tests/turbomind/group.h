// The batch loop of one group of tensor-parallel ranks: requests come in, rank 0 decides, every rank carries it out on its
// own engine and thread, and after each step all that must hold is looked at.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "findings.h"
#include "installed.h"
#include "kv.h"
#include "rank_threads.h"
#include "spy.h"

namespace sage::host {

struct GroupOptions {
  EngineOptions engine;  // engine.num_ranks is the size of the group
  int max_batch = 8;
  int budget = 16, max_budget = 64;  // new tokens of a step: by default, and what the buffers hold
  int num_collectives = 0;           // of each rank in each step
  bool strict = true;                // nonsense from the table is a finding, not only what comes of it
};

enum class RequestState { kQueued, kRunning, kFinished, kCancelled, kLost };  // lost: asleep before it was done

struct Request {
  SeqId seq_id = 0;
  std::uint64_t order = 0;  // the engine's own priority
  Tokens tokens;            // prompt, and all that will be generated
  int num_prompt = 0;
  int context_len = 0;       // known so far
  std::vector<Kv> kv;        // of each rank
  RequestState state = RequestState::kQueued;
  int hit_tokens = 0;        // found at lookups
  int num_steps = 0;         // that it took part in
  int num_preempted = 0;
  bool cancelled = false;    // at the next step
};

class Group {
 public:
  Group(EngineFactory factory, const GroupOptions& options, const SageHooks* table, const SageHooks* steering = nullptr);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Generates `num_new` tokens that depend on the prompt alone.
  SeqId submit(const Tokens& prompt, int num_new);
  void cancel(SeqId seq_id);
  // Throws Violation if anything is found wrong.
  void step();
  // Steps until nothing is left to do; throws Violation if that takes more than `max_steps`.
  int drain(int max_steps = 1000);
  void sleep();
  void wake(const SageHooks* table, const SageHooks* steering = nullptr);

  const Request& request(SeqId seq_id) const { return requests_.at(seq_id); }
  bool is_active(SeqId seq_id) const;  // in the last step
  SequenceView view(SeqId seq_id, int rank = 0) const { return engine(rank).sequence(seq_id); }
  std::vector<SageBlockInfo> blocks(int rank = 0) const { return engine(rank).blocks(); }
  // Counts of this generation.
  const Tally& tally(int rank = 0) const { return spy_->tally(rank); }
  int num_steps() const { return static_cast<int>(num_steps_); }
  int num_queued() const { return static_cast<int>(queue_.size()); }
  int num_running() const { return static_cast<int>(running_.size()); }
  int num_tokens() const { return last_num_tokens_; }  // of the last step
  // Digest of all ended groups of the process: who took part in which step with which blocks. Two engines that behave alike
  // have the same.
  static std::uint64_t digest() { return all_digests; }
  // Prompt and generated tokens of a request, for one that goes on where it ended.
  static Tokens continued(const Tokens& prompt, int num_new);

 private:
  struct Decision {
    std::vector<SeqId> admitted, cancelled;
    std::vector<Candidate> candidates;
    int budget = 0;
    bool all_held = false;
  };
  struct Part {
    SeqId seq_id;
    int input_len;
    bool partial, finished;
    bool operator==(const Part& other) const {
      return seq_id == other.seq_id && input_len == other.input_len && partial == other.partial && finished == other.finished;
    }
  };
  struct RankStep {
    std::vector<Part> active;
    std::vector<SeqId> preempted;
    std::map<SeqId, int> hits;
    std::vector<BlockId> given_up;  // by those that finished: theirs until the next round
    int num_releases = 0;           // that must have been told, at least
  };
  struct Collective;

  Engine& engine(int rank) const { return *engines_.at(static_cast<std::size_t>(rank)); }
  void guarded(int rank, const std::function<void()>& work);
  void decide(Decision& decision);
  void admit(Decision& decision);
  void schedule(Decision& decision);
  void run_rank(int rank, const Decision& decision, RankStep& done);
  void forward(int rank, const Request& request, RankStep& done);
  void collectives(int rank);
  void finish(int rank, const Request& request, RankStep& done);
  void settle(const Decision& decision, const RankStep& done);
  void check_rank(int rank, const Decision& decision, const RankStep& done);
  void add_to_digest(const RankStep& done);
  void check_replica(int rank, const RankStep& first, const RankStep& done);

  const EngineFactory factory_;
  const GroupOptions options_;
  const int num_ranks_;
  std::uint64_t generation_ = 0, num_steps_ = 0, next_order_ = 1;
  SeqId next_seq_id_ = 100;
  int last_num_tokens_ = 0;
  std::uint64_t digest_ = 0;
  static std::atomic<std::uint64_t> all_digests;
  bool hooked_ = false;  // a table is installed, if only the spy
  std::map<SeqId, Request> requests_;
  std::deque<SeqId> queue_;
  std::vector<SeqId> running_, last_active_;
  mutable Findings findings_;
  std::unique_ptr<Spy> spy_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::vector<Collective>> pending_;  // of each rank: collectives whose duration is to be told
  RankThreads ranks_;
};

}  // namespace sage::host
