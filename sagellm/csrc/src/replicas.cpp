#include "replicas.h"

#include <utility>

namespace sage {

Replicas::Replicas(std::size_t block_len, std::size_t max_blocks, std::int32_t num_ranks)
    : cache(block_len, max_blocks), num_ranks_(num_ranks), next_(static_cast<std::size_t>(num_ranks)) {}

void Replicas::clear(Answer& answer) {
  answer.count = 0;
  answer.ids.clear();
  answer.unique_ids.clear();
}

// Null for the first rank to make this call.
const Answer* Replicas::replay(std::int32_t rank, Call call, std::uint64_t digest) {
  const std::uint64_t number = next_[static_cast<std::size_t>(rank)]++;
  if (number == first_ + log_.size()) return nullptr;
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

bool Replicas::reset() { return ++num_reset_ == num_ranks_; }

}  // namespace sage
