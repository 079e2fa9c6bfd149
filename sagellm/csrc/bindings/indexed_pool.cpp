// `_core.IndexedPool`; what it does is said in sagellm/prefix_reuse/pool.py, whose class is its twin. The methods are written
// against the C API, and with the GIL held but for long lookups: each takes about as long as pybind11 takes for one call.

#include "sagellm/prefix_index.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "arguments.h"

namespace sage::python {

namespace {

constexpr int kPlain = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ | py::detail::npy_api::NPY_ARRAY_ALIGNED_;

// A contiguous one-dimensional array that is changed in place and kept alive.
template <typename T>
class Column {
 public:
  Column(py::handle argument, const char* what) : keep_(py::reinterpret_borrow<py::object>(argument)) {
    if (py::isinstance<py::array>(argument)) {
      const auto* array = py::detail::array_proxy(argument.ptr());
      const int wanted = kPlain | py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
      if (array->nd == 1 && (array->flags & wanted) == wanted && py::isinstance<py::array_t<T>>(argument)) {
        data_ = reinterpret_cast<T*>(array->data);
        size_ = static_cast<std::size_t>(array->dimensions[0]);
        return;
      }
    }
    throw Error(ErrorKind::kArgument, std::string(what) + " must be a one-dimensional contiguous writable array of " +
                                          py::str(py::dtype::of<T>()).cast<std::string>() + "; it is changed in place.");
  }

  T& operator[](std::size_t row) { return data_[row]; }
  std::size_t size() const { return size_; }

 private:
  py::object keep_;
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

struct IndexedPool {
  IndexedPool(py::object index_object, py::handle references, py::handle accesses, py::handle cached, py::handle slot_of,
              py::handle ids, py::handle pool_slots)
      : keep(std::move(index_object)),
        index(keep.cast<PrefixIndex*>()),
        ref_count(references, "ref_count"),
        access_time(accesses, "access_time"),
        is_cached(cached, "is_cached"),
        slots(slot_of, "slots"),
        free_ids(ids, "free_ids"),
        free_slots(pool_slots, "free_slots") {
    for (const std::size_t size : {access_time.size(), is_cached.size(), slots.size(), free_ids.size()}) {
      if (size != ref_count.size()) {
        throw Error(ErrorKind::kArgument, "an array has " + std::to_string(size) + " rows and ref_count " +
                                              std::to_string(ref_count.size()) + "; each must have one for each block.");
      }
    }
  }

  void check_id(BlockId id) const {
    if (id < 0 || static_cast<std::size_t>(id) >= ref_count.size()) {
      throw Error(ErrorKind::kArgument, "block " + std::to_string(id) + " is not in the pool; it has " +
                                            std::to_string(ref_count.size()) + " blocks.");
    }
  }

  py::object keep;
  PrefixIndex* index;
  Column<std::int64_t> ref_count, access_time;
  Column<bool> is_cached;
  Column<std::int64_t> slots, free_ids, free_slots;
  std::vector<std::size_t> freed;  // room for free
};

void expect(Py_ssize_t given, Py_ssize_t wanted, const char* method) {
  if (given != wanted) {
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments by position, got %zd", method, wanted, given);
    throw py::error_already_set();
  }
}

std::int64_t whole_number(PyObject* argument, const char* what) {
  long long value = -1;
  if (PyLong_Check(argument)) {
    value = PyLong_AsLongLong(argument);
  } else if (const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(argument))) {  // one of numpy's
    value = PyLong_AsLongLong(number.ptr());
  }
  if (value >= 0) return value;
  PyErr_Clear();
  throw Error(ErrorKind::kArgument, std::string(what) + " " + py::repr(argument).cast<std::string>() +
                                        "; it must be a whole number, 0 or more.");
}

// 0 means no lock.
LockId parse_lock_or_none(PyObject* argument) {
  const unsigned long long value = PyLong_Check(argument) ? PyLong_AsUnsignedLongLong(argument) : ~0ULL;
  if (!PyErr_Occurred() && PyLong_Check(argument)) return value;
  PyErr_Clear();
  throw Error(ErrorKind::kLock, "lock " + py::repr(argument).cast<std::string>() +
                                    " is unknown; it must be a number that the index gave out.");
}

// int64 [ids], a new array.
py::object id_array(const BlockId* ids, std::size_t size) {
  auto& numpy = py::detail::npy_api::get();
  const auto length = static_cast<Py_intptr_t>(size);
  auto array = py::reinterpret_steal<py::object>(
      numpy.PyArray_NewFromDescr_(numpy.PyArray_Type_, py::dtype::of<std::int64_t>().release().ptr(), 1, &length, nullptr,
                                  nullptr, 0, nullptr));
  if (!array) throw py::error_already_set();
  auto* const out = reinterpret_cast<std::int64_t*>(py::detail::array_proxy(array.ptr())->data);
  for (std::size_t i = 0; i < size; ++i) out[i] = ids[i];
  return array;
}

py::object ids_or_none(const std::vector<BlockId>& ids) { return ids.empty() ? py::none() : id_array(ids.data(), ids.size()); }

std::size_t parse_count(PyObject* argument, const char* what) {
  const std::int64_t value = whole_number(argument, what);
  // More than there is of anything; as many tokens a block can still be counted.
  return static_cast<std::size_t>(std::min<std::int64_t>(value, std::int64_t{1} << 48));
}

// match(tokens, num_blocks, namespace, lock, table, num_held, now)
PyObject* pool_match(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    thread_local Match found;  // its room is kept from call to call
    expect(count, 7, "match");
    IndexedPool& pool = native_of<IndexedPool>(self);
    PrefixIndex& index = *pool.index;
    const Int32View tokens(args[0], "tokens", 0, parse_count(args[1], "number of blocks") * index.block_size());
    const NameView name(args[2]);
    const LockId before = parse_lock_or_none(args[3]);
    Column<std::int64_t> table(args[4], "table");
    const std::size_t num_held = parse_count(args[5], "number of blocks held");
    const std::int64_t now = whole_number(args[6], "access time");
    // Before the lookup: making a tuple may collect garbage, and with it run Python that looks up, too.
    const auto result = py::reinterpret_steal<py::object>(PyTuple_New(3));
    if (!result) throw py::error_already_set();
    {
      std::optional<py::gil_scoped_release> released;
      if (tokens.size() >= kReleaseTokens) released.emplace();
      index.lookup(name.get(), tokens.data(), tokens.size(), found, /*touch=*/true, /*lock=*/true);
    }
    const std::vector<BlockId>& blocks = found.path.blocks;
    const std::vector<Tier>& tiers = found.path.tiers;
    try {
      if (blocks.size() > table.size()) {
        throw Error(ErrorKind::kArgument, "the table has room for " + std::to_string(table.size()) + " blocks; found were " +
                                              std::to_string(blocks.size()) + ".");
      }
      for (std::size_t i = num_held; i < blocks.size(); ++i) {
        pool.check_id(blocks[i]);
        if (!pool.is_cached[static_cast<std::size_t>(blocks[i])]) {
          throw Error(ErrorKind::kArgument, "block " + std::to_string(blocks[i]) + " is in the index, but is_cached is off.");
        }
      }
      bool is_any_slower = false;
      for (std::size_t i = num_held; i < tiers.size(); ++i) is_any_slower |= tiers[i] != Tier::kGpu;
      py::object lock = py::reinterpret_steal<py::object>(PyLong_FromUnsignedLongLong(found.lock));
      py::object size = py::reinterpret_steal<py::object>(PyLong_FromSize_t(blocks.size()));
      if (!lock || !size) throw py::error_already_set();
      PyTuple_SET_ITEM(result.ptr(), 0, lock.release().ptr());
      PyTuple_SET_ITEM(result.ptr(), 1, size.release().ptr());
      PyTuple_SET_ITEM(result.ptr(), 2, py::bool_(is_any_slower).release().ptr());
      if (before != 0) index.unlock(before);
      for (std::size_t i = num_held; i < blocks.size(); ++i) {
        const auto row = static_cast<std::size_t>(blocks[i]);
        ++pool.ref_count[row];
        pool.access_time[row] = now;
        table[i] = blocks[i];
      }
    } catch (...) {
      index.unlock(found.lock);
      throw;
    }
    return result.inc_ref().ptr();
  });
}

// publish(lock, tokens, table, first, last)
PyObject* pool_publish(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, 5, "publish");
    IndexedPool& pool = native_of<IndexedPool>(self);
    PrefixIndex& index = *pool.index;
    const LockId lock = parse_lock_or_none(args[0]);
    Column<std::int64_t> table(args[2], "table");
    const std::size_t first = parse_count(args[3], "first block"), last = parse_count(args[4], "last block");
    const Int32View own(args[2], "block ids", first, last);
    const Int32View tokens(args[1], "tokens", first * index.block_size(), last * index.block_size());
    for (std::size_t i = 0; i < own.size(); ++i) pool.check_id(own.data()[i]);
    Entry entry;
    {
      std::optional<py::gil_scoped_release> released;
      if (tokens.size() >= kReleaseTokens) released.emplace();
      entry = index.extend(lock, tokens.data(), tokens.size(), own.data(), own.size(), Tier::kGpu);
    }
    const std::vector<BlockId>& cached = entry.path.blocks;
    std::vector<BlockId> doubles;
    for (std::size_t i = 0; i < cached.size(); ++i) {
      pool.check_id(cached[i]);
      if (cached[i] != own.data()[i]) doubles.push_back(own.data()[i]);
    }
    py::tuple out(2);
    out[0] = ids_or_none(doubles);
    out[1] = ids_or_none(entry.replaced.blocks);
    for (std::size_t i = 0; i < cached.size(); ++i) {
      const auto row = static_cast<std::size_t>(cached[i]);
      // The index's reference on a block that is new there, the sequence's on one that was there.
      ++pool.ref_count[row];
      pool.is_cached[row] = true;
      table[first + i] = cached[i];
    }
    return out.release().ptr();
  });
}

// evict_lru(num_blocks)
PyObject* pool_evict_lru(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, 1, "evict_lru");
    const auto wanted = static_cast<std::size_t>(whole_number(args[0], "number of blocks"));
    const Removal gone = native_of<IndexedPool>(self).index->evict_lru(wanted);
    return id_array(gone.blocks.data(), gone.blocks.size()).release().ptr();
  });
}

// How many entries of the two free lists are free.
struct NumFree {
  std::size_t ids, slots;
};

NumFree parse_num_free(PyObject* const* args) {
  return {parse_count(args[0], "number of free blocks"), parse_count(args[1], "number of free slots")};
}

// Takes a reference from each block and returns how many became free; on an error nothing is changed.
std::size_t take_references(IndexedPool& pool, const BlockId* ids, std::size_t size, std::int64_t now, NumFree num_free) {
  for (std::size_t i = 0; i < size; ++i) pool.check_id(ids[i]);
  std::size_t num_taken = 0;
  std::vector<std::size_t>& freed = pool.freed;
  try {
    freed.clear();
    for (; num_taken < size; ++num_taken) {
      const auto row = static_cast<std::size_t>(ids[num_taken]);
      if (pool.ref_count[row] <= 0) throw Error(ErrorKind::kArgument, "block " + std::to_string(row) + " is free already.");
      if (pool.ref_count[row] == 1) {
        const std::int64_t slot = pool.slots[row];
        if (slot < 0 || static_cast<std::size_t>(slot) >= pool.free_slots.size()) {
          throw Error(ErrorKind::kArgument, "block " + std::to_string(row) + " lies in slot " + std::to_string(slot) +
                                                ", which is not one of the pool.");
        }
        freed.push_back(row);
      }
      --pool.ref_count[row];
    }
    if (num_free.ids > pool.free_ids.size() || pool.free_ids.size() - num_free.ids < freed.size() ||
        num_free.slots > pool.free_slots.size() || pool.free_slots.size() - num_free.slots < freed.size()) {
      throw Error(ErrorKind::kArgument, std::to_string(freed.size()) + " blocks to free, with " +
                                            std::to_string(num_free.ids) + " of " + std::to_string(pool.free_ids.size()) +
                                            " free and " + std::to_string(num_free.slots) + " of " +
                                            std::to_string(pool.free_slots.size()) + " slots.");
    }
  } catch (...) {
    while (num_taken > 0) ++pool.ref_count[static_cast<std::size_t>(ids[--num_taken])];
    throw;
  }
  for (std::size_t i = 0; i < size; ++i) pool.access_time[static_cast<std::size_t>(ids[i])] = now;
  const std::size_t first = pool.free_ids.size() - num_free.ids - freed.size();
  const std::size_t first_slot = pool.free_slots.size() - num_free.slots - freed.size();
  for (std::size_t i = 0; i < freed.size(); ++i) {
    pool.free_ids[first + i] = static_cast<std::int64_t>(freed[i]);
    pool.free_slots[first_slot + i] = pool.slots[freed[i]];
  }
  return freed.size();
}

std::size_t take_back(IndexedPool& pool, const BlockId* ids, std::size_t size, std::int64_t now, NumFree num_free) {
  const std::size_t num_freed = take_references(pool, ids, size, now, num_free);
  for (std::size_t i = 0; i < size; ++i) pool.is_cached[static_cast<std::size_t>(ids[i])] = false;
  return num_freed;
}

// give_back(ids, now, num_free, num_free_slots)
PyObject* pool_give_back(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, 4, "give_back");
    const Int32View ids(args[0], "block ids");
    const std::int64_t now = whole_number(args[1], "access time");
    return PyLong_FromSize_t(take_back(native_of<IndexedPool>(self), ids.data(), ids.size(), now, parse_num_free(args + 2)));
  });
}

// drop_lru(num_blocks, now, num_free, num_free_slots)
PyObject* pool_drop_lru(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, 4, "drop_lru");
    const std::size_t wanted = parse_count(args[0], "number of blocks");
    const std::int64_t now = whole_number(args[1], "access time");
    const NumFree num_free = parse_num_free(args + 2);
    IndexedPool& pool = native_of<IndexedPool>(self);
    const Removal gone = pool.index->evict_lru(wanted);
    const std::size_t num_freed = take_back(pool, gone.blocks.data(), gone.blocks.size(), now, num_free);
    return PyLong_FromSize_t(num_freed);
  });
}

// leave(lock, table, num_blocks, now, num_free, num_free_slots)
PyObject* pool_leave(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, 6, "leave");
    IndexedPool& pool = native_of<IndexedPool>(self);
    const LockId lock = parse_lock_or_none(args[0]);
    const Int32View ids(args[1], "block ids", 0, parse_count(args[2], "number of blocks"));
    const std::int64_t now = whole_number(args[3], "access time");
    const NumFree num_free = parse_num_free(args + 4);
    if (lock != 0) pool.index->unlock(lock);
    return PyLong_FromSize_t(take_references(pool, ids.data(), ids.size(), now, num_free));
  });
}

PyMethodDef pool_method(const char* name, PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

PyMethodDef pool_methods[] = {
    pool_method("match", pool_match),
    pool_method("publish", pool_publish),
    pool_method("evict_lru", pool_evict_lru),
    pool_method("give_back", pool_give_back),
    pool_method("drop_lru", pool_drop_lru),
    pool_method("leave", pool_leave),
};

}  // namespace

void bind_indexed_pool(py::module_& module) {
  py::class_<IndexedPool> type(module, "IndexedPool");
  type.def(py::init([](py::object index, py::handle ref_count, py::handle access_time, py::handle is_cached, py::handle slots,
                       py::handle free_ids, py::handle free_slots) {
             if (!py::isinstance<PrefixIndex>(index)) {
               throw Error(ErrorKind::kArgument, "the index is " + py::repr(index).cast<std::string>() +
                                                     "; it must be a PrefixReuseIndex (ReferenceIndexedPool takes any).");
             }
             return std::make_unique<IndexedPool>(std::move(index), ref_count, access_time, is_cached, slots, free_ids,
                                                  free_slots);
           }),
           py::arg("index"), py::kw_only(), py::arg("ref_count"), py::arg("access_time"), py::arg("is_cached"),
           py::arg("slots"), py::arg("free_ids"), py::arg("free_slots"));
  auto* const raw_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  for (PyMethodDef& method : pool_methods) {
    type.attr(method.ml_name) = py::reinterpret_steal<py::object>(PyDescr_NewMethod(raw_type, &method));
  }
}

}  // namespace sage::python
