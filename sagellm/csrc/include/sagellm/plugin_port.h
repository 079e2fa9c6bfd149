// A bounded question from an engine's thread to a plug-in that answers on a thread of its own, mostly in Python.
//
// An engine's thread copies its question into the one place there is, wakes the thread that waits in `next`, and waits for
// at most the time limit, which includes waiting for the place. An answer that is late or invalid, or an error,
// switches the port off and it stays off, so a plug-in costs the engine its time limit once at most. Later answers have a
// number that no question has any more, and are dropped. Notices go into a queue of bounded size and leave it in batches.
//
// No interpreter is touched here. The thread in `next` is the only one that may be slow.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "sagellm/advisor.h"
#include "sagellm/stored_blocks.h"

namespace sage {

// Bits of what somebody listens to.
enum PortTopic : std::uint32_t {
  kAskVictims = 1u,
  kAskSchedule = 2u,
  kAskAdmit = 4u,
  kTellEvicted = 1u << 8,
  kTellMatched = 1u << 9,
  kTellStored = 1u << 10,
  kTellStepEnd = 1u << 11,
  kTellCollective = 1u << 12
};
inline constexpr std::uint32_t kAllQuestions = kAskVictims | kAskSchedule | kAskAdmit;

const char* topic_name(PortTopic topic) noexcept;

struct PortOptions {
  double time_limit_s = 1.0;
  std::uint32_t topics = 0;
  std::size_t queue_bytes = std::size_t{16} << 20;  // notices beyond it push the oldest ones out
  double coalesce_s = 0.01;                         // how long a notice may wait for company
};

// A sequence as a question carries it: SageSequence without what it points to.
struct PortSequence {
  std::uint64_t seq_id, priority;
  std::int32_t status, context_len, cache_len, num_blocks, num_prompt;
};

struct PortQuestion {
  std::uint64_t number = 0;
  PortTopic topic{};
  std::uint64_t engine = 0;
  std::int32_t group = 0, block_len = 0;
  // kAskVictims; columns with one row a candidate. `timestamps` is empty where the engine has no block information.
  std::int32_t count = 0;
  std::vector<std::int32_t> ids, parents, depths;
  std::vector<std::uint64_t> timestamps;
  std::optional<SageCounts> counts;
  // kAskSchedule
  SageStep step{};
  std::vector<PortSequence> sequences;
  // kAskAdmit
  std::int32_t max_admitted = 0;
  std::vector<SageRequest> requests;
};

struct PortAnswer {
  bool is_default = true;               // nothing below counts: the engine decides
  std::vector<std::int32_t> chosen;     // victims, or places of admitted requests
  std::vector<std::uint64_t> priorities;  // one a sequence
  std::int32_t budget = 0;
};

struct PortNotice {
  PortTopic topic{};
  std::int64_t time_ns = 0;  // std::chrono::steady_clock
  std::uint64_t engine = 0, seq_id = 0;
  std::int32_t group = 0;
  std::int32_t num_tokens = 0;             // matched: tokens of the prompt
  std::int32_t num_blocks = 0;             // matched: blocks found
  std::int32_t first_token = 0, kind = 0;  // stored: SageStoreKind
  std::vector<std::int32_t> ids, tokens;
  SageStepResult result{};
  SageComm comm{};
  float milliseconds = 0;
  std::size_t num_bytes() const { return sizeof(*this) + (ids.size() + tokens.size()) * sizeof(std::int32_t); }
};

struct PortDelivery {
  std::vector<PortNotice> notices;  // in order, older than the question
  std::optional<PortQuestion> question;
};

// Why a port is off. `kind`: overran, raised or nonsense.
struct PortFault {
  std::string hook, kind, detail;
};

struct PortStats {
  std::uint64_t asked = 0, answered = 0, late = 0;  // late: answers to questions that had been given up
  std::uint64_t told = 0, lost = 0;                 // notices queued; and pushed out by later ones
};

class PluginPort final : public Advisor {
 public:
  explicit PluginPort(const PortOptions& options);

  // ---- the side that answers

  // The next question with the notices before it, or notices that have waited for company. False: the port is off or closed,
  // and nothing will come; what was told before it was closed comes first. True with neither after `timeout_s`.
  bool next(double timeout_s, PortDelivery& delivery);
  // Returns false if the question has been given up.
  bool answer(std::uint64_t number, PortAnswer&& answer);
  // Switch off, as after a fault of the port's own.
  void fail(const std::string& hook, const std::string& kind, const std::string& detail);
  // These topics are of no interest any more: their questions are left to the engine without a wait.
  void leave(std::uint32_t topics) noexcept;
  // Closes the port without a fault: nothing is asked or told any more.
  void close() noexcept;

  std::optional<PortFault> fault() const;
  std::uint32_t topics() const noexcept { return open_.load(std::memory_order_relaxed); }
  bool is_closed() const noexcept { return closed_.load(std::memory_order_acquire); }
  PortStats stats() const;

  // ---- the engine's side
  bool select_victims(const SageManager& manager, const std::int32_t* cached, std::int32_t n, std::int32_t count,
                      std::vector<std::int32_t>& victims) noexcept override;
  bool schedule(const SageStep& step, const SageSequence* sequences, std::int32_t n, std::uint64_t* priorities,
                std::int32_t* budget) noexcept override;
  bool admit(std::uint64_t engine, std::int32_t group, const SageRequest* requests, std::int32_t n, std::int32_t max_admitted,
             std::vector<std::int32_t>& admitted) noexcept override;
  void evicted(const SageManager& manager, const std::int32_t* ids, std::int32_t n) noexcept override;
  void lost(const SageManager& manager, const std::int32_t* ids, std::size_t n) noexcept override;
  void reset(const SageManager& manager) noexcept override;
  void matched(const SageManager& manager, const SageSequence& sequence, std::int32_t num_blocks) noexcept override;
  void stored(const SageManager& manager, std::uint64_t seq_id, std::int32_t kind, const std::int32_t* tokens,
              const std::int32_t* ids, std::int32_t num_blocks) noexcept override;
  void step_end(const SageStepResult& result) noexcept override;
  void collective(const SageComm& comm, float milliseconds) noexcept override;

 private:
  using Clock = std::chrono::steady_clock;
  enum class Place { kEmpty, kAsked, kTaken, kAnswered };

  bool is_open(std::uint32_t topic) const noexcept { return (topics() & topic) != 0; }
  bool ask(PortQuestion&& question, PortAnswer& answer);
  void tell(PortNotice&& notice);
  void blame(PortTopic topic, const std::string& detail);
  void switch_off(const std::string& hook, const std::string& kind, const std::string& detail);  // under the mutex
  void shut() noexcept;                                                                          // under the mutex

  const PortOptions options_;
  const Clock::duration time_limit_, coalesce_;
  std::atomic<std::uint32_t> open_;
  std::atomic<bool> closed_{false};
  StoredBlocks blocks_;  // which block continues which

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable place_free_, answered_, called_;
  Place place_ = Place::kEmpty;
  std::uint64_t number_ = 0;
  PortQuestion question_;
  PortAnswer answer_;
  std::deque<PortNotice> notices_;
  std::size_t notice_bytes_ = 0;
  std::optional<PortFault> fault_;
  PortStats stats_;
};

}  // namespace sage
