// Giving up what was not used for longest.

#include <algorithm>
#include <array>
#include <functional>
#include <mutex>

#include "prefetch.h"
#include "sagellm/prefix_index.h"

namespace sage {

// The victims are a chain through memory, and each touches half a dozen lines that nothing else has touched for long. This
// cursor runs before the evictions and asks for them in the order in which one leads to the next. Its own way along the chain
// is made short by a guess that each link carries: where the chain will be a few steps later. A victim takes nothing out of
// the list but itself, so the cursor stays good.
class PrefixIndex::Lookahead {
 public:
  // A node holds one block at least, so there are no more than `num_blocks` victims.
  Lookahead(const PrefixIndex& index, NodeIndex first, std::size_t num_blocks)
      : index_(index), next_(num_blocks == 0 ? kNone : first), num_left_(num_blocks) {
    ring_.fill(kNone);
    for (std::size_t i = 0; i < kDistance; ++i) advance();
  }
  void advance() {
    ring_[step_++ % kDistance] = next_;
    if (next_ != kNone) {
      const Links& links = index_.links(next_);
      prefetch(&index_.node(next_));
      prefetch(&index_.links(links.far));
      next_ = --num_left_ == 0 ? kNone : links.prev;
    }
    ask_for_neighbours(ring_[(step_ + kDistance / 2) % kDistance]);
    ask_for_memory(ring_[(step_ + kDistance / 4) % kDistance]);
  }

 private:
  static constexpr std::size_t kDistance = 16;  // steps from asking for a node's own line to its turn

  void ask_for_neighbours(NodeIndex index) const {
    if (index == kNone) return;
    const Node& n = index_.node(index);
    prefetch(n.data);  // a short node's ids are there too
    prefetch(&index_.table_[n.tag >> index_.table_shift_]);
    prefetch(&index_.node(n.parent));
    if (n.next_sibling != kNone) prefetch(&index_.node(n.next_sibling));
    if (n.prev_sibling != kNone) prefetch(&index_.node(n.prev_sibling));
  }

  void ask_for_memory(NodeIndex index) const {
    if (index == kNone) return;
    const Node& n = index_.node(index);
    index_.chunks_.expect_free(n.data, index_.chunk_bytes(n.capacity));
    const auto last_id = static_cast<std::size_t>(index_.ids_of(n)[n.num_blocks - 1]);
    const auto& pages = index_.used_[static_cast<std::size_t>(n.tier)];
    prefetch(&pages[last_id >> kPageBits][(last_id & (kPageSize - 1)) / 64]);
  }

  const PrefixIndex& index_;
  NodeIndex next_;
  std::size_t num_left_, step_ = 0;
  std::array<NodeIndex, kDistance> ring_;
};

Removal PrefixIndex::evict_lru(std::size_t num_blocks, Tier tier) {
  const auto place = static_cast<std::size_t>(tier);
  std::lock_guard structure(tree_);
  Removal out;
  const std::size_t expected = std::min(num_blocks, num_blocks_[place]);
  out.blocks.reserve(expected);
  out.tiers.reserve(expected);
  const std::size_t target = num_blocks_[place] - expected;
  Lookahead ahead(*this, least_recent_[place], expected);
  while (num_blocks_[place] > target) {
    const NodeIndex victim = least_recent_[place];
    if (victim == kNone) break;
    ahead.advance();
    // Only blocks of other tiers can be below: those of this tier are less recent and went before.
    remove_below(victim, tier, RemovalReason::kEvicted, RemovalReason::kOrphaned, out);
    truncate(victim, std::min<std::size_t>(node(victim).num_blocks, num_blocks_[place] - target), RemovalReason::kEvicted, out);
  }
  return out;
}

Removal PrefixIndex::evict_idle(std::size_t num_blocks, Tier tier, const std::function<bool(BlockId)>& idle,
                                std::uint64_t newest) {
  const auto place = static_cast<std::size_t>(tier);
  std::lock_guard structure(tree_);
  Removal out;
  newest = std::min(newest, clock_);  // what is touched below is newer than that, which ends the loop
  while (out.blocks.size() < num_blocks) {
    const NodeIndex victim = least_recent_[place];
    if (victim == kNone || node(victim).last_access > newest) break;
    const Node& n = node(victim);
    const std::size_t most = std::min<std::size_t>(n.num_blocks, num_blocks - out.blocks.size());
    std::size_t count = 0;
    while (count < most && idle(ids_of(n)[n.num_blocks - 1 - count])) ++count;
    // Before the node may be gone: its path goes to the front, or is gone from the end of the list anyway.
    if (count < most) touch_path(victim);
    if (count == 0) continue;
    remove_below(victim, tier, RemovalReason::kEvicted, RemovalReason::kOrphaned, out);
    truncate(victim, count, RemovalReason::kEvicted, out);
  }
  return out;
}

std::vector<BlockId> PrefixIndex::select_lru(std::size_t num_blocks, Tier tier) const {
  std::lock_guard structure(tree_);
  std::vector<BlockId> out;
  for (NodeIndex i = least_recent_[static_cast<std::size_t>(tier)]; i != kNone && out.size() < num_blocks; i = links(i).prev) {
    const Node& n = node(i);
    for (std::size_t k = n.num_blocks; k-- > 0 && out.size() < num_blocks;) out.push_back(ids_of(n)[k]);
  }
  return out;
}

}  // namespace sage
