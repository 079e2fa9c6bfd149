// ObjectCache: a type of its own, since pybind11 takes longer to call a method than a policy to do its work.

#include "sagellm/object_cache.h"

#include "policy_arguments.h"

namespace sage::python {

namespace {

struct Cache {
  PyObject_HEAD
  ObjectCache* cache;
  bool is_busy;  // a thread works on it without the GIL
};

Cache* cache_of(PyObject* self) { return reinterpret_cast<Cache*>(self); }

ObjectCache* usable(PyObject* self) {
  if (!cache_of(self)->is_busy) return cache_of(self)->cache;
  PyErr_SetString(PyExc_RuntimeError, "another thread uses this ObjectCache; give each thread one of its own");
  return nullptr;
}

bool parse_key(PyObject* argument, std::uint64_t& key) {
  key = PyLong_Check(argument) ? PyLong_AsUnsignedLongLong(argument) : ~std::uint64_t{0};
  if (key != ~std::uint64_t{0}) return true;
  PyErr_Clear();
  PyObject* const number = PyNumber_Index(argument);
  if (number == nullptr) return false;
  key = PyLong_AsUnsignedLongLong(number);
  if (key == ~std::uint64_t{0} && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    key = static_cast<std::uint64_t>(PyLong_AsLongLong(number));
  }
  Py_DECREF(number);
  if (PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  set_error(PolicyError("a key must be a 64-bit integer, signed or not."));
  return false;
}

PyObject* cache_access(PyObject* self, PyObject* argument) {
  ObjectCache* const cache = usable(self);
  std::uint64_t key;
  if (cache == nullptr || !parse_key(argument, key)) return nullptr;
  try {
    return PyBool_FromLong(cache->access(key));
  } catch (const PolicyError& error) {
    set_error(error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  return nullptr;
}

PyObject* cache_access_many(PyObject* self, PyObject* argument) {
  return guarded([&]() -> PyObject* {
    ObjectCache* const cache = usable(self);
    if (cache == nullptr) return nullptr;
    const KeyView keys(argument, "keys");
    py::array_t<bool> hits(static_cast<py::ssize_t>(keys.size()));
    auto* const out = reinterpret_cast<std::uint8_t*>(hits.mutable_data());
    struct Busy {
      bool& flag;
      explicit Busy(bool& is_busy) : flag(is_busy) { flag = true; }
      ~Busy() { flag = false; }
    } const busy(cache_of(self)->is_busy);
    {
      const py::gil_scoped_release release;
      cache->access_many(keys.data(), keys.size(), out);
    }
    return hits.release().ptr();
  });
}

PyObject* cache_keys(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    ObjectCache* const cache = usable(self);
    return cache == nullptr ? nullptr : to_array(cache->keys()).release().ptr();
  });
}

int cache_contains(PyObject* self, PyObject* argument) {
  ObjectCache* const cache = usable(self);
  std::uint64_t key;
  if (cache == nullptr || !parse_key(argument, key)) return -1;
  return cache->contains(key);
}

Py_ssize_t cache_length(PyObject* self) {
  ObjectCache* const cache = usable(self);
  return cache == nullptr ? -1 : static_cast<Py_ssize_t>(cache->size());
}

PyObject* cache_num_evicted(PyObject* self, void*) {
  ObjectCache* const cache = usable(self);
  return cache == nullptr ? nullptr : PyLong_FromUnsignedLongLong(cache->num_evicted());
}

PyObject* construct_cache(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"name", "capacity", "options", nullptr};
  const char* name = nullptr;
  long long capacity = 0;
  PyObject* options = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sL|O", const_cast<char**>(names), &name, &capacity, &options)) return nullptr;
  return guarded([&]() -> PyObject* {
    auto made = make_object_cache(name, capacity, parse_options(py::reinterpret_borrow<py::object>(options)));
    PyObject* const self = type->tp_alloc(type, 0);
    if (self != nullptr) cache_of(self)->cache = made.release();
    return self;
  });
}

void destroy_cache(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete cache_of(self)->cache;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef cache_methods[] = {
    {"access", cache_access, METH_O, nullptr},
    {"access_many", cache_access_many, METH_O, nullptr},
    {"keys", cache_keys, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef cache_getters[] = {
    {"num_evicted", cache_num_evicted, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot cache_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct_cache)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy_cache)},
    {Py_tp_methods, cache_methods},
    {Py_tp_getset, cache_getters},
    {Py_sq_length, reinterpret_cast<void*>(cache_length)},
    {Py_sq_contains, reinterpret_cast<void*>(cache_contains)},
    {0, nullptr},
};
PyType_Spec cache_spec = {"sagellm._core.ObjectCache", sizeof(Cache), 0, Py_TPFLAGS_DEFAULT, cache_slots};

}  // namespace

void bind_object_cache(py::module_& module) {
  PyObject* const type = PyType_FromSpec(&cache_spec);
  if (type == nullptr) throw py::error_already_set();
  module.add_object("ObjectCache", type);
}

}  // namespace sage::python
