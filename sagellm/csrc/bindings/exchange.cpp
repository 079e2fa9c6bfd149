// `_core.Exchange` and its kinds: over shared memory, and by functions of Python.

#include "sagellm/shm_exchange.h"

#include <deque>

#include "arguments.h"

namespace sage::python {

namespace {

// Calls functions of Python with addresses. A step runs without the interpreter's lock, on any thread of its team.
class CallbackExchange final : public Exchange {
 public:
  CallbackExchange(py::function add_up, py::function begin_sum, py::function gather)
      : add_up_(std::move(add_up)), begin_sum_(std::move(begin_sum)), gather_(std::move(gather)) {}

  ~CallbackExchange() override {
    const py::gil_scoped_acquire lock;
    begun_.clear();
  }

  void add_up(float* numbers, std::size_t count) override {
    const py::gil_scoped_acquire lock;
    add_up_(reinterpret_cast<std::uintptr_t>(numbers), count);
  }

  // `begin_sum` returns what waits for the end.
  void begin_sum(float* numbers, std::size_t count) override {
    const py::gil_scoped_acquire lock;
    begun_.push_back(begin_sum_(reinterpret_cast<std::uintptr_t>(numbers), count));
  }

  void end_sum() override {
    const py::gil_scoped_acquire lock;
    const py::object wait = std::move(begun_.front());
    begun_.pop_front();
    wait();
  }

  void gather(float* numbers, std::size_t rows, std::size_t columns, std::size_t part) override {
    const py::gil_scoped_acquire lock;
    gather_(reinterpret_cast<std::uintptr_t>(numbers), rows, columns, part);
  }

 private:
  py::function add_up_, begin_sum_, gather_;
  std::deque<py::object> begun_;
};

py::dict costs_of(const ShmExchange& exchange, ShmExchange::Kind kind) {
  const auto costs = exchange.costs(kind);
  py::dict found;
  found["count"] = costs.count;
  found["bytes"] = costs.bytes;
  found["ns"] = costs.ns;
  found["exposed_ns"] = costs.exposed_ns;
  found["latency_counts"] = costs.latencies;
  return found;
}

}  // namespace

void bind_exchange(py::module_& module) {
  py::class_<Exchange>(module, "Exchange")
      .def(
          "gather",
          [](Exchange& exchange, std::uintptr_t numbers, std::size_t rows, std::size_t columns, std::size_t part) {
            const py::gil_scoped_release release;
            exchange.gather(reinterpret_cast<float*>(numbers), rows, columns, part);
          },
          py::arg("numbers"), py::arg("rows"), py::arg("columns"), py::arg("part"));
  py::class_<CallbackExchange, Exchange>(module, "CallbackExchange")
      .def(py::init<py::function, py::function, py::function>(), py::arg("add_up"), py::arg("begin_sum"), py::arg("gather"));
  py::class_<ShmExchange, Exchange>(module, "ShmExchange")
      .def(py::init<std::shared_ptr<ShmGroup>, double, std::vector<std::uint64_t>, std::uint64_t>(), py::arg("group"),
           py::arg("timeout_s"), py::arg("bounds_ns"), py::arg("delay_ns") = 0)
      .def("sums", [](const ShmExchange& exchange) { return costs_of(exchange, ShmExchange::kAddUp); })
      .def("gatherings", [](const ShmExchange& exchange) { return costs_of(exchange, ShmExchange::kGather); });
}

}  // namespace sage::python
