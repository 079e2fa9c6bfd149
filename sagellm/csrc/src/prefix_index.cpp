// Looking up and storing.

#include "sagellm/prefix_index.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <shared_mutex>

#include "latency.h"
#include "sagellm/hash.h"

namespace sage {

namespace {

constexpr std::size_t kComparePiece = 1024;  // bytes compared by one memcmp
constexpr std::size_t kCompareAhead = 2048;  // bytes between what is compared and what is asked for
constexpr unsigned kTimedLookups = 16;       // one lookup in so many: reading the clock twice costs as much as a short lookup

std::string text(std::size_t number) { return std::to_string(number); }

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

}  // namespace

void prefix_hashes(const Token* tokens, std::size_t num_tokens, std::size_t block_size, std::uint64_t* out) {
  std::uint64_t hash = kEmptyPrefixHash;
  for (std::size_t i = 0; i < num_tokens / block_size; ++i) {
    hash = chain_hash(hash, block_hash(tokens + i * block_size, block_size));
    out[i] = hash;
  }
}

PrefixIndex::PrefixIndex(std::size_t block_size, std::size_t event_capacity)
    : block_size_(block_size), event_capacity_(event_capacity) {
  if (block_size < 1 || block_size > kMaxBlockSize) {
    throw Error(ErrorKind::kArgument, "block size " + text(block_size) + "; allowed are 1 to " + text(kMaxBlockSize) +
                                          " tokens. Use the block size of the engine's KV pool.");
  }
}

PrefixIndex::~PrefixIndex() { free_nodes(); }

// ---- looking up

std::size_t PrefixIndex::equal_blocks(const Token* a, const Token* b, std::size_t num_blocks) const {
  const std::size_t block_bytes = block_size_ * sizeof(Token);
  const std::size_t piece = std::max<std::size_t>(1, kComparePiece / block_bytes);
  const auto* left = reinterpret_cast<const char*>(a);
  const auto* right = reinterpret_cast<const char*>(b);
  const std::size_t total = num_blocks * block_bytes;
  std::size_t asked = 0;
  for (std::size_t done = 0; done < total;) {
    // The processor's own prefetching stops at the end of every page.
    for (const std::size_t until = std::min(total, done + kComparePiece + kCompareAhead); asked < until; asked += 64) {
      __builtin_prefetch(left + asked);
      __builtin_prefetch(right + asked);
    }
    const std::size_t size = std::min(piece * block_bytes, total - done);
    if (std::memcmp(left + done, right + done, size) != 0) {
      while (std::memcmp(left + done, right + done, block_bytes) == 0) done += block_bytes;
      return done / block_bytes;
    }
    done += size;
  }
  return num_blocks;
}

namespace {

void append_rows(BlockPath& path, const BlockId* ids, std::size_t num_blocks, Tier tier) {
  const std::size_t before = path.blocks.size();
  path.blocks.insert(path.blocks.end(), ids, ids + num_blocks);
  if (tier == Tier::kGpu && path.tiers.empty()) return;
  path.tiers.resize(before, Tier::kGpu);
  path.tiers.resize(before + num_blocks, tier);
}

}  // namespace

void PrefixIndex::append_path(const Node& n, std::size_t num_blocks, BlockPath& path) const {
  append_rows(path, ids_of(n), num_blocks, n.tier);
}

PrefixIndex::Walk PrefixIndex::walk(NodeIndex from, const Token* tokens, std::size_t num_blocks, BlockPath* path,
                                    std::uint64_t* collisions) const {
  Walk at;
  at.node = from;
  at.in_node = node(from).num_blocks;
  while (at.matched < num_blocks) {
    const Token* rest = tokens + at.matched * block_size_;
    const NodeIndex child = find_child(at.node, rest, collisions);
    if (child == kNone) break;
    const Node& n = node(child);
    const std::size_t limit = std::min<std::size_t>(n.num_blocks, num_blocks - at.matched);
    __builtin_prefetch(ids_of(n));
    at.in_node = 1 + equal_blocks(tokens_of(n) + block_size_, rest + block_size_, limit - 1);
    if (path != nullptr) append_path(n, at.in_node, *path);
    at.node = child;
    at.matched += at.in_node;
    if (at.in_node < n.num_blocks) break;
  }
  return at;
}

void PrefixIndex::count_lookup(std::size_t num_tokens, std::size_t num_matched, std::uint64_t collisions) {
  ++counters_.lookups;
  counters_.hits += num_matched > 0;
  counters_.query_tokens += num_tokens;
  counters_.matched_tokens += num_matched * block_size_;
  counters_.collisions += collisions;
}

void PrefixIndex::lookup(std::string_view name_space, const Token* tokens, std::size_t num_tokens, Match& out, bool touch,
                         bool lock) {
  thread_local unsigned turn = 0;
  const bool timed = turn++ % kTimedLookups == 0;
  const std::uint64_t start = timed ? now_ns() : 0;
  const std::size_t num_blocks = num_tokens / block_size_;
  const bool changes = touch || lock;
  std::uint64_t collisions = 0;
  out.entry = out.lock = 0;
  out.path.blocks.clear();
  out.path.tiers.clear();
  // A match ends with a node, or is made one: only whole nodes carry stamps and locks. Callers hold `recency_`,
  // or `tree_` exclusively.
  const auto finish = [&](const Walk& at) {
    if (touch) touch_path(at.node);
    if (lock) out.lock = take_lock(at.node);
    if (at.in_node == node(at.node).num_blocks) out.entry = entry_id(at.node);
    count_lookup(num_tokens, at.matched, collisions);
    if (timed) ++latency_[latency_bucket(now_ns() - start)];
  };
  {
    std::shared_lock structure(tree_);
    const NodeIndex root = find_root(name_space);
    if (root != kNone) {
      const Walk at = walk(root, tokens, num_blocks, &out.path, &collisions);
      if (!changes || at.in_node == node(at.node).num_blocks) {
        std::lock_guard recency(recency_);
        return finish(at);
      }
    } else if (!lock) {
      std::lock_guard recency(recency_);
      if (touch) ++clock_;
      return count_lookup(num_tokens, 0, 0);
    }
  }
  std::lock_guard structure(tree_);
  out.path.blocks.clear();
  out.path.tiers.clear();
  collisions = 0;
  NodeIndex root = find_root(name_space);
  if (root == kNone) root = make_root(name_space);
  Walk at = walk(root, tokens, num_blocks, &out.path, &collisions);
  if (at.in_node < node(at.node).num_blocks) at.node = split(at.node, at.in_node);
  finish(at);
  drop_root_if_empty(root);
}

std::vector<Match> PrefixIndex::lookup_tiers(std::string_view name_space, const Token* tokens, std::size_t num_tokens) {
  std::shared_lock structure(tree_);
  std::vector<Match> found;
  const NodeIndex root = find_root(name_space);
  if (root == kNone) return found;
  Match whole;
  const Walk at = walk(root, tokens, num_tokens / block_size_, &whole.path, nullptr);
  if (at.matched == 0) return found;
  std::vector<NodeIndex> path;
  for (NodeIndex i = at.node; !node(i).is_root; i = node(i).parent) path.push_back(i);
  std::size_t length = 0, last = 0;
  auto next = path.rbegin();
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    NodeIndex end = kNone;
    for (; next != path.rend() && static_cast<std::size_t>(node(*next).tier) <= tier; ++next) {
      end = *next;
      length += end == at.node ? at.in_node : node(end).num_blocks;
    }
    if (length == last) continue;
    last = length;
    Match match;
    match.path.blocks.assign(whole.path.blocks.begin(), whole.path.blocks.begin() + static_cast<std::ptrdiff_t>(length));
    if (!whole.path.tiers.empty() && tier > 0) {
      match.path.tiers.assign(whole.path.tiers.begin(), whole.path.tiers.begin() + static_cast<std::ptrdiff_t>(length));
    }
    if (end != at.node || at.in_node == node(end).num_blocks) match.entry = entry_id(end);
    found.insert(found.begin(), std::move(match));
  }
  return found;
}

// ---- storing

namespace {

void check_sizes(std::size_t num_tokens, std::size_t num_ids, std::size_t block_size) {
  const std::size_t full = num_tokens / block_size, all = (num_tokens + block_size - 1) / block_size;
  if (num_ids >= full && num_ids <= all) return;
  throw Error(ErrorKind::kArgument, text(num_ids) + " block ids for " + text(num_tokens) + " tokens; with blocks of " +
                                        text(block_size) + " tokens it must be " + text(full) +
                                        (all > full ? " or " + text(all) : "") + ", one for each block.");
}

void check_tokens(const Token* tokens, std::size_t num_tokens) {
  Token all = 0;
  for (std::size_t i = 0; i < num_tokens; ++i) all |= tokens[i];
  if (all >= 0) return;
  const auto bad = std::find_if(tokens, tokens + num_tokens, [](Token token) { return token < 0; });
  throw Error(ErrorKind::kArgument, "token " + std::to_string(*bad) + " at position " +
                                        text(static_cast<std::size_t>(bad - tokens)) +
                                        "; tokens are 0 to 2147483647. Give special inputs ids of their own.");
}

}  // namespace

Entry PrefixIndex::insert(std::string_view name_space, const Token* tokens, std::size_t num_tokens, const BlockId* ids,
                          std::size_t num_ids, Tier tier, std::string_view metadata) {
  check_sizes(num_tokens, num_ids, block_size_);
  std::lock_guard structure(tree_);
  const NodeIndex root = make_root(name_space);
  try {
    Entry entry = store(root, tokens, num_tokens / block_size_, ids, tier, metadata, 0);
    ++counters_.inserts;
    counters_.inserted_tokens += entry.num_blocks * block_size_;
    drop_root_if_empty(root);
    return entry;
  } catch (...) {
    drop_root_if_empty(root);
    throw;
  }
}

Entry PrefixIndex::extend(LockId lock, const Token* tokens, std::size_t num_tokens, const BlockId* ids, std::size_t num_ids,
                          Tier tier) {
  check_sizes(num_tokens, num_ids, block_size_);
  std::lock_guard structure(tree_);
  const NodeIndex from = lock_slot(lock).node;
  Entry entry = store(from, tokens, num_tokens / block_size_, ids, tier, {}, lock);
  ++counters_.inserts;
  counters_.inserted_tokens += num_tokens / block_size_ * block_size_;
  return entry;
}

// Whether new blocks may be appended to a node in place of hanging a child below it: everything that a node has one of
// must stay true of all its blocks.
bool PrefixIndex::can_append(NodeIndex index, Tier tier, LockId lock) {
  const Node& n = node(index);
  if (n.is_root || n.first_child != kNone || n.tier != tier || n.has_metadata) return false;
  return n.num_locks == 0 || (n.num_locks == 1 && lock != 0 && lock_slot(lock).node == index);
}

Entry PrefixIndex::store(NodeIndex from, const Token* tokens, std::size_t num_blocks, const BlockId* ids, Tier tier,
                         std::string_view metadata, LockId lock) {
  Entry entry;
  entry.path.blocks.reserve(num_blocks);
  Walk at = walk(from, tokens, num_blocks, &entry.path, &counters_.collisions);
  const std::size_t num_new = num_blocks - at.matched;
  check_tokens(tokens + at.matched * block_size_, num_new * block_size_);
  check_new_ids(entry.path, ids, num_blocks, tier);

  if (at.in_node < node(at.node).num_blocks) at.node = split(at.node, at.in_node);
  if (std::any_of(entry.path.tiers.begin(), entry.path.tiers.end(), [&](Tier old) { return old > tier; })) {
    replace_slower(from, at.node, ids + at.matched, tier, entry.replaced);
    entry.path = {};
    fill_path(at.node, from, entry.path);
  }
  NodeIndex end = at.node;
  if (num_new > 0) {
    const Token* new_tokens = tokens + at.matched * block_size_;
    const BlockId* new_ids = ids + at.matched;
    if (can_append(end, tier, lock)) {
      append(end, new_tokens, new_ids, num_new);
    } else {
      end = add_child(end, new_tokens, new_ids, num_new, tier, clock_ + 1);
    }
    append_rows(entry.path, new_ids, num_new, tier);
    counters_.new_blocks += num_new;
  }
  if (!metadata.empty() && !node(end).is_root) {
    metadata_[end] = std::string(metadata);
    node(end).has_metadata = true;
  }
  if (lock != 0) {
    lock_path(end, from);
    lock_slot(lock).node = end;
  }
  touch_path(end);
  if (num_new > 0) emit_stored(end, node(end).num_blocks - num_new, num_new);

  entry.id = entry_id(end);
  entry.token_hash = prefix_hash(end);
  entry.num_blocks = node(end).depth;
  entry.num_new_blocks = num_new;
  if (node(end).has_metadata) entry.metadata = metadata_.at(end);
  return entry;
}

// Each id that would be stored, or is the caller's copy of a block that is cached already, must be free and named once.
void PrefixIndex::check_new_ids(const BlockPath& resident, const BlockId* ids, std::size_t num_blocks, Tier tier) {
  std::size_t same = 0;
  if (resident.tiers.empty() && tier == Tier::kGpu) {
    while (same < resident.blocks.size() && ids[same] == resident.blocks[same]) ++same;
  }
  pending_.clear();
  for (std::size_t i = same; i < num_blocks; ++i) {
    const BlockId id = ids[i];
    if (i < resident.blocks.size() && id == resident.blocks[i] &&
        (resident.tiers.empty() ? Tier::kGpu : resident.tiers[i]) == tier) {
      continue;
    }
    if (id < 0) throw Error(ErrorKind::kArgument, "block id " + std::to_string(id) + "; block ids are 0 to 2147483647.");
    if (is_used(tier, id)) {
      throw Error(ErrorKind::kBlockReuse, "block id " + std::to_string(id) +
                                              " is cached already and holds another prefix; evict or invalidate it before "
                                              "its KV block is used again.");
    }
    pending_.push_back(id);
  }
  // Ids mostly come in rising order, which needs no sorting to be seen free of repetition.
  if (std::adjacent_find(pending_.begin(), pending_.end(), std::greater_equal<>()) == pending_.end()) return;
  std::sort(pending_.begin(), pending_.end());
  const auto twice = std::adjacent_find(pending_.begin(), pending_.end());
  if (twice == pending_.end()) return;
  throw Error(ErrorKind::kBlockReuse,
              "block id " + std::to_string(*twice) + " is given twice; each block of a sequence has its own.");
}

// `ids_end` points behind the ids of the path that ends with `end`.
void PrefixIndex::replace_slower(NodeIndex above, NodeIndex end, const BlockId* ids_end, Tier tier, Removal& replaced) {
  for (NodeIndex i = end; i != above; i = node(i).parent) {
    const Node& n = node(i);
    ids_end -= n.num_blocks;
    if (n.tier <= tier) continue;
    replaced.blocks.insert(replaced.blocks.end(), ids_of(n), ids_of(n) + n.num_blocks);
    replaced.tiers.resize(replaced.blocks.size(), n.tier);
    counters_.removed_blocks[static_cast<std::size_t>(RemovalReason::kReplaced)] += n.num_blocks;
    emit_moved({{i, ids_end}}, tier);
    for (std::size_t k = 0; k < n.num_blocks; ++k) give_back_id(n.tier, ids_of(n)[k]);
    relocate(i, ids_end, tier);
  }
}

void PrefixIndex::relocate(NodeIndex index, const BlockId* ids, Tier tier) {
  Node& n = node(index);
  num_blocks_[static_cast<std::size_t>(n.tier)] -= n.num_blocks;
  if (n.tier != tier) {
    lru_unlink(index);
    n.tier = tier;
    if (n.num_locks == 0) lru_insert_sorted(index);
  }
  std::memcpy(ids_of(n), ids, n.num_blocks * sizeof(BlockId));
  take_ids(index, 0, n.num_blocks);
  num_blocks_[static_cast<std::size_t>(tier)] += n.num_blocks;
}

}  // namespace sage
