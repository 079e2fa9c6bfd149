// Which KV blocks hold the beginning of a token sequence: a radix tree over blocks of tokens, thread-safe, no Python.
//
// The semantics are those of sagellm/prefix_reuse/base.py, which says more; this header names what is different in C++.
// Every public method is atomic and may be called from any thread. Methods throw sage::Error and change nothing then.
// After std::bad_alloc an index is fit to be destroyed only.
//
// Shape. A node holds a run of blocks that were only ever seen together: tokens and block ids in one allocation. All blocks
// of a node have the same tier, the same stamp and the same locks, so a node is split wherever one of these must differ.
// Children are found in one hash table over (parent, first block); tokens are always compared, the hash only finds them.
//
// Locking. `tree_` is held shared by lookups and exclusively by changes of structure. `recency_`, a spin lock taken inside,
// guards what lookups write: stamps, LRU lists, lock counts, counters.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sagellm/chunk_pool.h"
#include "sagellm/locks.h"
#include "sagellm/region.h"

namespace sage {

using Token = std::int32_t;
using BlockId = std::int32_t;
using LockId = std::uint64_t;   // 0 is no lock
using EntryId = std::uint64_t;  // 0 is the empty prefix

enum class Tier : std::uint8_t { kGpu = 0, kCpu = 1, kNvme = 2 };
inline constexpr std::size_t kNumTiers = 3;
inline constexpr std::size_t kMaxBlockSize = 256;

enum class RemovalReason : std::uint8_t { kEvicted, kPolicy, kInvalidated, kOrphaned, kReplaced };
inline constexpr std::size_t kNumReasons = 5;

enum class EventKind : std::uint8_t { kStored, kRemoved, kMoved, kCleared };

enum class ErrorKind : std::uint8_t { kArgument, kLock, kBlockReuse };

class Error : public std::invalid_argument {
 public:
  Error(ErrorKind kind, const std::string& message) : std::invalid_argument(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

// Blocks from the top down. `tiers` is empty when all of them lie on the GPU tier, else as long as `blocks`.
struct BlockPath {
  std::vector<BlockId> blocks;
  std::vector<Tier> tiers;
};

struct Match {
  BlockPath path;
  EntryId entry = 0;
  LockId lock = 0;
};

// Blocks that left, in the order they left.
struct Removal {
  std::vector<BlockId> blocks;
  std::vector<Tier> tiers;
};

struct Entry {
  EntryId id = 0;
  std::uint64_t token_hash = 0;
  std::size_t num_blocks = 0;  // of the whole prefix
  std::size_t num_new_blocks = 0;
  BlockPath path;  // of the whole prefix (insert, entry), or of the blocks given (extend)
  std::string metadata;
  Removal replaced;
};

// Columns of equal length; see CachedBlocks in base.py.
struct BlockTable {
  std::vector<std::int64_t> block_ids;
  std::vector<std::int8_t> tiers;
  std::vector<std::int64_t> parent_ids;
  std::vector<std::int64_t> last_access;
  std::vector<std::int64_t> depth;
  std::vector<std::int64_t> num_locks;
};

struct Event {
  std::uint64_t sequence = 0;
  EventKind kind = EventKind::kStored;
  std::string name_space;
  Tier tier = Tier::kGpu;
  Tier src_tier = Tier::kGpu;
  RemovalReason reason = RemovalReason::kEvicted;
  bool has_parent = false;
  Tier parent_tier = Tier::kGpu;
  BlockId parent_id = -1;
  std::uint64_t last_access = 0;
  std::vector<BlockId> block_ids;
  std::vector<BlockId> src_block_ids;
  std::vector<Token> tokens;
  std::vector<std::uint64_t> block_hashes;
};

struct Events {
  std::vector<Event> events;
  std::uint64_t num_lost = 0;
  std::uint64_t last_sequence = 0;
};

struct Metrics {
  std::uint64_t lookups = 0, hits = 0, query_tokens = 0, matched_tokens = 0;
  std::uint64_t inserts = 0, inserted_tokens = 0, new_blocks = 0, collisions = 0;
  std::array<std::uint64_t, kNumReasons> removed_blocks{};
  std::array<std::uint64_t, kNumTiers> blocks{};
  std::uint64_t nodes = 0, locks = 0, memory_bytes = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> latency_ns;  // upper bound, count; of one lookup in 16
};

// 64-bit hash of each full block's whole prefix; equal in every process. `out` has room for num_tokens / block_size.
void prefix_hashes(const Token* tokens, std::size_t num_tokens, std::size_t block_size, std::uint64_t* out);

class PrefixIndex {
 public:
  // The last `event_capacity` events are kept; 0 keeps and makes none.
  explicit PrefixIndex(std::size_t block_size, std::size_t event_capacity = 0);
  ~PrefixIndex();
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  static std::unique_ptr<PrefixIndex> restore(std::string_view snapshot, std::size_t event_capacity = 0);

  Entry insert(std::string_view name_space, const Token* tokens, std::size_t num_tokens, const BlockId* ids,
               std::size_t num_ids, Tier tier = Tier::kGpu, std::string_view metadata = {});
  Entry extend(LockId lock, const Token* tokens, std::size_t num_tokens, const BlockId* ids, std::size_t num_ids,
               Tier tier = Tier::kGpu);

  // `out` is overwritten; its vectors keep their room.
  void lookup(std::string_view name_space, const Token* tokens, std::size_t num_tokens, Match& out, bool touch = true,
              bool lock = false);
  std::vector<Match> lookup_tiers(std::string_view name_space, const Token* tokens, std::size_t num_tokens);
  void unlock(LockId lock);

  Removal invalidate(std::string_view name_space, const Token* tokens, std::size_t num_tokens);
  Removal invalidate_entry(EntryId entry);
  Removal invalidate_blocks(const BlockId* ids, std::size_t num_ids, Tier tier);
  Removal invalidate_namespace(std::string_view name_space);
  Removal invalidate_all();

  Removal evict_lru(std::size_t num_blocks, Tier tier = Tier::kGpu);
  // As `evict_lru`, of entries whose stamp is at most `newest` and whose block `idle` reports as idle: an owner may know better
  // than locks which blocks are in use. A block that is in use counts as used now, so it is looked at again once it has aged.
  Removal evict_idle(std::size_t num_blocks, Tier tier, const std::function<bool(BlockId)>& idle, std::uint64_t newest);
  Removal evict(const BlockId* ids, std::size_t num_ids, Tier tier, RemovalReason reason);
  std::vector<BlockId> select_lru(std::size_t num_blocks, Tier tier = Tier::kGpu) const;
  void move(const BlockId* ids, const BlockId* new_ids, std::size_t num_ids, Tier src, Tier dst);
  void clear();

  BlockTable blocks(std::optional<Tier> tier, bool unlocked_only) const;
  void contains(const BlockId* ids, std::size_t num_ids, Tier tier, bool* out) const;
  Entry entry(EntryId id) const;
  std::vector<Token> tokens(EntryId id) const;
  std::vector<Entry> entries(std::optional<std::string_view> name_space) const;
  std::vector<std::string> namespaces() const;

  std::size_t block_size() const noexcept { return block_size_; }
  std::size_t num_blocks(Tier tier) const;
  // As a lookup of the prefix that ends with this block would; nothing for one that is not cached.
  void touch(BlockId id, Tier tier = Tier::kGpu);
  // Time is counted in uses. `oldest_stamp`: of the next victim, or the largest number without one.
  std::uint64_t clock() const;
  std::uint64_t oldest_stamp(Tier tier) const;
  std::size_t memory_bytes() const;
  Metrics metrics() const;
  Events events(std::uint64_t after) const;
  std::string snapshot() const;

  // Throws std::logic_error if the structure is broken. O(everything).
  void check() const;

 private:
  using NodeIndex = std::uint32_t;
  static constexpr NodeIndex kNone = 0xffffffffu, kUnlinked = 0xfffffffeu;
  static constexpr std::size_t kSlabBits = 15, kSlabSize = std::size_t{1} << kSlabBits;
  static constexpr std::size_t kSmallestTable = 512;  // a page of memory
  static constexpr std::size_t kPageBits = 14, kPageSize = std::size_t{1} << kPageBits;

  struct Node {
    std::byte* data;  // 8 bytes of prefix hash (0: not known yet), block ids, tokens; null for a root and a free node
    std::uint64_t last_access;
    NodeIndex parent, first_child, next_sibling, prev_sibling;  // of a free node `parent` links the free list
    std::uint32_t num_blocks, capacity;
    std::uint32_t depth;  // blocks from the top to the end of this node
    std::uint32_t num_locks;
    std::uint32_t generation;  // odd while in use; an entry id is stale once it differs
    std::uint32_t tag;         // its key in the table; of a root its place in `names_`
    Tier tier;
    bool is_root, has_metadata;
  };
  static constexpr std::size_t kFar = 8;
  struct Links {
    NodeIndex prev, next;  // towards the more and the less recent
    NodeIndex far;         // any node; the one that came to the front `kFar` turns after this, a guess for prefetching
  };
  struct Slot {
    std::uint32_t tag;
    NodeIndex index_plus_1;  // one more than the index; 0 is a free slot
  };
  struct LockSlot {
    NodeIndex node;
    std::uint32_t generation;
  };
  struct Walk {
    NodeIndex node = kNone;    // the deepest node of which a block matched, or the root
    std::size_t in_node = 0;   // blocks matched in it
    std::size_t matched = 0;   // blocks in all
  };
  class Lookahead;
  struct Move {
    NodeIndex node;
    const BlockId* ids;  // one for each block of the node
  };
  template <typename T>
  using Pages = std::vector<std::unique_ptr<T[]>>;  // a page for each `kPageSize` block ids of which one was used

  // ---- nodes and their memory (nodes.cpp)
  Node& node(NodeIndex index) { return slabs_[index >> kSlabBits].as<Node>()[index & (kSlabSize - 1)]; }
  const Node& node(NodeIndex index) const { return slabs_[index >> kSlabBits].as<Node>()[index & (kSlabSize - 1)]; }
  Links& links(NodeIndex index) { return links_[index >> kSlabBits].as<Links>()[index & (kSlabSize - 1)]; }
  const Links& links(NodeIndex index) const { return links_[index >> kSlabBits].as<Links>()[index & (kSlabSize - 1)]; }
  BlockId* ids_of(const Node& n) const { return reinterpret_cast<BlockId*>(n.data + sizeof(std::uint64_t)); }
  Token* tokens_of(const Node& n) const { return ids_of(n) + n.capacity; }
  std::uint64_t& hash_of(const Node& n) const { return *reinterpret_cast<std::uint64_t*>(n.data); }
  std::size_t chunk_bytes(std::size_t capacity) const;
  NodeIndex new_node();
  void free_node(NodeIndex index);
  void free_nodes();
  void resize_chunk(Node& n, std::size_t capacity);
  NodeIndex add_child(NodeIndex parent, const Token* tokens, const BlockId* ids, std::size_t num_blocks, Tier tier,
                      std::uint64_t last_access);
  void append(NodeIndex index, const Token* tokens, const BlockId* ids, std::size_t num_blocks);
  NodeIndex split(NodeIndex index, std::size_t at);  // returns the upper part; `index` stays the lower one
  void link_child(NodeIndex parent, NodeIndex child);
  void unlink_child(NodeIndex child);
  std::uint64_t prefix_hash(NodeIndex index) const;
  EntryId entry_id(NodeIndex index) const;
  NodeIndex find_entry(EntryId id) const;
  NodeIndex root_of(NodeIndex index) const;
  const std::string& name_of(NodeIndex index) const;
  NodeIndex find_root(std::string_view name_space) const;
  NodeIndex make_root(std::string_view name_space);
  void drop_root_if_empty(NodeIndex root);

  // ---- table of children (tables.cpp)
  std::uint32_t make_tag(NodeIndex parent, const Token* block) const;
  NodeIndex find_child(NodeIndex parent, const Token* block, std::uint64_t* collisions) const;
  void make_room_in_table();
  void table_insert(std::uint32_t tag, NodeIndex index);
  void table_erase(std::uint32_t tag, NodeIndex index);
  void table_resize(std::size_t size);
  void place(std::uint32_t tag, NodeIndex index);

  // ---- block ids (tables.cpp)
  bool is_used(Tier tier, BlockId id) const;
  void mark_used(Tier tier, BlockId id, bool used);
  void take_ids(NodeIndex index, std::size_t first, std::size_t last);
  void give_back_id(Tier tier, BlockId id);
  NodeIndex& owner_slot(Tier tier, BlockId id);
  void set_owners(NodeIndex index, std::size_t first, std::size_t last);
  void learn_owners();
  NodeIndex owner(Tier tier, BlockId id) const;

  // ---- recency and locks (recency.cpp); callers hold `tree_` exclusively or `recency_`
  void lru_unlink(NodeIndex index);
  void lru_push_front(NodeIndex index);
  void lru_link_above(NodeIndex index, NodeIndex below);
  void lru_insert_sorted(NodeIndex index);
  void touch_path(NodeIndex index);
  void lock_path(NodeIndex from, NodeIndex up_to);
  LockId take_lock(NodeIndex index);
  void release(LockId lock);
  LockSlot& lock_slot(LockId lock);

  // ---- the rest
  Walk walk(NodeIndex root, const Token* tokens, std::size_t num_blocks, BlockPath* path, std::uint64_t* collisions) const;
  void append_path(const Node& n, std::size_t num_blocks, BlockPath& path) const;
  std::size_t equal_blocks(const Token* a, const Token* b, std::size_t num_blocks) const;
  Entry store(NodeIndex from, const Token* tokens, std::size_t num_blocks, const BlockId* ids, Tier tier,
              std::string_view metadata, LockId lock);
  void check_new_ids(const BlockPath& resident, const BlockId* ids, std::size_t num_blocks, Tier tier);
  void replace_slower(NodeIndex above, NodeIndex end, const BlockId* ids_end, Tier tier, Removal& replaced);
  void relocate(NodeIndex index, const BlockId* ids, Tier tier);
  bool can_append(NodeIndex index, Tier tier, LockId lock);
  void truncate(NodeIndex index, std::size_t num_blocks, RemovalReason reason, Removal& out);
  void remove_below(NodeIndex index, Tier tier, RemovalReason reason, RemovalReason others, Removal& out);
  void remove_subtree(NodeIndex top, Tier tier, RemovalReason reason, RemovalReason others, Removal& out);
  void check_unlocked(NodeIndex index) const;
  void check_closed(NodeIndex index, Tier tier, const std::unordered_map<BlockId, std::size_t>& rows) const;
  void cut(NodeIndex index, BlockId id, Tier tier, RemovalReason reason, RemovalReason others, Removal& out);
  Removal forget(NodeIndex index);
  void forget_root(NodeIndex root, Removal& out);
  Entry describe(NodeIndex index) const;
  void fill_path(NodeIndex index, NodeIndex above, BlockPath& path) const;
  std::size_t count_memory() const;
  void list_by_stamp();
  std::vector<std::uint64_t> block_hashes(NodeIndex index, std::size_t first, std::size_t last) const;
  void count_lookup(std::size_t num_tokens, std::size_t num_matched, std::uint64_t collisions);
  std::unordered_map<BlockId, std::size_t> row_of(const BlockId* ids, std::size_t num_ids, Tier tier) const;
  void emit_stored(NodeIndex index, std::size_t first, std::size_t num_blocks);
  void emit_removed(NodeIndex index, std::size_t first, RemovalReason reason);
  void emit_moved(std::vector<Move> moves, Tier tier);  // of one tier
  void emit_cleared();
  bool keeps_events();
  void push_event(Event event);
  void check_node(NodeIndex index, std::array<std::size_t, kNumTiers>& counted) const;

  const std::size_t block_size_;
  const std::size_t event_capacity_;

  mutable SharedMutex tree_;
  mutable SpinLock recency_;

  std::vector<Region> slabs_;  // of nodes
  std::vector<Region> links_;
  std::size_t num_node_slots_ = 0, num_nodes_ = 0;
  NodeIndex free_nodes_ = kNone;
  ChunkPool chunks_;

  Region table_memory_;
  Slot* table_ = nullptr;
  std::size_t table_size_ = 0, table_used_ = 0;
  unsigned table_shift_ = 0;

  std::array<Pages<std::uint64_t>, kNumTiers> used_;  // one bit a block id
  std::array<Pages<NodeIndex>, kNumTiers> owners_;
  bool knows_owners_ = false;
  std::array<std::size_t, kNumTiers> num_blocks_{};
  std::array<NodeIndex, kNumTiers> most_recent_{kNone, kNone, kNone}, least_recent_{kNone, kNone, kNone};
  std::array<std::array<NodeIndex, kFar>, kNumTiers> newcomers_{};  // the last nodes that came to the front, in a ring
  std::array<std::size_t, kNumTiers> num_newcomers_{};
  std::uint64_t clock_ = 0;

  std::vector<LockSlot> lock_slots_;
  std::vector<std::uint32_t> free_locks_;

  std::unordered_map<std::string, NodeIndex> roots_;
  std::vector<std::string> names_;
  std::vector<std::uint32_t> free_names_;
  std::unordered_map<NodeIndex, std::string> metadata_;
  std::vector<BlockId> pending_;  // room for check_new_ids

  std::deque<Event> events_;
  std::uint64_t last_sequence_ = 0;

  Metrics counters_;
  std::array<std::uint64_t, 256> latency_{};
};

}  // namespace sage
