// `_core.copy_pieces` and `_core.KVStrides`.

#include "sagellm/copy_pieces.h"

#include <pybind11/stl.h>

#include <array>

#include "arguments.h"
#include "sagellm/kv_strides.h"

namespace sage::python {

namespace {

using ByteArray = py::array_t<std::uint8_t, py::array::c_style>;
using Offsets = py::array_t<std::int64_t, py::array::c_style>;

struct Copy {
  Bytes to;
  ConstBytes from;
};

Copy copy_of(ByteArray& target, const ByteArray& source) {
  return {{target.mutable_data(), static_cast<std::size_t>(target.size())},
          {source.data(), static_cast<std::size_t>(source.size())}};
}

void check(const Copy& copy, const PieceList& pieces) {
  const std::size_t bad = first_outside(pieces, copy.from.num_bytes, copy.to.num_bytes);
  if (bad == pieces.count) return;
  throw std::out_of_range("piece " + std::to_string(bad) + " (" + std::to_string(pieces.num_bytes[bad]) + " bytes from " +
                          std::to_string(pieces.src[bad]) + " to " + std::to_string(pieces.dst[bad]) +
                          ") does not lie within " + std::to_string(copy.from.num_bytes) + " and " +
                          std::to_string(copy.to.num_bytes) + " bytes.");
}

const char* word_of(CopyEnd end) {
  return end == CopyEnd::kDone ? "done" : end == CopyEnd::kDeadline ? "deadline" : "stopped";
}

const char* copy(ByteArray& target, const ByteArray& source, const Offsets& dst, const Offsets& src, const Offsets& num_bytes,
                 double deadline, const ByteArray& stop) {
  if (dst.size() != src.size() || dst.size() != num_bytes.size() || stop.size() != 1) {
    throw py::value_error("copy_pieces: dst, src and num_bytes have as many values each, stop has one.");
  }
  const PieceList pieces{src.data(), dst.data(), num_bytes.data(), static_cast<std::size_t>(src.size())};
  const Copy one = copy_of(target, source);
  const std::uint8_t* const flag = stop.data();
  const py::gil_scoped_release release;
  check(one, pieces);
  return word_of(copy_pieces(one.to, one.from, pieces, deadline, flag));
}

constexpr std::int64_t kFewTokens = 1024;  // sooner done than the interpreter is given away and taken back

using Side = std::array<std::int64_t, 4>;

KVSide side_of(const Side& values) { return {values[0], values[1], values[2], values[3]}; }

py::tuple pieces_of(const KVStrides& strides, const Offsets& src_blocks, std::int64_t src_start, const Offsets& dst_blocks,
                 std::int64_t dst_start, std::int64_t first, std::int64_t num) {
  const KVBlocks from{src_blocks.data(), static_cast<std::size_t>(src_blocks.size()), src_start};
  const KVBlocks to{dst_blocks.data(), static_cast<std::size_t>(dst_blocks.size()), dst_start};
  KVPieces found;
  if (num < kFewTokens) {
    found = strides.pieces(from, to, first, num);
  } else {
    const py::gil_scoped_release release;
    found = strides.pieces(from, to, first, num);
  }
  return py::make_tuple(to_array(found.src), to_array(found.dst), to_array(found.num_bytes));
}

// Copies one source after the other to its target.
const char* copy_tokens(const KVStrides& strides, std::vector<ByteArray> targets, const std::vector<ByteArray>& sources,
                        const Offsets& src_blocks, std::int64_t src_start, const Offsets& dst_blocks, std::int64_t dst_start,
                        std::int64_t first, std::int64_t num, double deadline, const ByteArray& stop) {
  if (targets.size() != sources.size() || stop.size() != 1) {
    throw py::value_error("copy_tokens: there are as many targets as sources, stop has one value.");
  }
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < targets.size(); ++i) copies.push_back(copy_of(targets[i], sources[i]));
  const KVBlocks from{src_blocks.data(), static_cast<std::size_t>(src_blocks.size()), src_start};
  const KVBlocks to{dst_blocks.data(), static_cast<std::size_t>(dst_blocks.size()), dst_start};
  const std::uint8_t* const flag = stop.data();
  const py::gil_scoped_release release;
  const KVPieces found = strides.pieces(from, to, first, num);
  const PieceList pieces{found.src.data(), found.dst.data(), found.num_bytes.data(), found.src.size()};
  for (const Copy& each : copies) check(each, pieces);
  CopyEnd end = CopyEnd::kDone;
  for (std::size_t i = 0; i < copies.size() && end == CopyEnd::kDone; ++i) {
    end = copy_pieces(copies[i].to, copies[i].from, pieces, deadline, flag);
  }
  return word_of(end);
}

}  // namespace

void bind_copy_pieces(py::module_& module) {
  module.def("copy_pieces", &copy, py::arg("target").noconvert(), py::arg("source").noconvert(),
             py::arg("dst").noconvert(), py::arg("src").noconvert(), py::arg("num_bytes").noconvert(), py::arg("deadline"),
             py::arg("stop").noconvert());
  py::class_<KVStrides>(module, "KVStrides")
      .def(py::init([](std::int64_t num_layers, const Side& src, const Side& dst, std::int64_t run_bytes) {
             return KVStrides{num_layers, side_of(src), side_of(dst), run_bytes};
           }),
           py::arg("num_layers"), py::arg("src"), py::arg("dst"), py::arg("run_bytes"))
      .def("pieces", &pieces_of, py::arg("src_blocks").noconvert(), py::arg("src_start"), py::arg("dst_blocks").noconvert(),
           py::arg("dst_start"), py::arg("first"), py::arg("num"))
      .def("copy_tokens", &copy_tokens, py::arg("targets").noconvert(), py::arg("sources").noconvert(),
           py::arg("src_blocks").noconvert(), py::arg("src_start"), py::arg("dst_blocks").noconvert(), py::arg("dst_start"), py::arg("first"), py::arg("num"),
           py::arg("deadline"), py::arg("stop").noconvert());
}

}  // namespace sage::python
