// Eviction policies without Python: the same fourteen as sagellm/kv_policy, which has a plain twin of each.
//
// A block is a slot: a small number that its owner gives it, from its first insertion until it is forgotten. The owner
// knows which key a slot stands for; a policy may remember a slot that has left (a ghost), and says so.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace sage {

using Slot = std::uint32_t;
inline constexpr Slot kNoSlot = ~Slot{0};
inline constexpr std::uint64_t kNever = ~std::uint64_t{0};  // as a next use
inline constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 30;

// A policy was given an invalid argument. Python's sagellm.core.errors.PolicyError.
class PolicyError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Tells Belady's policy when the block of an event is used next. Called once an event, in their order.
class NextUse {
 public:
  virtual ~NextUse() = default;
  // The index of the next event of this key, or kNever. Throws PolicyError if this event was not foreseen.
  virtual std::uint64_t at(Slot slot, std::uint64_t key) = 0;
  // Throws as `at` would for an event of this key, and consumes none.
  virtual void require(std::uint64_t) const {}
};

struct PolicyOptions {
  std::map<std::string, double> numbers;
  std::shared_ptr<NextUse> future;  // of belady
};

// Facts of a block as it comes; those that a policy may use.
struct BlockFacts {
  std::uint64_t depth = 1;
  double size_bytes = 1.0;
  double cost_s = 0.0;
};

// The owner of the blocks of one tier.
class Books {
 public:
  virtual ~Books() = default;
  // Whether a block that the policy takes for evictable is so. Asked before a policy changes anything of the block.
  virtual bool confirm(Slot) { return true; }
  // The block before it, if that is on the tier, else kNoSlot.
  virtual Slot resident_parent(Slot) { return kNoSlot; }
  // A slot that the policy remembered as a ghost, and no longer does.
  virtual void forget(Slot) {}
};

// A policy over blocks that may be pinned. Pinned blocks cost a choice nothing: evictable blocks are kept apart.
class Policy {
 public:
  virtual ~Policy() = default;
  // The slot is on the tier from now on. It was not; it may have been a ghost.
  virtual void insert(Slot slot, std::uint64_t key, const BlockFacts& facts, bool evictable) = 0;
  virtual void hit(Slot slot) = 0;
  // It has left. False: remembered as a ghost.
  virtual bool remove(Slot slot, bool evicted) = 0;
  // A ghost is about to come back: adapts, and remembers until its insertion where it goes. Nothing for other slots.
  virtual void notice(Slot slot) = 0;
  // The block that should go, or kNoSlot if none may. `incoming`: what the room is for, noticed before; kNoSlot: not known,
  // or nothing that the policy remembers. The caller makes it unevictable before it asks for the next one.
  virtual Slot choose(Slot incoming) = 0;
  // Why, of the slot that was chosen last, before anything else is called.
  virtual std::string reason(Slot slot) const = 0;
  virtual void set_evictable(Slot slot, bool evictable) = 0;
  virtual bool is_resident(Slot slot) const = 0;
};

// Names of all policies, in order.
const std::vector<std::string>& policy_names();

// Throws PolicyError: unknown name, bad capacity, unknown option or one out of its range.
std::unique_ptr<Policy> make_policy(const std::string& name, std::int64_t capacity, const PolicyOptions& options, Books& books);

// Next uses from the keys of all events in their order; each event must have the key that stands there.
std::shared_ptr<NextUse> foreseen(std::vector<std::uint64_t> keys);

}  // namespace sage
