// `_core.PrefixIndex`. Methods with a leading underscore return plain columns; native.py gives them their types.

#include "sagellm/prefix_index.h"

#include <pybind11/stl.h>

#include <optional>

#include "prefix_hit.h"
#include "prefix_results.h"

namespace sage::python {

namespace {

// Runs `work` without the GIL if it is long enough.
template <typename Work>
auto maybe_released(std::size_t num_tokens, Work&& work) {
  std::optional<py::gil_scoped_release> released;
  if (num_tokens >= kReleaseTokens) released.emplace();
  return work();
}

// A name that the index gave out: a lock or an entry.
std::uint64_t parse_name(py::handle argument, const char* what, ErrorKind kind) {
  if (PyLong_Check(argument.ptr())) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(argument.ptr());
    if (!PyErr_Occurred()) return value;
    PyErr_Clear();
  }
  throw Error(kind, std::string(what) + " " + py::repr(argument).cast<std::string>() +
                        " is unknown; it must be a number that this index gave out.");
}

LockId parse_lock(py::handle argument) { return parse_name(argument, "lock", ErrorKind::kLock); }
EntryId parse_entry(py::handle argument) { return parse_name(argument, "entry", ErrorKind::kArgument); }

PyEntry make_entry(Entry&& entry, std::size_t block_size) {
  PyEntry out;
  out.token_length = entry.num_blocks * block_size;
  out.entry = std::move(entry);
  return out;
}

struct LookupArguments {
  PyObject* tokens = nullptr;
  PyObject* name_space = nullptr;
  bool touch = true, lock = false;
};

// lookup(tokens, namespace="", *, touch=True, lock=False); false with an error set.
bool parse_lookup(PyObject* const* args, Py_ssize_t count, PyObject* keywords, LookupArguments& out) {
  if (count > 2) {
    PyErr_Format(PyExc_TypeError, "lookup() takes tokens and a namespace by position, got %zd arguments", count);
    return false;
  }
  if (count > 0) out.tokens = args[0];
  if (count > 1) out.name_space = args[1];
  const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < num_keywords; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(keywords, i);
    PyObject* const value = args[count + i];
    const auto is = [&](const char* other) { return PyUnicode_CompareWithASCIIString(name, other) == 0; };
    if (is("touch") || is("lock")) {
      const int truth = PyObject_IsTrue(value);
      if (truth < 0) return false;
      (is("touch") ? out.touch : out.lock) = truth != 0;
    } else if (is("namespace") && count < 2) {
      out.name_space = value;
    } else if (is("tokens") && count < 1) {
      out.tokens = value;
    } else {
      PyErr_Format(PyExc_TypeError, "lookup() got an unexpected or repeated argument '%U'", name);
      return false;
    }
  }
  if (out.tokens == nullptr) PyErr_SetString(PyExc_TypeError, "lookup() needs tokens");
  return out.tokens != nullptr;
}

PyObject* lookup(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  LookupArguments given;
  if (!parse_lookup(args, count, keywords, given)) return nullptr;
  return guarded([&]() -> PyObject* {
    // Its room is kept from call to call; a second call of this thread cannot begin before this one has ended.
    thread_local Match match;
    PrefixIndex& index = native_of<PrefixIndex>(self);
    const Int32View view(given.tokens, "tokens");
    std::optional<NameView> name;
    if (given.name_space != nullptr) name.emplace(given.name_space);
    const std::string_view key = name ? name->get() : std::string_view();
    maybe_released(view.size(), [&] { index.lookup(key, view.data(), view.size(), match, given.touch, given.lock); });
    return make_hit(match, view.size(), index.block_size());
  });
}

PyMethodDef lookup_method = {"lookup", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(lookup)),
                             METH_FASTCALL | METH_KEYWORDS, nullptr};

PyEntry insert(PrefixIndex& index, py::handle tokens, py::handle ids, py::handle name_space, py::handle tier,
               py::handle metadata) {
  const Int32View view(tokens, "tokens"), blocks(ids, "block ids");
  const NameView name(name_space);
  const Tier place = parse_tier(tier);
  const std::string text = dump_metadata(metadata);
  return make_entry(maybe_released(view.size(),
                                   [&] {
                                     return index.insert(name.get(), view.data(), view.size(), blocks.data(), blocks.size(),
                                                         place, text);
                                   }),
                    index.block_size());
}

PyEntry extend(PrefixIndex& index, py::handle name, py::handle tokens, py::handle ids, py::handle tier) {
  const LockId lock = parse_lock(name);
  const Int32View view(tokens, "tokens"), blocks(ids, "block ids");
  const Tier place = parse_tier(tier);
  return make_entry(
      maybe_released(view.size(),
                     [&] { return index.extend(lock, view.data(), view.size(), blocks.data(), blocks.size(), place); }),
      index.block_size());
}

py::list lookup_tiers(PrefixIndex& index, py::handle tokens, py::handle name_space) {
  const Int32View view(tokens, "tokens");
  const NameView name(name_space);
  py::list out;
  for (Match& match : index.lookup_tiers(name.get(), view.data(), view.size())) {
    PyObject* const hit = make_hit(match, view.size(), index.block_size());
    if (hit == nullptr) throw py::error_already_set();
    out.append(py::reinterpret_steal<py::object>(hit));
  }
  return out;
}

// A whole number from 0 on.
std::size_t parse_size(py::handle argument, const char* what) {
  const py::object number = py::reinterpret_steal<py::object>(PyNumber_Index(argument.ptr()));
  if (number) {
    const Py_ssize_t value = PyNumber_AsSsize_t(number.ptr(), PyExc_OverflowError);
    if (value >= 0) return static_cast<std::size_t>(value);
  }
  PyErr_Clear();
  throw Error(ErrorKind::kArgument,
              std::string(what) + " " + py::repr(argument).cast<std::string>() + "; it must be a whole number, 0 or more.");
}

RemovalReason parse_reason(py::handle argument) {
  static constexpr const char* kNames[kNumReasons] = {"evicted", "policy", "invalidated", "orphaned", "replaced"};
  for (std::size_t i = 0; i < kNumReasons && PyUnicode_Check(argument.ptr()); ++i) {
    if (PyUnicode_CompareWithASCIIString(argument.ptr(), kNames[i]) == 0) return static_cast<RemovalReason>(i);
  }
  throw Error(ErrorKind::kArgument, "reason " + py::repr(argument).cast<std::string>() +
                                        "; known are evicted, policy, invalidated, orphaned, replaced.");
}

PyRemoval invalidate(PrefixIndex& index, py::handle tokens, py::handle name_space, py::handle ids, py::handle tier,
                     py::handle entry) {
  const int given = !tokens.is_none() + !ids.is_none() + !entry.is_none();
  if (given > 1 || (!name_space.is_none() && given == 1 && tokens.is_none())) {
    throw Error(ErrorKind::kArgument,
                "invalidate takes tokens (with a namespace), kv_block_ids (with a tier), an entry_id, a namespace, or "
                "nothing; got more than one of them.");
  }
  if (!tokens.is_none()) {
    const Int32View view(tokens, "tokens");
    const NameView name(name_space.is_none() ? py::handle(py::str("")) : name_space);
    return {index.invalidate(name.get(), view.data(), view.size())};
  }
  if (!ids.is_none()) {
    const Int32View blocks(ids, "block ids");
    return {index.invalidate_blocks(blocks.data(), blocks.size(), parse_tier(tier))};
  }
  if (!entry.is_none()) return {index.invalidate_entry(parse_entry(entry))};
  if (!name_space.is_none()) return {index.invalidate_namespace(NameView(name_space).get())};
  return {index.invalidate_all()};
}

void move(PrefixIndex& index, py::handle ids, py::handle new_ids, py::handle src, py::handle dst) {
  const Int32View from(ids, "block ids"), to(new_ids, "new block ids");
  if (from.size() != to.size()) {
    throw Error(ErrorKind::kArgument, std::to_string(from.size()) + " blocks to move and " + std::to_string(to.size()) +
                                          " new ids; there must be one for each.");
  }
  index.move(from.data(), to.data(), from.size(), parse_tier(src), parse_tier(dst));
}

py::tuple blocks(const PrefixIndex& index, py::handle tier, bool unlocked) {
  std::optional<Tier> place;
  if (!tier.is_none()) place = parse_tier(tier);
  const BlockTable table = index.blocks(place, unlocked);
  return py::make_tuple(to_array(table.block_ids), to_array(table.tiers), to_array(table.parent_ids),
                        to_array(table.last_access), to_array(table.depth), to_array(table.num_locks));
}

py::array_t<bool> contains(const PrefixIndex& index, py::handle ids, py::handle tier) {
  const Int32View view(ids, "block ids");
  py::array_t<bool> out(static_cast<py::ssize_t>(view.size()));
  index.contains(view.data(), view.size(), parse_tier(tier), out.mutable_data());
  return out;
}

py::list entries(const PrefixIndex& index, py::handle name_space) {
  std::optional<std::string_view> wanted;
  std::optional<NameView> name;
  if (!name_space.is_none()) wanted = name.emplace(name_space).get();
  py::list out;
  for (Entry& entry : index.entries(wanted)) out.append(make_entry(std::move(entry), index.block_size()));
  return out;
}

std::size_t num_blocks(const PrefixIndex& index, py::handle tier) {
  if (!tier.is_none()) return index.num_blocks(parse_tier(tier));
  return index.num_blocks(Tier::kGpu) + index.num_blocks(Tier::kCpu) + index.num_blocks(Tier::kNvme);
}

py::tuple events(const PrefixIndex& index, py::handle after) {
  const Events found = index.events(parse_size(after, "number of an event"));
  py::list rows;
  for (const Event& e : found.events) {
    py::object parent = py::none();
    if (e.has_parent) parent = py::make_tuple(static_cast<int>(e.parent_tier), e.parent_id);
    rows.append(py::make_tuple(e.sequence, static_cast<int>(e.kind), e.name_space, static_cast<int>(e.tier),
                               to_array(e.block_ids), to_array(e.tokens), parent, to_array(e.block_hashes),
                               static_cast<int>(e.src_tier), to_array(e.src_block_ids), static_cast<int>(e.reason),
                               e.last_access));
  }
  return py::make_tuple(rows, found.num_lost, found.last_sequence);
}

py::dict metrics(const PrefixIndex& index) {
  const Metrics m = index.metrics();
  py::dict blocks, removed;
  const char* tiers[] = {"gpu", "cpu", "nvme"};
  const char* reasons[] = {"evicted", "policy", "invalidated", "orphaned", "replaced"};
  for (std::size_t i = 0; i < kNumTiers; ++i) blocks[tiers[i]] = m.blocks[i];
  for (std::size_t i = 0; i < kNumReasons; ++i) removed[reasons[i]] = m.removed_blocks[i];
  py::list latency;
  for (const auto& [bound, count] : m.latency_ns) latency.append(py::make_tuple(bound, count));
  using namespace py::literals;
  return py::dict("lookups"_a = m.lookups, "hits"_a = m.hits, "query_tokens"_a = m.query_tokens,
                  "matched_tokens"_a = m.matched_tokens, "inserts"_a = m.inserts, "inserted_tokens"_a = m.inserted_tokens,
                  "new_blocks"_a = m.new_blocks, "removed_blocks"_a = removed, "collisions"_a = m.collisions,
                  "blocks"_a = blocks, "nodes"_a = m.nodes, "locks"_a = m.locks, "memory_bytes"_a = m.memory_bytes,
                  "latency_ns"_a = latency);
}

}  // namespace

void bind_prefix_index(py::module_& module) {
  using Index = PrefixIndex;
  py::class_<Index> type(module, "PrefixIndex");
  auto* const raw_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  type.attr("lookup") = py::reinterpret_steal<py::object>(PyDescr_NewMethod(raw_type, &lookup_method));
  type.def(py::init([](py::handle block_size, py::handle event_capacity, std::optional<std::string_view> snapshot) {
             const std::size_t kept = parse_size(event_capacity, "event capacity");
             if (snapshot) return Index::restore(*snapshot, kept);
             return std::make_unique<Index>(parse_size(block_size, "block size"), kept);
           }),
           py::arg("block_size") = 16, py::kw_only(), py::arg("event_capacity") = 0, py::arg("_snapshot") = py::none())
      .def_property_readonly("block_size", &Index::block_size)
      .def("insert", &insert, py::arg("tokens"), py::arg("kv_block_ids"), py::arg("namespace") = "", py::kw_only(),
           py::arg("tier") = "gpu", py::arg("metadata") = py::none())
      .def("extend", &extend, py::arg("lock"), py::arg("tokens"), py::arg("kv_block_ids"), py::kw_only(),
           py::arg("tier") = "gpu")
      .def("lookup_tiers", &lookup_tiers, py::arg("tokens"), py::arg("namespace") = "")
      .def(
          "unlock", [](Index& index, py::handle lock) { index.unlock(parse_lock(lock)); }, py::arg("lock"))
      .def("invalidate", &invalidate, py::arg("tokens") = py::none(), py::arg("namespace") = py::none(), py::kw_only(),
           py::arg("kv_block_ids") = py::none(), py::arg("tier") = "gpu", py::arg("entry_id") = py::none())
      .def(
          "evict_lru",
          [](Index& index, py::handle count, py::handle tier) {
            return PyRemoval{index.evict_lru(parse_size(count, "number of blocks"), parse_tier(tier))};
          },
          py::arg("num_blocks"), py::arg("tier") = "gpu")
      .def(
          "evict",
          [](Index& index, py::handle ids, py::handle tier, py::handle reason) {
            const Int32View view(ids, "block ids");
            return PyRemoval{index.evict(view.data(), view.size(), parse_tier(tier), parse_reason(reason))};
          },
          py::arg("kv_block_ids"), py::arg("tier") = "gpu", py::arg("reason") = "policy")
      .def(
          "select_lru",
          [](const Index& index, py::handle count, py::handle tier) {
            return to_array(index.select_lru(parse_size(count, "number of blocks"), parse_tier(tier)));
          },
          py::arg("num_blocks"), py::arg("tier") = "gpu")
      .def("move", &move, py::arg("kv_block_ids"), py::arg("new_ids"), py::arg("src_tier"), py::arg("dst_tier"))
      .def("_blocks", &blocks)
      .def("contains", &contains, py::arg("kv_block_ids"), py::arg("tier") = "gpu")
      .def(
          "entry", [](const Index& index, py::handle id) { return make_entry(index.entry(parse_entry(id)), index.block_size()); },
          py::arg("entry_id"))
      .def(
          "tokens", [](const Index& index, py::handle id) { return to_array(index.tokens(parse_entry(id))); }, py::arg("entry_id"))
      .def("_entries", &entries)
      .def("namespaces",
           [](const Index& index) {
             py::list out;
             for (const std::string& name : index.namespaces()) out.append(name);
             return out;
           })
      .def("num_blocks", &num_blocks, py::arg("tier") = py::none())
      .def("clear", &Index::clear)
      .def("_events", &events)
      .def("snapshot", [](const Index& index) { return py::bytes(index.snapshot()); })
      .def("memory_bytes", &Index::memory_bytes)
      .def("metrics", &metrics)
      .def("check", &Index::check);

  module.def(
      "prefix_hashes",
      [](py::handle tokens, py::handle block_size) {
        const Int32View view(tokens, "tokens");
        const std::size_t size = parse_size(block_size, "block size");
        if (size < 1 || size > kMaxBlockSize) throw Error(ErrorKind::kArgument, "block size " + std::to_string(size) + "; allowed are 1 to 256 tokens.");
        py::array_t<std::uint64_t> out(static_cast<py::ssize_t>(view.size() / size));
        prefix_hashes(view.data(), view.size(), size, out.mutable_data());
        return out;
      },
      py::arg("tokens"), py::arg("block_size"));
}

}  // namespace sage::python
