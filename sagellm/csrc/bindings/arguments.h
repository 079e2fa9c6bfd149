// Arguments as Python gives them, made into what the library takes.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sagellm/policy.h"
#include "sagellm/prefix_index.h"

namespace sage::python {

namespace py = pybind11;

// Work on fewer tokens than this takes less time than handing the GIL over and back.
inline constexpr std::size_t kReleaseTokens = 8192;

// A one-dimensional array of integers as int32: in place if it is contiguous int32, else converted.
// Lives no longer than the call: the buffer is the caller's or this object's.
class Int32View {
 public:
  // `what` names the argument in messages: "tokens", "block ids".
  Int32View(py::handle argument, const char* what);
  // Only rows `first` to `last`.
  Int32View(py::handle argument, const char* what, std::size_t first, std::size_t last);
  const std::int32_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  bool use(py::handle argument, const char* what, std::size_t first, std::size_t last);
  void convert(py::handle argument, const char* what);
  void narrow(const std::int64_t* values, const char* what);

  static constexpr std::size_t kAll = ~std::size_t{0};
  const std::int32_t* data_ = nullptr;
  std::size_t size_ = 0;
  std::unique_ptr<std::int32_t[]> own_;
};

// A string, or an object with a `key`; valid as long as the argument.
class NameView {
 public:
  explicit NameView(py::handle argument);
  std::string_view get() const { return view_; }

 private:
  py::object keep_;
  std::string_view view_;
};

Tier parse_tier(py::handle argument);
std::string dump_metadata(py::handle argument);

template <typename T>
py::array_t<T> to_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// A read-only array over memory that `owner` keeps. By the C API: py::array's constructor costs as much as a lookup.
template <typename T>
py::object view_array(T* data, std::size_t size, py::handle owner) {
  auto& numpy = py::detail::npy_api::get();
  const auto length = static_cast<Py_intptr_t>(size);
  constexpr int flags = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  auto array = py::reinterpret_steal<py::object>(numpy.PyArray_NewFromDescr_(
      numpy.PyArray_Type_, py::dtype::of<std::remove_const_t<T>>().release().ptr(), 1, &length, nullptr,
      const_cast<std::remove_const_t<T>*>(data), flags, nullptr));
  if (!array || numpy.PyArray_SetBaseObject_(array.ptr(), py::reinterpret_borrow<py::object>(owner).release().ptr()) < 0) {
    throw py::error_already_set();
  }
  return array;
}

inline py::array tier_array(const std::vector<Tier>& tiers, std::size_t size) {
  py::array_t<std::int8_t> out(static_cast<py::ssize_t>(size));
  auto* data = out.mutable_data();
  for (std::size_t i = 0; i < size; ++i) data[i] = tiers.empty() ? std::int8_t{0} : static_cast<std::int8_t>(tiers[i]);
  return out;
}

// The C++ object of a Python one. By pybind11's own structs: its cast costs as much as a lookup.
template <typename T>
T& native_of(PyObject* self) {
  auto* const instance = reinterpret_cast<py::detail::instance*>(self);
  void* const value = instance->simple_layout ? instance->simple_value_holder[0] : nullptr;
  if (value != nullptr) return *static_cast<T*>(value);
  return py::handle(self).cast<T&>();  // an unusual subclass, or one whose __init__ was not called
}

// Sets the Python error that belongs to a library error.
void set_error(const Error& error);
void set_error(const PolicyError& error);

// Runs a function written against the C API; what it throws becomes a Python error.
template <typename Work>
PyObject* guarded(Work&& work) {
  try {
    return work();
  } catch (const Error& error) {
    set_error(error);
  } catch (const PolicyError& error) {
    set_error(error);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void bind_prefix_results(py::module_& module);
void bind_prefix_index(py::module_& module);
void bind_indexed_pool(py::module_& module);
void bind_turbomind(py::module_& module);
void bind_policies(py::module_& module);
void bind_copy_pieces(py::module_& module);
void bind_speculative(py::module_& module);
void bind_shm(py::module_& module);
void bind_exchange(py::module_& module);
void bind_decoder(py::module_& module);

}  // namespace sage::python
