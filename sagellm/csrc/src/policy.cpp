#include "sagellm/policy.h"

#include <unordered_map>

#include "policies/registry.h"

namespace sage {

namespace {

template <typename Chosen>
class PinnedPolicy final : public Policy {
 public:
  PinnedPolicy(Books& books, Settings& settings) : host_(books), policy_(host_, settings) {}

  void insert(Slot slot, std::uint64_t key, const BlockFacts& facts, bool evictable) override {
    host_.ensure(slot);
    host_[slot].key = key;
    host_[slot].is_evictable = evictable;
    policy_.insert(slot, facts);
  }
  void hit(Slot slot) override { policy_.hit(slot); }
  bool remove(Slot slot, bool evicted) override {
    const bool is_forgotten = policy_.remove(slot, evicted);
    if (is_forgotten) host_[slot].where = kNowhere;
    return is_forgotten;
  }
  void notice(Slot slot) override {
    if (host_.knows(slot)) policy_.notice(slot);
  }
  Slot choose(Slot incoming) override { return policy_.choose(host_.knows(incoming) ? incoming : kNoSlot); }
  std::string reason(Slot slot) const override { return policy_.reason(slot); }
  void set_evictable(Slot slot, bool evictable) override { policy_.set_evictable(slot, evictable); }
  bool is_resident(Slot slot) const override { return host_.knows(slot) && host_[slot].where < kGhost; }

 private:
  PinnedHost host_;
  Chosen policy_;
};

class Foreseen final : public NextUse {
 public:
  explicit Foreseen(std::vector<std::uint64_t> keys) : keys_(std::move(keys)), next_(keys_.size(), kNever) {
    std::unordered_map<std::uint64_t, std::uint64_t> later;
    later.reserve(keys_.size());
    for (std::size_t i = keys_.size(); i-- > 0;) {
      const auto [place, is_new] = later.emplace(keys_[i], i);
      if (is_new) continue;
      next_[i] = place->second;
      place->second = i;
    }
  }

  std::uint64_t at(Slot, std::uint64_t key) override {
    require(key);
    return next_[event_++];
  }

  void require(std::uint64_t key) const override {
    if (event_ < keys_.size() && keys_[event_] == key) return;
    throw PolicyError("event " + std::to_string(event_) + " is of key " + std::to_string(key) + ", foreseen was " +
                      (event_ < keys_.size() ? "key " + std::to_string(keys_[event_]) : "the end") +
                      "; give belady the keys of all events in the order in which they are told.");
  }

 private:
  std::vector<std::uint64_t> keys_, next_;
  std::size_t event_ = 0;
};

}  // namespace

const std::vector<std::string>& policy_names() {
  static const std::vector<std::string> names = {
      "fifo", "lru",      "lfu",  "arc",        "s3fifo",       "sieve",        "twoq",
      "slru", "wtinylfu", "gdsf", "prefix_lru", "prefix_depth", "prefix_reuse", "belady",
  };
  return names;
}

std::unique_ptr<Policy> make_policy(const std::string& name, std::int64_t capacity, const PolicyOptions& options,
                                    Books& books) {
  return with_policy<PinnedHost>(name, capacity, options, [&](auto* policy, Settings& settings) -> std::unique_ptr<Policy> {
    return std::make_unique<PinnedPolicy<std::remove_pointer_t<decltype(policy)>>>(books, settings);
  });
}

std::shared_ptr<NextUse> foreseen(std::vector<std::uint64_t> keys) { return std::make_shared<Foreseen>(std::move(keys)); }

}  // namespace sage
