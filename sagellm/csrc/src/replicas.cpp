#include "replicas.h"

#include <utility>

namespace sage {

namespace {

constexpr std::size_t kMaxSeen = 65536;

}  // namespace

Replicas::Replicas(std::int32_t num_ranks) : num_ranks_(num_ranks), next_(static_cast<std::size_t>(num_ranks)) {}

void Replicas::clear(Answer& answer) {
  answer.count = 0;
  answer.ids.clear();
  answer.unique_ids.clear();
}

// Null for the first rank to make this call.
const Answer* Replicas::replay(std::int32_t rank, Call call, std::uint64_t digest) {
  std::uint64_t& next = next_[static_cast<std::size_t>(rank)];
  const std::uint64_t number = next;
  if (number == first_ + log_.size()) return nullptr;
  ++next;
  Entry& entry = log_[static_cast<std::size_t>(number - first_)];
  const bool same = entry.call == call && entry.digest == digest;
  ++(same ? counts.replays : counts.divergences);
  if (!same) clear(scratch_);
  if (--entry.num_pending == 0) {
    // Ranks read in order, so the entries before it have been read by all.
    if (same) std::swap(scratch_, entry.answer);
    log_.pop_front();
    ++first_;
  } else if (same) {
    scratch_ = entry.answer;
  }
  return &scratch_;
}

void Replicas::count_lookup(const SageSequence& sequence, std::int32_t num_matched) {
  bool is_first = false;
  if (num_matched > 0) {
    is_first = seen_.erase(sequence.seq_id) == 0;  // it runs now, and is looked up again only if it loses everything
  } else {
    if (seen_.size() >= kMaxSeen) seen_.clear();
    is_first = seen_.insert(sequence.seq_id).second;
  }
  counts.lookups += is_first;
  counts.query_tokens += is_first ? static_cast<std::uint32_t>(sequence.n_prompt) : 0;
  counts.hits += num_matched > 0;
  counts.hit_tokens += static_cast<std::uint32_t>(num_matched);
}

bool Replicas::reset() { return ++num_reset_ == num_ranks_; }

}  // namespace sage
