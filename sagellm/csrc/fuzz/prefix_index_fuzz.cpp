// Bytes become calls of an index and of the model beside it; every answer must be the model's.
//
// The alphabet has two tokens and the ids are few, so that paths share, split and collide all the time. With
// SAGELLM_FUZZ_FAULT in the environment the index is made to look broken, to see that this target would notice:
// `tokens` (the last token of a block is not compared), `recency` (a lookup is not noted), `locks` (a lock holds
// nothing), `overrun` (a lookup reads behind its tokens).

#include "session.h"

namespace sage::model {
namespace {

void require_path(const BlockPath& path, const std::vector<Key>& keys, const Model& model) {
  require(path.blocks.size() == keys.size(), "another number of blocks was found than is cached");
  require(path.tiers.empty() || path.tiers.size() == keys.size(), "tiers and blocks differ in number");
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Place found{path.tiers.empty() ? Tier::kGpu : path.tiers[i], path.blocks[i]};
    require(found == model.blocks().at(keys[i]).place, "a block was named that holds another prefix");
  }
}

}  // namespace

void Session::step() {
  struct Call {
    const char* name;
    void (Session::*run)();
    std::size_t weight;
  };
  static constexpr Call calls[] = {
      {"insert", &Session::insert, 5},
      {"extend", &Session::extend, 3},
      {"lookup", &Session::lookup, 4},
      {"lookup_tiers", &Session::lookup_tiers, 1},
      {"unlock", &Session::unlock, 2},
      {"evict_lru", &Session::evict_lru, 2},
      {"evict", &Session::evict, 2},
      {"invalidate", &Session::invalidate, 3},
      {"invalidate_blocks", &Session::invalidate_blocks, 1},
      {"invalidate_many", &Session::invalidate_many, 1},
      {"move", &Session::move, 3},
      {"read_entry", &Session::read_entry, 1},
      {"restore_good", &Session::restore_good, 1},
      {"restore_bad", &Session::restore_bad, 1},
      {"clear", &Session::clear, 1},
  };
  static constexpr std::size_t kTotal = [] {
    std::size_t total = 0;
    for (const Call& call : calls) total += call.weight;
    return total;
  }();
  static const bool told = std::getenv("SAGELLM_FUZZ_TRACE") != nullptr;
  std::size_t at = in_.below(kTotal);
  const Call* call = calls;
  for (; at >= call->weight; ++call) at -= call->weight;
  if (told) std::fprintf(stderr, "%s\n", call->name);
  (this->*call->run)();
}

void Session::insert() { store({name_space(), {}}, tokens(), 0); }

void Session::extend() {
  if (model_.locks().empty()) return;
  const auto held = std::next(model_.locks().begin(), static_cast<std::ptrdiff_t>(in_.below(model_.locks().size())));
  const LockId lock = held->first;
  const Key start = held->second;
  store(start, tokens(), lock);
}

void Session::store(const Key& start, const Tokens& tokens, LockId lock) {
  Key whole = start;
  whole.second.insert(whole.second.end(), tokens.begin(), tokens.end());
  const Key end = full(whole);
  const std::size_t first = model_.length(start), num_blocks = model_.length(end) - first;
  const Tier tier = in_.tier();
  const bool partial_id = tokens.size() % block_size_ != 0 && in_.one_in(2);
  const std::vector<BlockId> ids = new_ids(num_blocks + partial_id, tier);
  const std::string metadata = lock == 0 && in_.one_in(4) ? "{\"n\":" + std::to_string(in_.below(10)) + "}" : "";
  const std::vector<Key> known = model_.match(end);

  bool must_fail = false, may_fail = false;
  std::set<BlockId> seen;
  for (std::size_t i = 0; i < num_blocks; ++i) {
    const Key* holder = model_.holder({tier, ids[i]});
    const bool is_known = first + i < known.size();
    const bool stays = is_known && model_.blocks().at(known[first + i]).place.first <= tier;
    const bool bad = ids[i] < 0 || !seen.insert(ids[i]).second ||
                     (holder != nullptr && *holder != model_.prefix(end, first + i + 1));
    may_fail |= bad;
    must_fail |= bad && !stays;
  }
  const Tokens given = shown(tokens, start.second.size());
  Entry entry;
  const auto error = error_of([&] {
    entry = lock == 0 ? index_->insert(end.first, given.data(), given.size(), ids.data(), ids.size(), tier, metadata)
                      : index_->extend(lock, given.data(), given.size(), ids.data(), ids.size(), tier);
  });
  require(error ? may_fail && *error != ErrorKind::kLock : !must_fail,
          "block ids were refused, or taken, that should not be");
  if (error) return;
  expect_stored(entry, end, first, ids, tier);
  if (lock != 0) model_.extend_lock(lock, end);
  if (!metadata.empty() && !end.second.empty()) model_.annotate(end, metadata);
  model_.touch(end);
  require(end.second.empty() || entry.metadata == model_.blocks().at(end).metadata, "an entry has lost its metadata");
  remember(entry.id, end);
}

void Session::expect_stored(const Entry& entry, const Key& end, std::size_t first, const std::vector<BlockId>& ids,
                            Tier tier) {
  std::set<Place> replaced;
  std::size_t num_new = 0;
  std::vector<Key> rows;
  for (std::size_t n = first + 1; n <= model_.length(end); ++n) {
    const Key key = model_.prefix(end, n);
    const auto old = model_.blocks().find(key);
    rows.push_back(key);
    if (old != model_.blocks().end() && old->second.place.first <= tier) continue;
    if (old == model_.blocks().end()) {
      ++num_new;
      note_continuation(key);
    } else {
      replaced.insert(old->second.place);
    }
    model_.place(key, {tier, ids[n - first - 1]});
  }
  std::set<Place> told;
  for (std::size_t i = 0; i < entry.replaced.blocks.size(); ++i)
    told.insert({entry.replaced.tiers.at(i), entry.replaced.blocks[i]});
  require(told == replaced && entry.replaced.blocks.size() == replaced.size(),
          "other blocks were replaced than those on slower tiers");
  require(entry.num_new_blocks == num_new && entry.num_blocks == model_.length(end),
          "an entry counts its blocks wrong");
  std::vector<std::uint64_t> hashes(model_.length(end) + 1);
  prefix_hashes(end.second.data(), end.second.size(), block_size_, hashes.data() + 1);
  require(end.second.empty() || planted("tokens") || entry.token_hash == hashes.back(),
          "an entry has another hash than its tokens");
  require_path(entry.path, rows, model_);
}

void Session::lookup() {
  const Key asked{name_space(), tokens()};
  const bool touch = !in_.one_in(4), lock = model_.locks().size() < kMaxLocks && in_.one_in(2);
  const Tokens given = shown(asked.second);
  const std::size_t num_tokens = given.size() + (planted("overrun") && !given.empty() ? block_size_ : 0);
  Match match;
  index_->lookup(asked.first, given.data(), num_tokens, match, touch && !planted("recency"), lock);
  const std::vector<Key> found = model_.match(full(asked));
  require_path(match.path, found, model_);
  require((match.lock != 0) == lock, "a lock was asked for and not given, or the reverse");
  require(!touch || planted("recency") || (match.entry != 0) == !found.empty(), "a lookup that touches names no entry");
  const Key end = model_.prefix(asked, found.size());
  if (touch) model_.touch(end);
  if (lock) model_.lock(match.lock, end);
  if (lock && planted("locks")) index_->unlock(match.lock);
  remember(match.entry, end);
}

void Session::lookup_tiers() {
  const Key asked{name_space(), tokens()};
  const Tokens given = shown(asked.second);
  const std::vector<Match> found = index_->lookup_tiers(asked.first, given.data(), given.size());
  const std::vector<Key> path = model_.match(full(asked));
  std::set<std::size_t> lengths;
  for (const Tier slowest : kTiers) {
    std::size_t n = 0;
    while (n < path.size() && model_.blocks().at(path[n]).place.first <= slowest) ++n;
    if (n > 0) lengths.insert(n);
  }
  require(found.size() == lengths.size(), "another number of candidates than tiers change");
  auto length = lengths.rbegin();
  for (const Match& match : found) {
    require_path(match.path, {path.begin(), path.begin() + static_cast<std::ptrdiff_t>(*length++)}, model_);
  }
}

void Session::unlock() {
  if (model_.locks().empty() || in_.one_in(8)) {
    const LockId lock = in_.byte();
    if (model_.locks().count(lock) == 0)
      require(error_of([&] { index_->unlock(lock); }) == ErrorKind::kLock, "an unknown lock was released");
    return;
  }
  const LockId lock =
      std::next(model_.locks().begin(), static_cast<std::ptrdiff_t>(in_.below(model_.locks().size())))->first;
  if (!planted("locks")) index_->unlock(lock);
  model_.unlock(lock);
}

void Session::move() {
  const Tier src = in_.tier(), dst = in_.tier();
  std::vector<BlockId> ids;
  std::vector<Key> keys;
  for (const auto& [key, cached] : model_.blocks()) {
    if (cached.place.first == src && in_.one_in(2)) ids.push_back(cached.place.second), keys.push_back(key);
  }
  const bool unknown = in_.one_in(8);
  if (unknown) ids.push_back(static_cast<BlockId>(in_.below(32)));
  const std::vector<BlockId> to = new_ids(ids.size(), dst);
  bool good = std::set<BlockId>(ids.begin(), ids.end()).size() == ids.size();
  good &= std::set<BlockId>(to.begin(), to.end()).size() == to.size();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const bool taken = model_.holder({dst, to[i]}) != nullptr;
    const bool vacated = src == dst && std::find(ids.begin(), ids.end(), to[i]) != ids.end();
    good &= to[i] >= 0 && (!taken || vacated) && model_.holder({src, ids[i]}) != nullptr;
  }
  const auto error = error_of([&] { index_->move(ids.data(), to.data(), ids.size(), src, dst); });
  require(error.has_value() != good, "a move was refused that is possible, or the reverse");
  if (error) return;
  if (unknown) keys.push_back(*model_.holder({src, ids.back()}));
  model_.move(keys, to, dst);
}

void Session::read_entry() {
  if (entries_.empty()) return;
  const auto& [id, key, alive, continued] = entries_[in_.below(entries_.size())];
  Entry entry;
  const EntryId asked = id;
  const auto error = error_of([&] { entry = index_->entry(asked); });
  require(error ? !alive || continued : alive, "an entry is there that was removed, or the reverse");
  if (error) return;
  require(planted("tokens") || index_->tokens(id) == key.second, "an entry has other tokens");
  require(entry.id == id && entry.metadata == model_.blocks().at(key).metadata, "an entry describes itself wrong");
  require_path(entry.path, model_.match(key), model_);
}

void Session::restore_good() {
  index_ = PrefixIndex::restore(index_->snapshot(), event_capacity_);
  model_.forget_locks();
  entries_.clear();
}

// Damaged bytes are refused, whatever they look like; the index they came from knows nothing of it.
void Session::restore_bad() {
  const std::string good = index_->snapshot();
  std::string bad = in_.one_in(4) ? std::string() : good;
  if (in_.one_in(3)) bad.resize(bad.size() * in_.byte() / 255);
  for (std::size_t n = 1 + in_.below(6); n > 0; --n) {
    const std::size_t at = bad.empty() ? 0 : (in_.byte() * 256u + in_.byte()) % bad.size();
    const auto value = static_cast<char>(in_.byte());
    if (in_.one_in(4) || bad.empty()) {
      bad.insert(at, 1, value);
    } else {
      bad[at] = value;
    }
  }
  const auto error = error_of([&] { PrefixIndex::restore(bad, event_capacity_); });
  require(bad == good || error.has_value(), "a damaged snapshot was taken for a good one");
}

void Session::clear() {
  if (!in_.one_in(4)) return;
  index_->clear();
  model_.clear();
}

}  // namespace sage::model

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  sage::model::Session(data, size).run();
  return 0;
}
