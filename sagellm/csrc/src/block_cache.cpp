#include "block_cache.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace sage {

namespace {

constexpr std::uint64_t kAnyAge = std::numeric_limits<std::uint64_t>::max();

}  // namespace

BlockCache::BlockCache(std::size_t block_len, std::size_t max_blocks) : index_(block_len), unique_ids_(max_blocks), queued_(max_blocks), queue_limit_(2 * max_blocks) {}

void BlockCache::check_ids(const std::int32_t* ids, std::size_t n) const {
  for (std::size_t i = 0; i < n; ++i) {
    if (ids[i] >= 0 && static_cast<std::size_t>(ids[i]) < unique_ids_.size()) continue;
    throw Error(ErrorKind::kArgument, "block " + std::to_string(ids[i]) + "; the manager has " +
                                          std::to_string(unique_ids_.size()) + " blocks.");
  }
}

void BlockCache::lookup(const std::int32_t* tokens, std::size_t num_tokens, std::vector<std::int32_t>& ids,
                        std::vector<std::uint64_t>& unique_ids) {
  index_.lookup({}, tokens, num_tokens, match_);
  ids.assign(match_.path.blocks.begin(), match_.path.blocks.end());
  unique_ids.clear();
  for (const std::int32_t id : ids) unique_ids.push_back(unique_of(id));
}

std::size_t BlockCache::store(const std::int32_t* tokens, const std::int32_t* ids, const std::uint64_t* unique_ids,
                              std::size_t n, std::vector<std::int32_t>& path) {
  path.clear();
  if (n == 0) return 0;
  check_ids(ids, n);
  // A block that was given out again without a word of its eviction: what it held is gone.
  for (std::size_t i = 0; i < n; ++i) {
    if (unique_of(ids[i]) != 0 && !is_indexed(ids[i], unique_ids[i])) forget(ids + i, 1);
  }
  Entry entry = index_.insert({}, tokens, n * index_.block_size(), ids, n);
  for (std::size_t i = n - entry.num_new_blocks; i < n; ++i) unique_of(ids[i]) = unique_ids[i];
  path = std::move(entry.path.blocks);
  return entry.num_new_blocks;
}

void BlockCache::released(const std::int32_t* ids, const std::uint64_t* unique_ids, std::size_t n, bool ended) {
  check_ids(ids, n);
  // The last ones first: a sequence that comes back goes on from the first block that it lost.
  std::int32_t last_indexed = -1;
  for (std::size_t i = n; i-- > 0;) {
    if (!is_indexed(ids[i], unique_ids[i])) {
      enqueue(ended ? garbage_ : waiting_, ids[i], unique_ids[i]);
    } else if (last_indexed < 0) {
      last_indexed = ids[i];
    }
  }
  // It was in use until now, not only at its last lookup. The end of a sequence was stored a moment ago.
  if (!ended && last_indexed >= 0) index_.touch(last_indexed);
}

// Where others choose the victims, no entry is taken from the queues, and void ones must not pile up.
void BlockCache::enqueue(std::deque<Orphan>& queue, std::int32_t id, std::uint64_t unique_id) {
  const Orphan orphan{id, unique_id, index_.clock()};
  if (&queue == &waiting_ && is_queued(orphan)) return;
  queued_[static_cast<std::size_t>(id)] = unique_id;
  queue.push_back(orphan);
  if (garbage_.size() + waiting_.size() <= queue_limit_) return;
  const auto is_void = [&](const Orphan& each) { return !is_queued(each); };
  for (auto* each : {&garbage_, &waiting_}) each->erase(std::remove_if(each->begin(), each->end(), is_void), each->end());
  queue_limit_ = 2 * std::max(unique_ids_.size(), garbage_.size() + waiting_.size());
}

std::vector<std::int32_t> BlockCache::evicted(const std::int32_t* ids, std::size_t n) {
  check_ids(ids, n);
  std::vector<std::int32_t> indexed;
  for (std::size_t i = 0; i < n; ++i) {
    if (unique_of(ids[i]) != 0) indexed.push_back(ids[i]);
    queued_[static_cast<std::size_t>(ids[i])] = 0;
  }
  return indexed.empty() ? indexed : forget(indexed.data(), indexed.size());
}

// Takes blocks out of the index, and with them all that continues them, which is returned.
std::vector<std::int32_t> BlockCache::forget(const std::int32_t* ids, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) unique_of(ids[i]) = 0;
  const Removal removed = index_.invalidate_blocks(ids, n, Tier::kGpu);
  std::vector<std::int32_t> continued;
  for (const std::int32_t id : removed.blocks) {
    if (unique_of(id) == 0) continue;
    enqueue(garbage_, id, unique_of(id));
    unique_of(id) = 0;
    continued.push_back(id);
  }
  return continued;
}

void BlockCache::choose_victims(std::size_t count, const std::function<bool(std::int32_t, std::uint64_t)>& cached,
                                std::vector<std::int32_t>& victims) {
  victims.clear();
  // A block in a queue may be held again by now, given out again, or in the index.
  const auto consider = [&](std::deque<Orphan>& queue) {
    const Orphan orphan = queue.front();
    queue.pop_front();
    if (!is_queued(orphan)) return;
    queued_[static_cast<std::size_t>(orphan.id)] = 0;
    if (!is_indexed(orphan.id, orphan.unique_id) && cached(orphan.id, orphan.unique_id)) victims.push_back(orphan.id);
  };
  while (victims.size() < count && !garbage_.empty()) consider(garbage_);
  while (victims.size() < count) {
    const std::uint64_t waited = waiting_.empty() ? kAnyAge : waiting_.front().stamp;
    if (index_.oldest_stamp(Tier::kGpu) <= waited) {
      const auto idle = [&](std::int32_t id) { return cached(id, unique_of(id)); };
      for (const std::int32_t id : index_.evict_idle(count - victims.size(), Tier::kGpu, idle, waited).blocks) {
        unique_of(id) = queued_[static_cast<std::size_t>(id)] = 0;
        victims.push_back(id);
      }
    }
    // Blocks that the index still has are in use, or younger than the first of those that wait.
    if (waiting_.empty()) return;
    if (victims.size() < count) consider(waiting_);
  }
}

void BlockCache::check() const {
  index_.check();
  std::size_t known = 0;
  for (const std::uint64_t unique_id : unique_ids_) known += unique_id != 0;
  if (known != num_indexed()) throw std::logic_error("as many unique ids as blocks in the index");
}

}  // namespace sage
