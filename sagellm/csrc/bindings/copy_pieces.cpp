// `_core.copy_pieces`.

#include "sagellm/copy_pieces.h"

#include "arguments.h"

namespace sage::python {

namespace {

using ByteArray = py::array_t<std::uint8_t, py::array::c_style>;
using Offsets = py::array_t<std::int64_t, py::array::c_style>;

const char* copy(ByteArray& target, const ByteArray& source, const Offsets& dst, const Offsets& src, const Offsets& num_bytes,
                 double deadline, const ByteArray& stop) {
  if (dst.size() != src.size() || dst.size() != num_bytes.size() || stop.size() != 1) {
    throw py::value_error("copy_pieces: dst, src and num_bytes have as many values each, stop has one.");
  }
  const PieceList pieces{src.data(), dst.data(), num_bytes.data(), static_cast<std::size_t>(src.size())};
  const Bytes to{target.mutable_data(), static_cast<std::size_t>(target.size())};
  const ConstBytes from{source.data(), static_cast<std::size_t>(source.size())};
  const std::uint8_t* const flag = stop.data();
  CopyEnd end;
  {
    const py::gil_scoped_release release;
    const std::size_t bad = first_outside(pieces, from.num_bytes, to.num_bytes);
    if (bad != pieces.count) {
      throw std::out_of_range("copy_pieces: piece " + std::to_string(bad) + " (" + std::to_string(pieces.num_bytes[bad]) +
                              " bytes from " + std::to_string(pieces.src[bad]) + " to " + std::to_string(pieces.dst[bad]) +
                              ") does not lie within " + std::to_string(from.num_bytes) + " and " +
                              std::to_string(to.num_bytes) + " bytes.");
    }
    end = copy_pieces(to, from, pieces, deadline, flag);
  }
  return end == CopyEnd::kDone ? "done" : end == CopyEnd::kDeadline ? "deadline" : "stopped";
}

}  // namespace

void bind_copy_pieces(py::module_& module) {
  module.def("copy_pieces", &copy, py::arg("target").noconvert(), py::arg("source").noconvert(),
             py::arg("dst").noconvert(), py::arg("src").noconvert(), py::arg("num_bytes").noconvert(), py::arg("deadline"),
             py::arg("stop").noconvert());
}

}  // namespace sage::python
