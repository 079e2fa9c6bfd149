// The plain twin of the table under test: an exact prefix cache in a map, victims that no prefix needs first, then the least
// recently used. Each rank has its own state and decides for itself, which is right only because it decides alike.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <tuple>

#include "prefix_map.h"
#include "table_base.h"

namespace sage::host {

// Planted, to see that engines cope and the checks find what they cannot cope with.
enum class TableFault {
  kNone,
  kForgetReset,      // goes on with the blocks of the generation before
  kForgetEvicted,    // finds blocks that have gone
  kWrongUniqueIds,   // finds blocks under another unique id
  kForeignBlocks,    // finds blocks of another prefix
  kUncachedVictims,  // chooses blocks that are not cached, or that there are not
  kRepeatedVictims,
  kFewVictims,
  kManyVictims,   // says that it chose more than it was asked for
  kRandomVictims  // each rank others
};

class NaiveTable : public TableBase {
 public:
  explicit NaiveTable(TableFault fault = TableFault::kNone, unsigned more_parts = 0, unsigned more_flags = 0)
      : TableBase(kEvict | kPrefix | more_parts, SAGE_REPLACE_TRIE | more_flags), fault_(fault) {}

  int evict(const SageManager& manager, const BlockId* cached, int n, int count, BlockId* victims) override;
  void evicted(const SageManager& manager, const BlockId* ids, const UniqueId* unique_ids, int n) override;
  void reset(const SageManager& manager) override;
  int prefix_lookup(const SageManager& manager, const SageSequence& sequence, int max_blocks, BlockId* ids,
                    UniqueId* unique_ids) override;
  void prefix_store(const SageManager& manager, const Token* tokens, const BlockId* ids, const UniqueId* unique_ids,
                    int n_blocks) override;

 protected:
  struct Replica {
    PrefixMap known;
    std::minstd_rand random;
  };
  Replica& replica(const SageManager& manager);

 private:
  using Key = std::tuple<std::uint64_t, std::int32_t, std::int32_t, std::uint64_t>;
  Key key(const SageManager& manager) const;

  const TableFault fault_;
  std::mutex mutex_;
  std::map<Key, std::unique_ptr<Replica>> replicas_;
};

}  // namespace sage::host
