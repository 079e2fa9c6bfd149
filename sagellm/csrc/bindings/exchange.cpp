// `_core.Exchange` and its kinds: over shared memory, and by functions of Python.

#include "sagellm/shm_exchange.h"

#include "arguments.h"

namespace sage::python {

namespace {

// Calls functions of Python with addresses. A step runs without the interpreter's lock, on any thread of its team.
class CallbackExchange final : public Exchange {
 public:
  CallbackExchange(py::function add_up, py::function gather) : add_up_(std::move(add_up)), gather_(std::move(gather)) {}

  void add_up(float* numbers, std::size_t count) override {
    const py::gil_scoped_acquire lock;
    add_up_(reinterpret_cast<std::uintptr_t>(numbers), count);
  }

  void gather(const float* own, std::size_t count, float* all) override {
    const py::gil_scoped_acquire lock;
    gather_(reinterpret_cast<std::uintptr_t>(own), count, reinterpret_cast<std::uintptr_t>(all));
  }

 private:
  py::function add_up_, gather_;
};

py::dict costs_of(const ShmExchange& exchange, ShmExchange::Kind kind) {
  const auto costs = exchange.costs(kind);
  py::dict found;
  found["count"] = costs.count;
  found["bytes"] = costs.bytes;
  found["ns"] = costs.ns;
  found["latency_counts"] = costs.latencies;
  return found;
}

}  // namespace

void bind_exchange(py::module_& module) {
  py::class_<Exchange>(module, "Exchange")
      .def(
          "gather",
          [](Exchange& exchange, std::uintptr_t own, std::size_t count, std::uintptr_t all) {
            const py::gil_scoped_release release;
            exchange.gather(reinterpret_cast<const float*>(own), count, reinterpret_cast<float*>(all));
          },
          py::arg("own"), py::arg("count"), py::arg("all"));
  py::class_<CallbackExchange, Exchange>(module, "CallbackExchange")
      .def(py::init<py::function, py::function>(), py::arg("add_up"), py::arg("gather"));
  py::class_<ShmExchange, Exchange>(module, "ShmExchange")
      .def(py::init<std::shared_ptr<ShmGroup>, double, std::vector<std::uint64_t>>(), py::arg("group"),
           py::arg("timeout_s"), py::arg("bounds_ns"))
      .def("sums", [](const ShmExchange& exchange) { return costs_of(exchange, ShmExchange::kAddUp); })
      .def("gatherings", [](const ShmExchange& exchange) { return costs_of(exchange, ShmExchange::kGather); });
}

}  // namespace sage::python
