// `_core.ShmSegment` and `_core.ShmGroup`.

#include "sagellm/shm_group.h"

#include "arguments.h"

namespace sage::python {

namespace {

// Every wait looks here now and then, so that Ctrl-C is heard.
void raise_signals() {
  py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::shared_ptr<ShmGroup> make_group(std::shared_ptr<ShmSegment> segment, std::uint32_t rank, std::size_t chunk_bytes,
                                     double spin_s) {
  ShmOptions options;
  options.chunk_bytes = chunk_bytes;
  options.spin_s = spin_s;
  auto group = std::make_shared<ShmGroup>(std::move(segment), rank, options);
  group->on_idle(raise_signals);
  return group;
}

// uint8 [num_bytes] at `data`, writable; `owner` lives as long as the array.
template <typename Owner>
py::array_t<std::uint8_t> shared_bytes(std::uint8_t* data, std::size_t num_bytes, Owner&& owner) {
  using Kept = std::decay_t<Owner>;
  const py::capsule base(new Kept(std::forward<Owner>(owner)), [](void* kept) { delete static_cast<Kept*>(kept); });
  return py::array_t<std::uint8_t>({num_bytes}, {std::size_t{1}}, data, base);
}

// A place in the group's heap; tensors may outlive the group, so it holds what they need and nothing else.
struct HeapPlace {
  std::shared_ptr<ShmGroup> group;
  std::size_t offset, num_bytes;
  HeapPlace(std::shared_ptr<ShmGroup> of, std::size_t at, std::size_t size)
      : group(std::move(of)), offset(at), num_bytes(size) {}
  HeapPlace(HeapPlace&&) = default;
  ~HeapPlace() {
    if (group) group->heap().release(offset, num_bytes);
  }
};

py::array_t<std::uint8_t> heap_bytes(const std::shared_ptr<ShmGroup>& group, std::size_t num_bytes) {
  const std::size_t offset = num_bytes == 0 ? ShmHeap::npos : group->heap().allocate(num_bytes);
  if (offset == ShmHeap::npos) {
    throw CommError(CommFault::kOther, "no " + std::to_string(num_bytes) + " bytes in a shared heap of " +
                                           std::to_string(group->heap().num_bytes()) + " with " +
                                           std::to_string(group->heap().num_free()) +
                                           " free; give back tensors, or raise option heap_bytes.");
  }
  return shared_bytes(group->heap_data() + offset, num_bytes, HeapPlace(group, offset, num_bytes));
}

using Release = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_shm(py::module_& module) {
  py::class_<ShmSegment, std::shared_ptr<ShmSegment>>(module, "ShmSegment")
      .def_static(
          "create",
          [](std::uint32_t world_size, std::size_t ring_bytes, std::size_t staging_bytes, std::size_t heap_bytes) {
            return ShmSegment::create(world_size, ShmSizes{ring_bytes, staging_bytes, heap_bytes});
          },
          py::arg("world_size"), py::arg("ring_bytes"), py::arg("staging_bytes"), py::arg("heap_bytes"))
      .def_static("open", &ShmSegment::open, py::arg("pid"), py::arg("fd"), py::arg("token"))
      .def("release_fd", &ShmSegment::release_fd)
      .def_property_readonly("fd", &ShmSegment::fd)
      .def_property_readonly("token", &ShmSegment::token)
      .def_property_readonly("world_size", &ShmSegment::world_size);
  py::class_<ShmGroup, std::shared_ptr<ShmGroup>>(module, "ShmGroup")
      .def(py::init(&make_group), py::arg("segment"), py::arg("rank"), py::arg("chunk_bytes"), py::arg("spin_s"))
      .def("join", &ShmGroup::join, py::arg("deadline"), Release())
      .def(
          "post",
          [](ShmGroup& group, std::uint32_t to, std::uintptr_t data, std::size_t num_bytes, std::string_view label,
             double deadline) {
            const py::gil_scoped_release release;
            return group.post(to, reinterpret_cast<const void*>(data), num_bytes, label, deadline);
          },
          py::arg("to"), py::arg("data"), py::arg("num_bytes"), py::arg("label"), py::arg("deadline"))
      .def(
          "can_post_at_once",
          [](const ShmGroup& group, std::uint32_t to, std::uintptr_t data, std::size_t num_bytes) {
            return group.can_post_at_once(to, reinterpret_cast<const void*>(data), num_bytes);
          },
          py::arg("to"), py::arg("data"), py::arg("num_bytes"))
      .def("wait_read", &ShmGroup::wait_read, py::arg("to"), py::arg("position"), py::arg("deadline"), Release())
      .def(
          "recv",
          [](ShmGroup& group, std::uint32_t from, std::uintptr_t data, std::size_t num_bytes, std::string_view label,
             double deadline) {
            const py::gil_scoped_release release;
            group.recv(from, reinterpret_cast<void*>(data), num_bytes, label, deadline);
          },
          py::arg("source"), py::arg("data"), py::arg("num_bytes"), py::arg("label"), py::arg("deadline"))
      .def("meet", &ShmGroup::meet, py::arg("label"), py::arg("deadline"), Release())
      .def("staging",
           [](const std::shared_ptr<ShmGroup>& group) {
             const ShmSegment& segment = *group->segment();
             const std::size_t num_bytes = segment.world_size() * 2 * segment.sizes().staging;
             return shared_bytes(group->staging(), num_bytes, group->segment());
           })
      .def("next_half", &ShmGroup::next_half, py::arg("deadline"), Release())
      .def(
          "add_up",
          [](ShmGroup& group, std::uintptr_t numbers, std::size_t count, const std::string& dtype, std::string_view label,
             double deadline) {
            if (dtype != "float32" && dtype != "bfloat16") {
              throw py::value_error("dtype is '" + dtype + "'; use float32 or bfloat16.");
            }
            const py::gil_scoped_release release;
            group.add_up(reinterpret_cast<void*>(numbers), count,
                         dtype == "float32" ? ShmNumber::kFloat32 : ShmNumber::kBFloat16, label, deadline);
          },
          py::arg("numbers"), py::arg("count"), py::arg("dtype"), py::arg("label"), py::arg("deadline"))
      .def(
          "gather",
          [](ShmGroup& group, std::uintptr_t own, std::size_t num_bytes, std::uintptr_t all, std::string_view label,
             double deadline) {
            const py::gil_scoped_release release;
            group.gather(reinterpret_cast<const void*>(own), num_bytes, reinterpret_cast<void*>(all), label, deadline);
          },
          py::arg("own"), py::arg("num_bytes"), py::arg("all"), py::arg("label"), py::arg("deadline"))
      .def("allocate", &heap_bytes, py::arg("num_bytes"))
      .def("fail",
           [](ShmGroup& group, const std::string& text) { group.fail(CommFault::kOther, text); }, py::arg("text"))
      .def("close", &ShmGroup::close, Release());
}

}  // namespace sage::python
