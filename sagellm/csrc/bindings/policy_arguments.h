// Parts that the bindings of policies share.
#pragma once

#include "arguments.h"
#include "sagellm/policy.h"

namespace sage::python {

// A one-dimensional array of int64 or uint64, in place if it is contiguous; negative keys are taken modulo 2**64.
class KeyView {
 public:
  KeyView(py::handle argument, const char* what);
  const std::uint64_t* data() const { return static_cast<const std::uint64_t*>(array_.data()); }
  std::size_t size() const { return static_cast<std::size_t>(array_.size()); }

 private:
  py::array array_;
};

// A dict of numbers, and `future`, an array of keys; or None.
PolicyOptions parse_options(const py::object& options);

void bind_object_cache(py::module_& module);
void bind_native_policy(py::module_& module);

}  // namespace sage::python
