// `_core.stream_copy`.

#include "sagellm/stream_copy.h"

#include "arguments.h"

namespace sage::python {

namespace {

constexpr std::size_t kReleaseBytes = 64 << 10;  // fewer are copied before the GIL is handed over and back

using Bytes = py::array_t<std::uint8_t, py::array::c_style>;

void copy(Bytes& target, const Bytes& source) {
  const auto num_bytes = static_cast<std::size_t>(source.size());
  if (target.size() != source.size()) {
    throw py::value_error("stream_copy: " + std::to_string(num_bytes) + " bytes do not fit " +
                          std::to_string(target.size()) + "; give as many.");
  }
  void* const to = target.mutable_data();
  const void* const from = source.data();
  if (num_bytes < kReleaseBytes) {
    stream_copy(to, from, num_bytes);
    return;
  }
  py::gil_scoped_release release;
  stream_copy(to, from, num_bytes);
}

}  // namespace

void bind_stream_copy(py::module_& module) {
  module.def("stream_copy", &copy, py::arg("target").noconvert(), py::arg("source").noconvert(),
             "Copy uint8 [n] into uint8 [n], past the processor's caches where it is large; for memory that nobody reads "
             "soon. They must not overlap. Raises ValueError: another size, or a target that is read-only; TypeError: "
             "not uint8, or not contiguous.");
}

}  // namespace sage::python
