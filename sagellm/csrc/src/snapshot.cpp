// The index as bytes, and back. Little-endian; a header, the namespaces, their nodes from the top down, a checksum.
// Nodes stand in an order that depends on their content alone, so equal indexes give equal bytes.

#include <algorithm>
#include <cstring>
#include <mutex>

#include "sagellm/hash.h"
#include "sagellm/prefix_index.h"

namespace sage {

namespace {

constexpr char kMagic[8] = {'S', 'A', 'G', 'E', 'P', 'F', 'X', '1'};

std::uint64_t checksum(const char* data, std::size_t size) {
  std::uint64_t hash = kHash0 ^ size;
  for (std::size_t i = 0; i < size; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + i, std::min<std::size_t>(8, size - i));
    hash = fold(hash ^ kHash1, word ^ kHash2);
  }
  return hash;
}

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorKind::kArgument, "this is no snapshot of a prefix index, or a damaged one: " + why +
                                        ". Take a new one with snapshot().");
}

class Writer {
 public:
  template <typename T>
  void number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  template <typename T>
  void array(const T* data, std::size_t count) {
    bytes_.append(reinterpret_cast<const char*>(data), count * sizeof(T));
  }
  void text(const std::string& value) {
    number(static_cast<std::uint32_t>(value.size()));
    bytes_ += value;
  }
  std::string finish() {
    number(checksum(bytes_.data(), bytes_.size()));
    return std::move(bytes_);
  }

 private:
  std::string bytes_;
};

class Reader {
 public:
  Reader(const char* data, std::size_t size) : data_(data), left_(size) {}
  const char* take(std::size_t size) {
    if (size > left_) refuse("it ends too early");
    const char* start = data_;
    data_ += size;
    left_ -= size;
    return start;
  }
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  template <typename T>
  std::vector<T> array(std::size_t count) {
    if (count > left_ / sizeof(T)) refuse("it ends too early");
    std::vector<T> values(count);
    if (count != 0) std::memcpy(values.data(), take(count * sizeof(T)), count * sizeof(T));
    return values;
  }
  std::string text() {
    const auto size = number<std::uint32_t>();
    return std::string(take(size), size);
  }
  bool is_done() const { return left_ == 0; }

 private:
  const char* data_;
  std::size_t left_;
};

}  // namespace

std::string PrefixIndex::snapshot() const {
  std::lock_guard structure(tree_);
  Writer out;
  out.array(kMagic, sizeof kMagic);
  out.number(static_cast<std::uint32_t>(block_size_));
  out.number(clock_);
  out.number(last_sequence_);

  std::vector<std::pair<std::string, NodeIndex>> roots;
  for (const auto& [name, root] : roots_) {
    if (node(root).first_child != kNone) roots.emplace_back(name, root);
  }
  std::sort(roots.begin(), roots.end());
  out.number(static_cast<std::uint32_t>(roots.size()));
  for (const auto& [name, root] : roots) {
    out.text(name);
    std::vector<NodeIndex> order;
    std::vector<std::pair<NodeIndex, std::uint32_t>> stack{{root, 0}};  // node, place of its parent
    std::vector<std::uint32_t> parents;
    while (!stack.empty()) {
      const auto [index, parent] = stack.back();
      stack.pop_back();
      std::uint32_t place = 0;  // 0 is the root
      if (index != root) {
        order.push_back(index);
        parents.push_back(parent);
        place = static_cast<std::uint32_t>(order.size());
      }
      std::vector<NodeIndex> children;
      for (NodeIndex i = node(index).first_child; i != kNone; i = node(i).next_sibling) children.push_back(i);
      std::sort(children.begin(), children.end(), [&](NodeIndex a, NodeIndex b) {
        return std::lexicographical_compare(tokens_of(node(b)), tokens_of(node(b)) + block_size_, tokens_of(node(a)),
                                            tokens_of(node(a)) + block_size_);
      });
      for (const NodeIndex child : children) stack.emplace_back(child, place);
    }
    out.number(static_cast<std::uint32_t>(order.size()));
    for (std::size_t i = 0; i < order.size(); ++i) {
      const Node& n = node(order[i]);
      out.number(parents[i]);
      out.number(n.num_blocks);
      out.number(static_cast<std::uint32_t>(n.tier));
      out.number(n.last_access);
      out.text(n.has_metadata ? metadata_.at(order[i]) : std::string());
      out.array(tokens_of(n), n.num_blocks * block_size_);
      out.array(ids_of(n), n.num_blocks);
    }
  }
  return out.finish();
}

std::unique_ptr<PrefixIndex> PrefixIndex::restore(std::string_view snapshot, std::size_t event_capacity) {
  constexpr std::size_t kTail = sizeof(std::uint64_t);
  if (snapshot.size() < sizeof kMagic + kTail || std::memcmp(snapshot.data(), kMagic, sizeof kMagic) != 0) {
    refuse("it does not begin as one");
  }
  const std::size_t size = snapshot.size() - kTail;
  std::uint64_t expected;
  std::memcpy(&expected, snapshot.data() + size, kTail);
  if (checksum(snapshot.data(), size) != expected) refuse("its checksum is wrong");
  Reader in(snapshot.data() + sizeof kMagic, size - sizeof kMagic);

  const auto block_size = in.number<std::uint32_t>();
  auto index = std::make_unique<PrefixIndex>(block_size, event_capacity);
  index->clock_ = in.number<std::uint64_t>();
  index->last_sequence_ = in.number<std::uint64_t>();
  const auto num_roots = in.number<std::uint32_t>();
  for (std::uint32_t r = 0; r < num_roots; ++r) {
    const std::string name = in.text();
    if (index->find_root(name) != kNone) refuse("a namespace occurs twice");
    std::vector<NodeIndex> places{index->make_root(name)};
    const auto num_nodes = in.number<std::uint32_t>();
    if (num_nodes == 0) refuse("a namespace is empty");
    for (std::uint32_t i = 0; i < num_nodes; ++i) {
      const auto parent = in.number<std::uint32_t>();
      const auto num_blocks = in.number<std::uint32_t>();
      const auto tier = in.number<std::uint32_t>();
      const auto last_access = in.number<std::uint64_t>();
      const std::string metadata = in.text();
      if (parent >= places.size()) refuse("a node comes before its parent");
      if (num_blocks == 0 || tier >= kNumTiers) refuse("a node is nonsense");
      const auto tokens = in.array<Token>(std::size_t{num_blocks} * block_size);
      const auto ids = in.array<BlockId>(num_blocks);
      const NodeIndex above = places[parent];
      const bool too_recent = index->node(above).is_root ? last_access > index->clock_
                                                         : last_access > index->node(above).last_access;
      if (too_recent) refuse("a block is more recent than the one above it");
      if (std::any_of(tokens.begin(), tokens.end(), [](Token token) { return token < 0; })) refuse("a token is negative");
      if (index->find_child(above, tokens.data(), nullptr) != kNone) refuse("two blocks hold the same prefix");
      try {
        index->check_new_ids({}, ids.data(), num_blocks, static_cast<Tier>(tier));
      } catch (const Error& error) {
        refuse(error.what());
      }
      const NodeIndex made =
          index->add_child(above, tokens.data(), ids.data(), num_blocks, static_cast<Tier>(tier), last_access);
      if (!metadata.empty()) {
        index->metadata_[made] = metadata;
        index->node(made).has_metadata = true;
      }
      places.push_back(made);
    }
  }
  if (!in.is_done()) refuse("something follows its end");
  index->list_by_stamp();
  return index;
}

void PrefixIndex::list_by_stamp() {
  std::vector<NodeIndex> all;
  for (std::size_t i = 0; i < num_node_slots_; ++i) {
    if (!node(static_cast<NodeIndex>(i)).is_root) all.push_back(static_cast<NodeIndex>(i));
  }
  const auto is_older = [&](NodeIndex a, NodeIndex b) {
    const Node &left = node(a), &right = node(b);
    return left.last_access != right.last_access ? left.last_access < right.last_access : left.depth > right.depth;
  };
  std::sort(all.begin(), all.end(), is_older);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i > 0 && !is_older(all[i - 1], all[i])) refuse("two paths have the same stamp");
    lru_push_front(all[i]);
  }
}

}  // namespace sage
