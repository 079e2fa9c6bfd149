#include "sagellm/stored_blocks.h"

#include <algorithm>

namespace sage {

StoredBlocks::Pool& StoredBlocks::pool_of(const SageManager& manager) {
  Pool& pool = pools_[{manager.engine, manager.group}];
  if (pool.generation != manager.generation) pool = Pool{manager.generation, {}};
  return pool;
}

std::int32_t StoredBlocks::stored(const SageManager& manager, const std::int32_t* ids, std::int32_t num_blocks) {
  std::lock_guard guard(mutex_);
  std::vector<Row>& rows = pool_of(manager).rows;
  std::int32_t num_known = 0;
  bool is_known = true;
  for (std::int32_t place = 0; place < num_blocks; ++place) {
    if (ids[place] < 0) return num_known;
    const auto id = static_cast<std::size_t>(ids[place]);
    if (id >= rows.size()) rows.resize(std::max(id + 1, rows.size() * 2));
    is_known = is_known && rows[id].serial != 0;
    num_known += is_known;
    if (rows[id].serial == 0) rows[id].serial = ++last_serial_;
    rows[id].parent = place == 0 ? -1 : ids[place - 1];
    rows[id].parent_serial = place == 0 ? 0 : rows[static_cast<std::size_t>(ids[place - 1])].serial;
    rows[id].depth = (place + 1) * manager.block_len;
  }
  return num_known;
}

void StoredBlocks::evicted(const SageManager& manager, const std::int32_t* ids, std::int32_t n) {
  std::lock_guard guard(mutex_);
  std::vector<Row>& rows = pool_of(manager).rows;
  for (std::int32_t i = 0; i < n; ++i) {
    const auto id = static_cast<std::size_t>(ids[i]);
    if (ids[i] >= 0 && id < rows.size()) rows[id] = Row{};
  }
}

void StoredBlocks::forget(const SageManager& manager) {
  std::lock_guard guard(mutex_);
  const auto found = pools_.find({manager.engine, manager.group});
  if (found != pools_.end() && found->second.generation == manager.generation) pools_.erase(found);
}

void StoredBlocks::describe(const SageManager& manager, const std::int32_t* ids, std::int32_t n,
                            std::vector<std::int32_t>& parents, std::vector<std::int32_t>& depths) {
  const auto size = static_cast<std::size_t>(n);
  parents.assign(size, -1);
  depths.assign(size, 0);
  std::lock_guard guard(mutex_);
  const std::vector<Row>& rows = pool_of(manager).rows;
  std::vector<bool> is_candidate(rows.size());
  for (std::size_t i = 0; i < size; ++i) {
    const auto id = static_cast<std::size_t>(ids[i]);
    if (ids[i] >= 0 && id < rows.size()) is_candidate[id] = true;
  }
  for (std::size_t i = 0; i < size; ++i) {
    const auto id = static_cast<std::size_t>(ids[i]);
    if (ids[i] < 0 || id >= rows.size() || rows[id].serial == 0) continue;
    depths[i] = rows[id].depth;
    const std::int32_t parent = rows[id].parent;
    if (parent < 0) continue;
    const auto above = static_cast<std::size_t>(parent);
    if (is_candidate[above] && rows[above].serial == rows[id].parent_serial) parents[i] = parent;
  }
}

}  // namespace sage
