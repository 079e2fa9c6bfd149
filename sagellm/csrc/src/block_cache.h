// The cached blocks of one set of replicas: prefixes in the index, and blocks that are in no prefix.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "sage_hooks.h"
#include "sagellm/prefix_index.h"

namespace sage {

class BlockCache {
 public:
  // Ids are below `max_blocks`.
  BlockCache(std::size_t block_len, std::size_t max_blocks);

  // The longest cached beginning of `tokens`; both vectors are overwritten.
  void lookup(const std::int32_t* tokens, std::size_t num_tokens, std::vector<std::int32_t>& ids,
              std::vector<std::uint64_t>& unique_ids);
  // Returns how many of the blocks are in the index only now. Those that hold what others hold already stay out of it; `path`
  // is overwritten with the blocks that the index has for the tokens.
  std::size_t store(const std::int32_t* tokens, const std::int32_t* ids, const std::uint64_t* unique_ids, std::size_t n,
                    std::vector<std::int32_t>& path);
  // A sequence gave up these blocks. `ended`: it does not come back.
  void released(const std::int32_t* ids, const std::uint64_t* unique_ids, std::size_t n, bool ended);
  // These are free from now on. Returns the blocks that continued them: still cached, and no more to be found.
  std::vector<std::int32_t> evicted(const std::int32_t* ids, std::size_t n);

  // Up to `count` blocks for which `cached(id, unique_id)`, each once; they leave the index. The remains of ended sequences
  // first, then whatever was not used for longest, ends of prefixes before their beginnings. `victims` is overwritten.
  void choose_victims(std::size_t count, const std::function<bool(std::int32_t, std::uint64_t)>& cached,
                      std::vector<std::int32_t>& victims);

  std::size_t num_indexed() const { return index_.num_blocks(Tier::kGpu); }
  std::size_t num_queued() const { return garbage_.size() + waiting_.size(); }
  Metrics metrics() const { return index_.metrics(); }
  // Throws std::logic_error if index and unique ids do not agree. O(everything).
  void check() const;

 private:
  // A second copy of what the index has under other ids, the last block of a sequence that did not fill it, or what a
  // preempted sequence has generated so far. Nothing will ever match it. An ended sequence leaves garbage; a preempted one
  // wants the block back, so it ages as others do.
  struct Orphan {
    std::int32_t id;
    std::uint64_t unique_id;
    std::uint64_t stamp;  // the index's clock when it was released
  };
  bool is_indexed(std::int32_t id, std::uint64_t unique_id) const { return unique_of(id) == unique_id; }
  std::uint64_t& unique_of(std::int32_t id) { return unique_ids_[static_cast<std::size_t>(id)]; }
  std::uint64_t unique_of(std::int32_t id) const { return unique_ids_[static_cast<std::size_t>(id)]; }
  bool is_queued(const Orphan& orphan) const { return queued_[static_cast<std::size_t>(orphan.id)] == orphan.unique_id; }
  void enqueue(std::deque<Orphan>& queue, std::int32_t id, std::uint64_t unique_id);
  void check_ids(const std::int32_t* ids, std::size_t n) const;
  std::vector<std::int32_t> forget(const std::int32_t* ids, std::size_t n);

  PrefixIndex index_;
  std::vector<std::uint64_t> unique_ids_;  // by block id, of those in the index; else 0
  std::deque<Orphan> garbage_, waiting_;   // of ended sequences, of others; oldest first
  std::vector<std::uint64_t> queued_;      // by block id: as what it waits in a queue, else 0; other entries are void
  std::size_t queue_limit_;                // entries of both queues after which void ones are cleared away
  Match match_;
};

}  // namespace sage
