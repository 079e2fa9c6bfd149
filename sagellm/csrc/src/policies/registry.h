// Every policy by its name, for each host.
#pragma once

#include "arc.h"
#include "fifo.h"
#include "lfu.h"
#include "lru.h"
#include "s3fifo.h"
#include "scored.h"
#include "sieve.h"
#include "slru.h"
#include "twoq.h"
#include "wtinylfu.h"

namespace sage {

inline void check_capacity(std::int64_t capacity) {
  if (capacity >= 1 && capacity <= kMaxCapacity) return;
  throw PolicyError("capacity " + std::to_string(capacity) + ": a policy needs room for 1 to " +
                    std::to_string(kMaxCapacity) + " blocks.");
}

// Calls `make(P*, settings)`, with a null pointer, for the policy P of that name.
template <typename Host, typename Make>
auto with_policy(const std::string& name, std::int64_t capacity, const PolicyOptions& options, Make&& make) {
  check_capacity(capacity);
  Settings settings(name, capacity, options);
  const auto made = [&](auto policy) {
    auto product = make(policy, settings);
    settings.require_none_left();
    return product;
  };
  if (name == "fifo") return made(static_cast<Fifo<Host>*>(nullptr));
  if (name == "lru") return made(static_cast<Lru<Host>*>(nullptr));
  if (name == "lfu") return made(static_cast<Lfu<Host>*>(nullptr));
  if (name == "arc") return made(static_cast<Arc<Host>*>(nullptr));
  if (name == "s3fifo") return made(static_cast<S3Fifo<Host>*>(nullptr));
  if (name == "sieve") return made(static_cast<Sieve<Host>*>(nullptr));
  if (name == "twoq") return made(static_cast<TwoQ<Host>*>(nullptr));
  if (name == "slru") return made(static_cast<Slru<Host>*>(nullptr));
  if (name == "wtinylfu") return made(static_cast<WTinyLfu<Host>*>(nullptr));
  if (name == "gdsf") return made(static_cast<Gdsf<Host>*>(nullptr));
  if (name == "prefix_lru") return made(static_cast<PrefixLru<Host>*>(nullptr));
  if (name == "prefix_depth") return made(static_cast<PrefixDepth<Host>*>(nullptr));
  if (name == "prefix_reuse") return made(static_cast<PrefixReuse<Host>*>(nullptr));
  if (name == "belady") return made(static_cast<Belady<Host>*>(nullptr));
  std::string known;
  for (const std::string& one : policy_names()) known += (known.empty() ? "" : ", ") + one;
  throw PolicyError("policy '" + name + "' is unknown; known are " + known + ".");
}

}  // namespace sage
