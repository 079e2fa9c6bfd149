// A flat cache of equal objects: any one may go. For simulation, and as the yardstick of the policies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sagellm/policy.h"

namespace sage {

class ObjectCache {
 public:
  virtual ~ObjectCache() = default;
  // Whether the object was there; it is now. Amortised O(1), O(log n) for policies that order by a score.
  virtual bool access(std::uint64_t key) = 0;
  // `hits` [count]: 1 where the object was there.
  virtual void access_many(const std::uint64_t* keys, std::size_t count, std::uint8_t* hits) = 0;
  virtual bool contains(std::uint64_t key) const = 0;
  virtual std::vector<std::uint64_t> keys() const = 0;
  virtual std::size_t size() const = 0;
  virtual std::uint64_t num_evicted() const = 0;
};

// Throws PolicyError as make_policy does.
std::unique_ptr<ObjectCache> make_object_cache(const std::string& name, std::int64_t capacity, const PolicyOptions& options);

}  // namespace sage
