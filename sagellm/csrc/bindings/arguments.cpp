#include "arguments.h"

#include <limits>

namespace sage::python {

namespace {

std::string text(py::handle value) { return py::str(value).cast<std::string>(); }

void check_rows(const char* what, std::size_t first, std::size_t last, std::size_t size) {
  if (first <= last && last <= size) return;
  throw Error(ErrorKind::kArgument, std::string(what) + " " + std::to_string(first) + " to " + std::to_string(last) +
                                        " of " + std::to_string(size) + "; they must be among them.");
}

}  // namespace

Int32View::Int32View(py::handle argument, const char* what) {
  if (!use(argument, what, 0, kAll)) convert(argument, what);
}

Int32View::Int32View(py::handle argument, const char* what, std::size_t first, std::size_t last) {
  if (use(argument, what, first, last)) return;
  convert(argument, what);
  check_rows(what, first, last, size_);
  data_ += first;
  size_ = last - first;
}

// False if the argument must be converted.
bool Int32View::use(py::handle argument, const char* what, std::size_t first, std::size_t last) {
  if (!py::isinstance<py::array>(argument)) return false;
  const auto* array = py::detail::array_proxy(argument.ptr());
  const int wanted = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  if (array->nd != 1 || (array->flags & wanted) != wanted) return false;
  const auto type = py::reinterpret_borrow<py::dtype>(array->descr);
  const char order = type.byteorder();
  if (order != '=' && order != '|') return false;
  const bool is_wide = type.kind() == 'i' && type.itemsize() == 8;
  if (!is_wide && type.num() != py::detail::npy_api::NPY_INT_) return false;
  const auto size = static_cast<std::size_t>(array->dimensions[0]);
  if (last == kAll) {
    last = size;
  } else {
    check_rows(what, first, last, size);
  }
  size_ = last - first;
  if (is_wide) {
    narrow(reinterpret_cast<const std::int64_t*>(array->data) + first, what);
  } else {
    data_ = reinterpret_cast<const std::int32_t*>(array->data) + first;
  }
  return true;
}

void Int32View::narrow(const std::int64_t* values, const char* what) {
  own_.reset(new std::int32_t[size_]);
  constexpr std::uint64_t kOffset = std::uint64_t{1} << 31;  // added to it, an int32 is 0 to 2**32 - 1
  std::uint64_t any = 0;
  for (std::size_t i = 0; i < size_; ++i) {
    own_[i] = static_cast<std::int32_t>(values[i]);
    any |= static_cast<std::uint64_t>(values[i]) + kOffset;
  }
  data_ = own_.get();
  if (any >> 32 == 0) return;
  std::size_t bad = 0;
  while (own_[bad] == values[bad]) ++bad;
  throw Error(ErrorKind::kArgument, std::string(what) + ": " + std::to_string(values[bad]) + " at position " +
                                        std::to_string(bad) + "; allowed are 0 to 2147483647.");
}

void Int32View::convert(py::handle argument, const char* what) {
  const auto refuse = [&](const std::string& got) {
    throw Error(ErrorKind::kArgument, std::string(what) + " are " + got +
                                          "; they must be a one-dimensional array or list of integers. Contiguous int32 is "
                                          "used without a copy.");
  };
  py::object array;
  try {
    array = py::module_::import("numpy").attr("asarray")(argument);
  } catch (const py::error_already_set& error) {
    refuse("no array (" + std::string(error.what()).substr(0, 80) + ")");
  }
  const auto dtype = array.attr("dtype");
  const auto kind = dtype.attr("kind").cast<std::string>();
  const auto rank = array.attr("ndim").cast<int>();
  if (rank != 1) refuse(std::to_string(rank) + "-dimensional");
  if (py::len(array) == 0 && py::isinstance<py::sequence>(argument) && !py::isinstance<py::array>(argument)) return;
  if (kind != "i" && kind != "u") refuse("of type " + text(dtype));
  if (kind == "u" && py::len(array) != 0) {
    const py::object largest = array.attr("max")();
    if (py::int_(largest) > py::int_(std::numeric_limits<std::int32_t>::max())) {
      throw Error(ErrorKind::kArgument,
                  std::string(what) + ": " + text(largest) + " is too large; allowed are 0 to 2147483647.");
    }
  }
  const py::object wide = py::module_::import("numpy").attr("ascontiguousarray")(array, "int64");
  const auto* proxy = py::detail::array_proxy(wide.ptr());
  size_ = static_cast<std::size_t>(proxy->dimensions[0]);
  narrow(reinterpret_cast<const std::int64_t*>(proxy->data), what);
}

NameView::NameView(py::handle argument) {
  if (!PyUnicode_Check(argument.ptr())) {
    if (!py::hasattr(argument, "key")) {
      throw Error(ErrorKind::kArgument, "namespace " + text(py::repr(argument)) + "; it must be a string or a Namespace.");
    }
    keep_ = argument.attr("key");
    argument = keep_;
    if (!PyUnicode_Check(argument.ptr())) {
      throw Error(ErrorKind::kArgument, "namespace with key " + text(py::repr(argument)) + "; the key must be a string.");
    }
  }
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(argument.ptr(), &size);
  if (data == nullptr) {
    PyErr_Clear();
    throw Error(ErrorKind::kArgument, "namespace " + text(py::repr(argument)) + " cannot be written as UTF-8.");
  }
  view_ = std::string_view(data, static_cast<std::size_t>(size));
}

Tier parse_tier(py::handle argument) {
  // An enumeration of strings is a string.
  if (PyUnicode_Check(argument.ptr())) {
    if (PyUnicode_CompareWithASCIIString(argument.ptr(), "gpu") == 0) return Tier::kGpu;
    if (PyUnicode_CompareWithASCIIString(argument.ptr(), "cpu") == 0) return Tier::kCpu;
    if (PyUnicode_CompareWithASCIIString(argument.ptr(), "nvme") == 0) return Tier::kNvme;
  }
  throw Error(ErrorKind::kArgument, "tier " + text(py::repr(argument)) + "; known are gpu, cpu, nvme.");
}

std::string dump_metadata(py::handle argument) {
  if (argument.is_none()) return {};
  if (!py::isinstance<py::dict>(argument)) {
    throw Error(ErrorKind::kArgument, "metadata is " + text(py::type::of(argument)) + "; it must be a dict or None.");
  }
  try {
    return py::module_::import("json").attr("dumps")(argument).cast<std::string>();
  } catch (const py::error_already_set& error) {
    throw Error(ErrorKind::kArgument, "metadata cannot be written as JSON: " + std::string(error.what()) +
                                          ". Use strings, numbers, lists and dicts.");
  }
}

}  // namespace sage::python
