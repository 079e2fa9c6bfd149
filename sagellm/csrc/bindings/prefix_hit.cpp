#include "prefix_hit.h"

#include <structmember.h>

#include <cstddef>
#include <cstring>
#include <utility>

namespace sage::python {

namespace {

// A longer path is taken over as it was found: copying it would keep other threads from the GIL for as long as a lookup.
constexpr std::size_t kMaxInline = 1024;
// Hits of more blocks are too large for Python's allocator of small objects and would be malloc's, which takes 5% of a
// lookup of some thousand tokens. A few of those that died are kept instead, by size in steps of `kStep` blocks.
constexpr std::size_t kMinKept = 64, kStep = 256;
constexpr std::size_t kMaxKept = 2;  // of each size; a loop over lookups holds one hit while it makes the next

// The block ids lie behind the object, and behind them one byte a block for its tier; or all of them in `path`.
struct Hit {
  PyObject_VAR_HEAD
  Py_ssize_t matched_length;
  Py_ssize_t remaining_tokens;
  double confidence;
  unsigned long long entry_id;
  unsigned long long lock;
  BlockPath* path;

  BlockId* ids() { return reinterpret_cast<BlockId*>(this + 1); }
  std::int8_t* tiers() { return reinterpret_cast<std::int8_t*>(ids() + Py_SIZE(reinterpret_cast<PyObject*>(this))); }
};

PyTypeObject* hit_type = nullptr;  // lives as long as the process

// Under the GIL, as everything here.
struct Kept {
  Hit* hits[kMaxKept];
  std::size_t size = 0;
};
Kept kept[kMaxInline / kStep];

bool is_kept(std::size_t num_inline) { return num_inline > kMinKept && num_inline <= kMaxInline; }

Kept& kept_of(std::size_t num_inline) { return kept[(num_inline - 1) / kStep]; }

Hit* initialise(void* memory, Py_ssize_t size) {
  return reinterpret_cast<Hit*>(PyObject_InitVar(static_cast<PyVarObject*>(memory), hit_type, size));
}

Hit* allocate(std::size_t num_inline) {
  const auto size = static_cast<Py_ssize_t>(num_inline);
  Hit* hit = nullptr;
  if (!is_kept(num_inline)) {
    hit = PyObject_NewVar(Hit, hit_type, size);
  } else if (Kept& own = kept_of(num_inline); own.size != 0) {
    hit = initialise(own.hits[--own.size], size);
  } else {
    const std::size_t room = (num_inline + kStep - 1) / kStep * kStep;
    void* const memory = PyObject_Malloc(sizeof(Hit) + room * (sizeof(BlockId) + 1));
    if (memory == nullptr) {
      PyErr_NoMemory();
      return nullptr;
    }
    hit = initialise(memory, size);
  }
  if (hit != nullptr) hit->path = nullptr;
  return hit;
}

py::object array_of(PyObject* self, bool of_tiers) {
  auto* hit = reinterpret_cast<Hit*>(self);
  if (hit->path != nullptr) {
    const BlockPath& path = *hit->path;
    if (of_tiers) return tier_array(path.tiers, path.blocks.size());
    return view_array(path.blocks.data(), path.blocks.size(), self);
  }
  const auto size = static_cast<std::size_t>(Py_SIZE(self));
  if (of_tiers) return view_array(hit->tiers(), size, self);
  return view_array(hit->ids(), size, self);
}

PyObject* get_array(PyObject* self, void* of_tiers) {
  return guarded([&] { return array_of(self, of_tiers != nullptr).release().ptr(); });
}

PyObject* describe(PyObject* self) {
  auto* hit = reinterpret_cast<Hit*>(self);
  char confidence[32];
  PyOS_snprintf(confidence, sizeof confidence, "%.9g", hit->confidence);
  return PyUnicode_FromFormat("PrefixHit(matched_length=%zd, remaining_tokens=%zd, confidence=%s, entry_id=%llu, lock=%llu)",
                              hit->matched_length, hit->remaining_tokens, confidence, hit->entry_id, hit->lock);
}

PyObject* construct(PyTypeObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"matched_length", "remaining_tokens", "confidence", "kv_block_ids",
                                "tiers",          "entry_id",         "lock",       nullptr};
  Py_ssize_t matched = 0, remaining = 0;
  double confidence = 1.0;
  PyObject *ids = nullptr, *tiers = nullptr;
  unsigned long long entry_id = 0, lock = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$nndOOKK", const_cast<char**>(names), &matched, &remaining, &confidence,
                                   &ids, &tiers, &entry_id, &lock)) {
    return nullptr;
  }
  if (ids == nullptr || tiers == nullptr) {
    PyErr_SetString(PyExc_TypeError, "PrefixHit needs kv_block_ids and tiers");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const Int32View id_view(ids, "block ids"), tier_view(tiers, "tiers");
    if (id_view.size() != tier_view.size()) {
      throw Error(ErrorKind::kArgument, std::to_string(id_view.size()) + " block ids and " + std::to_string(tier_view.size()) +
                                            " tiers; there must be one tier for each block.");
    }
    Hit* hit = allocate(id_view.size());
    if (hit == nullptr) return nullptr;
    hit->matched_length = matched;
    hit->remaining_tokens = remaining;
    hit->confidence = confidence;
    hit->entry_id = entry_id;
    hit->lock = lock;
    if (id_view.size() != 0) std::memcpy(hit->ids(), id_view.data(), id_view.size() * sizeof(BlockId));
    for (std::size_t i = 0; i < tier_view.size(); ++i) hit->tiers()[i] = static_cast<std::int8_t>(tier_view.data()[i]);
    return reinterpret_cast<PyObject*>(hit);
  });
}

void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  auto* const hit = reinterpret_cast<Hit*>(self);
  const auto num_inline = static_cast<std::size_t>(Py_SIZE(self));
  delete hit->path;
  if (is_kept(num_inline) && kept_of(num_inline).size < kMaxKept) {
    Kept& own = kept_of(num_inline);
    own.hits[own.size++] = hit;
  } else {
    type->tp_free(self);
  }
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"matched_length", T_PYSSIZET, offsetof(Hit, matched_length), READONLY, nullptr},
    {"remaining_tokens", T_PYSSIZET, offsetof(Hit, remaining_tokens), READONLY, nullptr},
    {"confidence", T_DOUBLE, offsetof(Hit, confidence), READONLY, nullptr},
    {"entry_id", T_ULONGLONG, offsetof(Hit, entry_id), READONLY, nullptr},
    {"lock", T_ULONGLONG, offsetof(Hit, lock), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
int of_tiers = 1;
PyGetSetDef getters[] = {
    {"kv_block_ids", get_array, nullptr, nullptr, nullptr},
    {"tiers", get_array, nullptr, nullptr, &of_tiers},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct)},   {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_repr, reinterpret_cast<void*>(describe)},   {Py_tp_members, members},
    {Py_tp_getset, getters},                           {0, nullptr},
};
PyType_Spec spec = {"sagellm._core.PrefixHit", sizeof(Hit), sizeof(BlockId) + 1, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

void bind_prefix_hit(py::module_& module) {
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  hit_type = reinterpret_cast<PyTypeObject*>(type);
  module.add_object("PrefixHit", type);
}

PyObject* make_hit(Match& match, std::size_t num_tokens, std::size_t block_size) {
  BlockPath& path = match.path;
  const std::size_t size = path.blocks.size();
  const bool is_inline = size <= kMaxInline;
  Hit* hit = allocate(is_inline ? size : 0);
  if (hit == nullptr) return nullptr;
  hit->matched_length = static_cast<Py_ssize_t>(size * block_size);
  hit->remaining_tokens = static_cast<Py_ssize_t>(num_tokens - size * block_size);
  hit->confidence = 1.0;
  hit->entry_id = match.entry;
  hit->lock = match.lock;
  if (!is_inline) {
    hit->path = new BlockPath(std::move(path));
  } else if (size != 0) {
    std::memcpy(hit->ids(), path.blocks.data(), size * sizeof(BlockId));
    if (path.tiers.empty()) {
      std::memset(hit->tiers(), 0, size);
    } else {
      std::memcpy(hit->tiers(), path.tiers.data(), size);
    }
  }
  return reinterpret_cast<PyObject*>(hit);
}

}  // namespace sage::python
