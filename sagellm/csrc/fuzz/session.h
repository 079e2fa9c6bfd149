// One run of the fuzz target: an index, the model beside it, and the bytes that say what to do.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "listener.h"
#include "model.h"
#include "sagellm/prefix_index.h"

namespace sage::model {

inline constexpr std::size_t kMaxCalls = 300, kMaxTokens = 24, kMaxLocks = 8;
inline constexpr Tier kTiers[] = {Tier::kGpu, Tier::kCpu, Tier::kNvme};

inline bool planted(const char* fault) {
  static const char* const wanted = std::getenv("SAGELLM_FUZZ_FAULT");
  return wanted != nullptr && std::strcmp(wanted, fault) == 0;
}

// The kind of error that a call ended with, if any.
template <typename Call>
std::optional<ErrorKind> error_of(Call call) {
  try {
    call();
    return std::nullopt;
  } catch (const Error& error) {
    return error.kind();
  }
}

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : next_(data), end_(data + size) {}
  bool done() const { return next_ == end_; }
  std::uint8_t byte() { return done() ? std::uint8_t{0} : *next_++; }
  std::size_t below(std::size_t limit) { return byte() % limit; }
  bool one_in(std::size_t n) { return below(n) == n - 1; }
  Tier tier() { return kTiers[below(kNumTiers)]; }

 private:
  const std::uint8_t *next_, *end_;
};

class Session {
 public:
  Session(const std::uint8_t* data, std::size_t size)
      : in_(data, size),
        block_size_(1 + in_.below(4)),
        event_capacity_(in_.one_in(4) ? in_.below(4) : 1 << 16),
        index_(std::make_unique<PrefixIndex>(block_size_, event_capacity_)),
        model_(block_size_),
        listener_(block_size_, event_capacity_) {}

  void run() {
    for (std::size_t call = 1; call <= kMaxCalls && !in_.done(); ++call) {
      step();
      follow();
      if (call % 4 == 0) compare();
    }
    compare();
  }

 private:
  void step();
  void insert();
  void extend();
  void store(const Key& start, const Tokens& tokens, LockId lock);
  void expect_stored(const Entry& entry, const Key& end, std::size_t first, const std::vector<BlockId>& ids, Tier tier);
  void expect_removed(const Removal& removal, const std::set<Key>& doomed, std::optional<ErrorKind> error);
  void lookup();
  void lookup_tiers();
  void unlock();
  void evict_lru();
  void evict();
  void invalidate();
  void invalidate_blocks();
  void invalidate_many();
  void move();
  void read_entry();
  void restore_good();
  void restore_bad();
  void clear();
  void follow();
  void compare();
  void compare_row(const BlockTable& table, std::size_t row, std::map<std::uint64_t, std::uint64_t>& stamps);

  std::string name_space() { return in_.one_in(4) ? "b" : ""; }
  // A byte gives eight tokens, so that sequences often begin alike.
  Tokens tokens() {
    Tokens out(in_.below(kMaxTokens + 1));
    for (std::size_t i = 0; i < out.size(); i += 8) {
      const unsigned bits = in_.one_in(2) ? in_.byte() : 0u;
      for (std::size_t k = i; k < out.size() && k < i + 8; ++k) out[k] = static_cast<Token>(bits >> (k - i) & 1u);
    }
    return out;
  }
  // Returns the part of the tokens that the index is shown.
  Tokens shown(Tokens tokens, std::size_t offset = 0) const {
    for (std::size_t i = 0; planted("tokens") && i < tokens.size(); ++i) {
      if ((offset + i + 1) % block_size_ == 0) tokens[i] = 0;
    }
    return tokens;
  }
  std::vector<BlockId> new_ids(std::size_t num_ids, Tier tier) {
    const bool any = in_.one_in(6);
    std::vector<BlockId> ids;
    while (ids.size() < num_ids) {
      ids.push_back(any ? static_cast<BlockId>(in_.below(32)) - 1 : model_.free_id(tier, ids));
    }
    return ids;
  }
  Key full(const Key& key) const { return model_.prefix(key, model_.length(key)); }
  void remember(EntryId id, const Key& key) {
    if (id != 0) entries_.push_back({id, key, true, false});
  }
  void note_continuation(const Key& below) {
    for (Named& named : entries_) named.continued |= named.key == model_.prefix(below, model_.length(below) - 1);
  }
  // One of the cached blocks, or of those that were.
  std::vector<BlockId> ids_on(Tier tier) {
    std::vector<BlockId> ids;
    for (const Key& key : model_.least_recent(in_.below(6), tier)) ids.push_back(model_.blocks().at(key).place.second);
    if (in_.one_in(3)) ids.push_back(static_cast<BlockId>(in_.below(32)));
    if (in_.one_in(2)) std::reverse(ids.begin(), ids.end());
    return ids;
  }
  std::set<Key> keys_of(const std::vector<BlockId>& ids, Tier tier) const {
    std::set<Key> keys;
    for (const BlockId id : ids) {
      if (const Key* key = model_.holder({tier, id})) keys.insert(*key);
    }
    return keys;
  }

  Bytes in_;
  std::size_t block_size_, event_capacity_;
  std::unique_ptr<PrefixIndex> index_;
  Model model_;
  Listener listener_;
  struct Named {
    EntryId id;
    Key key;
    bool alive;
    bool continued;  // an index may forget the entry then
  };
  std::vector<Named> entries_;
};

}  // namespace sage::model
