#include "sagellm/object_cache.h"

#include "policies/registry.h"

namespace sage {

namespace {

template <typename Chosen>
class FlatCache final : public ObjectCache {
 public:
  explicit FlatCache(Settings& settings) : capacity_(settings.capacity()), policy_(host_, settings) {}

  bool access(std::uint64_t key) override { return at(key); }

  void access_many(const std::uint64_t* keys, std::size_t count, std::uint8_t* hits) override {
    // A key's place in the map is asked for first, so that it is in the processor's cache when the key's turn comes. Where the
    // map is large, its node is asked for after that.
    constexpr std::size_t kAhead = 24, kNear = 10;
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) host_.prefetch(keys[i + kAhead]);
      if (host_.is_large() && i + kNear < count) host_.prefetch_node(keys[i + kNear]);
      hits[i] = at(keys[i]);
    }
  }

  bool contains(std::uint64_t key) const override {
    const Slot slot = host_.find(key);
    return slot != kNoSlot && host_[slot].where < kGhost;
  }

  std::vector<std::uint64_t> keys() const override {
    std::vector<std::uint64_t> found;
    found.reserve(size_);
    for (std::size_t slot = 0; slot < host_.size(); ++slot) {
      const Node& node = host_[static_cast<Slot>(slot)];
      if (node.where < kGhost) found.push_back(node.key);
    }
    return found;
  }

  std::size_t size() const override { return size_; }
  std::uint64_t num_evicted() const override { return num_evicted_; }

 private:
  bool at(std::uint64_t key) {
    Slot slot = host_.find(key);
    if (slot != kNoSlot && host_[slot].where < kGhost) {
      policy_.hit(slot);
      return true;
    }
    policy_.expect(key);
    if (size_ == capacity_) {
      if (slot != kNoSlot) policy_.notice(slot);
      const Slot victim = policy_.choose(slot);
      if (policy_.remove(victim, true)) host_.forget(victim);
      ++num_evicted_;
      --size_;
    }
    if (slot == kNoSlot) slot = host_.add(key);
    policy_.insert(slot, BlockFacts{});
    ++size_;
    return false;
  }

  const std::size_t capacity_;
  FlatHost host_;
  Chosen policy_;
  std::size_t size_ = 0;
  std::uint64_t num_evicted_ = 0;
};

}  // namespace

std::unique_ptr<ObjectCache> make_object_cache(const std::string& name, std::int64_t capacity, const PolicyOptions& options) {
  return with_policy<FlatHost>(name, capacity, options, [](auto* policy, Settings& settings) -> std::unique_ptr<ObjectCache> {
    return std::make_unique<FlatCache<std::remove_pointer_t<decltype(policy)>>>(settings);
  });
}

}  // namespace sage
