#include "sagellm/plugin_port.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

namespace sage {

namespace {

// Runs what must not throw on an engine's thread; false if it did: memory has run out.
template <typename Work>
bool quietly(Work&& work) noexcept {
  try {
    return work();
  } catch (const std::exception&) {
    return false;
  }
}

std::chrono::steady_clock::duration seconds(double value) {
  // Years are enough, and do not overflow.
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(std::clamp(value, 0.0, 1e8)));
}

// The first value that stands in `values` twice.
template <typename T>
std::optional<T> find_repeated(std::vector<T> values) {
  std::sort(values.begin(), values.end());
  const auto repeated = std::adjacent_find(values.begin(), values.end());
  return repeated == values.end() ? std::nullopt : std::optional<T>(*repeated);
}

std::string text(const char* format, long long first, long long second) {
  char buffer[160];
  std::snprintf(buffer, sizeof buffer, format, first, second);
  return buffer;
}

}  // namespace

const char* topic_name(PortTopic topic) noexcept {
  switch (topic) {
    case kAskVictims: return "select_victims";
    case kAskSchedule: return "schedule";
    case kAskAdmit: return "admit";
    case kTellEvicted: return "evicted";
    case kTellMatched: return "matched";
    case kTellStored: return "stored";
    case kTellStepEnd: return "step_end";
    case kTellCollective: return "collective";
  }
  return "unknown";
}

PluginPort::PluginPort(const PortOptions& options)
    : options_(options),
      time_limit_(seconds(options.time_limit_s)),
      coalesce_(seconds(options.coalesce_s)),
      open_(options.topics) {}

// ---- the side that answers

bool PluginPort::next(double timeout_s, PortDelivery& delivery) {
  delivery = PortDelivery{};
  const auto deadline = Clock::now() + seconds(timeout_s);
  std::unique_lock lock(mutex_);
  while (true) {
    const bool is_closed = closed_.load(std::memory_order_relaxed);
    if (is_closed && notices_.empty()) return false;
    const auto now = Clock::now();
    auto until = deadline;
    bool is_due = is_closed;
    if (!notices_.empty() && !is_closed) {
      const auto due = Clock::time_point(std::chrono::nanoseconds(notices_.front().time_ns)) + coalesce_;
      is_due = now >= due;
      until = std::min(until, due);
    }
    const bool is_asked = place_ == Place::kAsked && !is_closed;
    if (is_asked || is_due) {
      delivery.notices.assign(std::make_move_iterator(notices_.begin()), std::make_move_iterator(notices_.end()));
      notices_.clear();
      notice_bytes_ = 0;
      if (is_asked) {
        delivery.question = std::move(question_);
        place_ = Place::kTaken;
      }
      return true;
    }
    if (now >= deadline) return true;
    called_.wait_until(lock, until);
  }
}

bool PluginPort::answer(std::uint64_t number, PortAnswer&& answer) {
  std::lock_guard guard(mutex_);
  if (place_ != Place::kTaken || number != number_ || closed_.load(std::memory_order_relaxed)) {
    ++stats_.late;
    return false;
  }
  answer_ = std::move(answer);
  place_ = Place::kAnswered;
  ++stats_.answered;
  answered_.notify_one();
  return true;
}

void PluginPort::fail(const std::string& hook, const std::string& kind, const std::string& detail) {
  std::lock_guard guard(mutex_);
  switch_off(hook, kind, detail);
}

void PluginPort::leave(std::uint32_t topics) noexcept { open_.fetch_and(~topics, std::memory_order_relaxed); }

void PluginPort::close() noexcept {
  std::lock_guard guard(mutex_);
  shut();
}

std::optional<PortFault> PluginPort::fault() const {
  std::lock_guard guard(mutex_);
  return fault_;
}

PortStats PluginPort::stats() const {
  std::lock_guard guard(mutex_);
  return stats_;
}

void PluginPort::switch_off(const std::string& hook, const std::string& kind, const std::string& detail) {
  if (closed_.load(std::memory_order_relaxed)) return;
  fault_ = PortFault{hook, kind, detail};
  notices_.clear();
  shut();
}

void PluginPort::shut() noexcept {
  open_.store(0, std::memory_order_relaxed);
  closed_.store(true, std::memory_order_release);
  place_free_.notify_all();
  answered_.notify_all();
  called_.notify_all();
}

// ---- asking and telling

bool PluginPort::ask(PortQuestion&& question, PortAnswer& answer) {
  const auto deadline = Clock::now() + time_limit_;
  const PortTopic topic = question.topic;
  const auto is_shut = [&] { return closed_.load(std::memory_order_relaxed); };
  const auto overran = [&](const char* what) {
    char detail[96];
    std::snprintf(detail, sizeof detail, "%s within %g s", what, options_.time_limit_s);
    switch_off(topic_name(topic), "overran", detail);
    return false;
  };
  std::unique_lock lock(mutex_);
  if (!place_free_.wait_until(lock, deadline, [&] { return is_shut() || place_ == Place::kEmpty; })) {
    return overran("no answer to the questions before");
  }
  if (is_shut()) return false;
  question.number = ++number_;
  question_ = std::move(question);
  place_ = Place::kAsked;
  ++stats_.asked;
  called_.notify_one();
  if (!answered_.wait_until(lock, deadline, [&] { return is_shut() || place_ == Place::kAnswered; })) {
    return overran("no answer");
  }
  if (is_shut()) return false;
  answer = std::move(answer_);
  place_ = Place::kEmpty;
  place_free_.notify_one();
  return !answer.is_default;
}

void PluginPort::tell(PortNotice&& notice) {
  const auto now = Clock::now().time_since_epoch();
  notice.time_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  std::lock_guard guard(mutex_);
  if (closed_.load(std::memory_order_relaxed)) return;
  const bool was_empty = notices_.empty();
  notice_bytes_ += notice.num_bytes();
  notices_.push_back(std::move(notice));
  ++stats_.told;
  while (notice_bytes_ > options_.queue_bytes) {
    notice_bytes_ -= notices_.front().num_bytes();
    notices_.pop_front();
    ++stats_.lost;
  }
  // Once a batch: the thread that waits then knows how long.
  if (was_empty) called_.notify_one();
}

void PluginPort::blame(PortTopic topic, const std::string& detail) { fail(topic_name(topic), "nonsense", detail); }

// ---- decisions

bool PluginPort::select_victims(const SageManager& manager, const std::int32_t* cached, std::int32_t n, std::int32_t count,
                                std::vector<std::int32_t>& victims) noexcept {
  if (!is_open(kAskVictims) || n <= 0 || count <= 0) return false;
  return quietly([&] {
    PortQuestion question;
    question.topic = kAskVictims;
    question.engine = manager.engine;
    question.group = manager.group;
    question.block_len = manager.block_len;
    question.count = count;
    question.ids.assign(cached, cached + n);
    blocks_.describe(manager, cached, n, question.parents, question.depths);
    if (manager.api != nullptr && manager.api->block_info != nullptr) {
      std::vector<SageBlockInfo> infos(static_cast<std::size_t>(n));
      manager.api->block_info(manager.manager, cached, n, infos.data());
      question.timestamps.reserve(infos.size());
      for (const SageBlockInfo& info : infos) question.timestamps.push_back(info.timestamp);
    }
    if (manager.api != nullptr && manager.api->counts != nullptr) {
      question.counts.emplace();
      question.counts->struct_size = sizeof(SageCounts);
      manager.api->counts(manager.manager, &*question.counts);
    }
    PortAnswer answer;
    if (!ask(std::move(question), answer)) return false;
    for (const std::int32_t id : answer.chosen) {
      if (std::binary_search(cached, cached + n, id)) continue;
      blame(kAskVictims, text("victim %lld is none of the %lld cached blocks", id, n));
      return false;
    }
    if (const auto twice = find_repeated(answer.chosen)) {
      blame(kAskVictims, text("victim %lld is named twice among %lld", *twice, static_cast<long long>(answer.chosen.size())));
      return false;
    }
    if (answer.chosen.size() > static_cast<std::size_t>(count)) answer.chosen.resize(static_cast<std::size_t>(count));
    victims = std::move(answer.chosen);
    return true;
  });
}

bool PluginPort::schedule(const SageStep& step, const SageSequence* sequences, std::int32_t n, std::uint64_t* priorities,
                          std::int32_t* budget) noexcept {
  if (!is_open(kAskSchedule) || n <= 0) return false;
  return quietly([&] {
    PortQuestion question;
    question.topic = kAskSchedule;
    question.engine = step.engine;
    question.group = step.group;
    question.step = step;
    question.sequences.reserve(static_cast<std::size_t>(n));
    for (std::int32_t i = 0; i < n; ++i) {
      const SageSequence& s = sequences[i];
      question.sequences.push_back({s.seq_id, priorities[i], s.status, s.context_len, s.cache_len, s.n_blocks, s.n_prompt});
    }
    PortAnswer answer;
    if (!ask(std::move(question), answer)) return false;
    const auto num_priorities = static_cast<long long>(answer.priorities.size());
    if (num_priorities != n) {
      blame(kAskSchedule, text("%lld priorities for %lld sequences", num_priorities, n));
      return false;
    }
    if (answer.budget < 1 || answer.budget > step.max_budget) {
      blame(kAskSchedule, text("a budget of %lld tokens; allowed are 1 to %lld", answer.budget, step.max_budget));
      return false;
    }
    std::vector<std::uint64_t> running;
    running.reserve(answer.priorities.size());
    std::copy_if(answer.priorities.begin(), answer.priorities.end(), std::back_inserter(running),
                 [](std::uint64_t priority) { return priority != SAGE_PRIORITY_HOLD; });
    if (const auto twice = find_repeated(running)) {
      blame(kAskSchedule, text("priority %lld is given twice among %lld", static_cast<long long>(*twice), num_priorities));
      return false;
    }
    std::copy(answer.priorities.begin(), answer.priorities.end(), priorities);
    *budget = answer.budget;
    return true;
  });
}

bool PluginPort::admit(std::uint64_t engine, std::int32_t group, const SageRequest* requests, std::int32_t n,
                       std::int32_t max_admitted, std::vector<std::int32_t>& admitted) noexcept {
  if (!is_open(kAskAdmit) || n <= 0) return false;
  return quietly([&] {
    PortQuestion question;
    question.topic = kAskAdmit;
    question.engine = engine;
    question.group = group;
    question.max_admitted = max_admitted;
    question.requests.assign(requests, requests + n);
    PortAnswer answer;
    if (!ask(std::move(question), answer)) return false;
    for (const std::int32_t place : answer.chosen) {
      if (place >= 0 && place < n) continue;
      blame(kAskAdmit, text("place %lld is admitted; there are %lld requests", place, n));
      return false;
    }
    if (const auto twice = find_repeated(answer.chosen)) {
      blame(kAskAdmit, text("place %lld is admitted twice; there are %lld requests", *twice, n));
      return false;
    }
    if (answer.chosen.size() > static_cast<std::size_t>(std::max(max_admitted, 0))) {
      blame(kAskAdmit,
            text("%lld requests are admitted; %lld fit", static_cast<long long>(answer.chosen.size()), max_admitted));
      return false;
    }
    admitted = std::move(answer.chosen);
    return true;
  });
}

// ---- notices

void PluginPort::evicted(const SageManager& manager, const std::int32_t* ids, std::int32_t n) noexcept {
  if (!is_open(kTellEvicted | kAskVictims | kTellStored) || n <= 0) return;
  quietly([&] {
    if (is_open(kAskVictims | kTellStored)) blocks_.evicted(manager, ids, n);
    if (!is_open(kTellEvicted)) return true;
    PortNotice notice;
    notice.topic = kTellEvicted;
    notice.engine = manager.engine;
    notice.group = manager.group;
    notice.ids.assign(ids, ids + n);
    tell(std::move(notice));
    return true;
  });
}

void PluginPort::lost(const SageManager& manager, const std::int32_t* ids, std::size_t n) noexcept {
  quietly([&] { return blocks_.evicted(manager, ids, static_cast<std::int32_t>(n)), true; });
}

void PluginPort::reset(const SageManager& manager) noexcept {
  quietly([&] { return blocks_.forget(manager), true; });
}

void PluginPort::matched(const SageManager& manager, const SageSequence& sequence, std::int32_t num_blocks) noexcept {
  if (!is_open(kTellMatched)) return;
  quietly([&] {
    PortNotice notice;
    notice.topic = kTellMatched;
    notice.engine = manager.engine;
    notice.group = manager.group;
    notice.seq_id = sequence.seq_id;
    notice.num_tokens = sequence.n_prompt;
    notice.num_blocks = num_blocks;
    const std::int32_t num_known = std::clamp(sequence.n_blocks, 0, num_blocks);
    if (sequence.blocks != nullptr) notice.ids.assign(sequence.blocks, sequence.blocks + num_known);
    tell(std::move(notice));
    return true;
  });
}

void PluginPort::stored(const SageManager& manager, std::uint64_t seq_id, std::int32_t kind, const std::int32_t* tokens,
                        const std::int32_t* ids, std::int32_t num_blocks) noexcept {
  if (!is_open(kTellStored | kAskVictims) || num_blocks <= 0) return;
  quietly([&] {
    const std::int32_t first = blocks_.stored(manager, ids, num_blocks);
    if (first == num_blocks || !is_open(kTellStored)) return true;
    PortNotice notice;
    notice.topic = kTellStored;
    notice.engine = manager.engine;
    notice.group = manager.group;
    notice.seq_id = seq_id;
    notice.kind = kind;
    notice.first_token = first * manager.block_len;
    notice.ids.assign(ids + first, ids + num_blocks);
    notice.tokens.assign(tokens + notice.first_token, tokens + std::ptrdiff_t{num_blocks} * manager.block_len);
    tell(std::move(notice));
    return true;
  });
}

void PluginPort::step_end(const SageStepResult& result) noexcept {
  if (!is_open(kTellStepEnd)) return;
  quietly([&] {
    PortNotice notice;
    notice.topic = kTellStepEnd;
    notice.engine = result.engine;
    notice.group = result.group;
    notice.result = result;
    tell(std::move(notice));
    return true;
  });
}

void PluginPort::collective(const SageComm& comm, float milliseconds) noexcept {
  if (!is_open(kTellCollective)) return;
  quietly([&] {
    PortNotice notice;
    notice.topic = kTellCollective;
    notice.group = comm.group;
    notice.comm = comm;
    notice.milliseconds = milliseconds;
    tell(std::move(notice));
    return true;
  });
}

}  // namespace sage
