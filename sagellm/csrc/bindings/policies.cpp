// Policies, the flat cache and the replay of prefixes.

#include <cmath>
#include <cstring>

#include "arguments.h"
#include "policy_arguments.h"
#include "sagellm/object_cache.h"
#include "sagellm/policy.h"
#include "sagellm/prefix_replay.h"

namespace sage::python {

namespace {

template <typename T>
py::array_t<T> moved_array(std::vector<T>&& values) {
  auto* own = new std::vector<T>(std::move(values));
  const py::capsule owner(own, [](void* memory) { delete static_cast<std::vector<T>*>(memory); });
  return py::array_t<T>(static_cast<py::ssize_t>(own->size()), own->data(), owner);
}

struct PrefixReplayArrays {
  py::array_t<std::int32_t> hit_blocks;
  py::array_t<std::int64_t> retries, retry_hit_blocks, retry_blocks;
  std::int64_t num_evicted, num_evicted_soon, num_preempted, num_oversized;
};

void check_length(const char* what, std::size_t got, std::size_t wanted) {
  if (got == wanted) return;
  throw PolicyError(std::string(what) + " has " + std::to_string(got) + " values for " + std::to_string(wanted) +
                    " requests; give one for each.");
}

PrefixReplayArrays run_prefix(const std::string& name, std::int64_t capacity, py::handle keys, py::handle offsets,
                              std::int64_t running, const py::object& output_blocks, const py::object& times_s,
                              const py::object& soon, const py::object& options, double block_bytes) {
  const KeyView key_view(keys, "keys"), offset_view(offsets, "offsets");
  if (offset_view.size() == 0) throw PolicyError("offsets are empty; they begin with 0 and have one more than requests.");
  PrefixTrace trace;
  trace.keys = key_view.data();
  trace.num_keys = key_view.size();
  // Copies, since the caller's thread may go on and write to its arrays.
  const auto* const first_offset = reinterpret_cast<const std::int64_t*>(offset_view.data());
  const std::vector<std::int64_t> own_offsets(first_offset, first_offset + offset_view.size());
  trace.offsets = own_offsets.data();
  trace.num_requests = offset_view.size() - 1;
  std::vector<std::int32_t> own_outputs;
  if (!output_blocks.is_none()) {
    const Int32View outputs(output_blocks, "output_blocks");
    check_length("output_blocks", outputs.size(), trace.num_requests);
    own_outputs.assign(outputs.data(), outputs.data() + outputs.size());
    for (std::size_t i = 0; i < own_outputs.size(); ++i) {
      if (own_outputs[i] < 0) throw PolicyError("output_blocks of request " + std::to_string(i) + " are negative.");
    }
    trace.output_blocks = own_outputs.data();
  }
  if (!times_s.is_none()) check_length("times_s", py::len(times_s), trace.num_requests);
  PrefixReplayOptions how;
  how.running = running;
  how.block_bytes = block_bytes;
  if (!soon.is_none()) how.soon = soon.cast<std::int64_t>();
  if (how.soon < 0 && !soon.is_none()) throw PolicyError("soon " + std::to_string(how.soon) + "; allowed are 0 and more.");
  const PolicyOptions parsed = parse_options(options);
  PrefixReplayResult result;
  {
    const py::gil_scoped_release release;
    result = replay_prefix(name, capacity, trace, how, parsed);
  }
  return PrefixReplayArrays{moved_array(std::move(result.hit_blocks)),       moved_array(std::move(result.retries)),
                            moved_array(std::move(result.retry_hit_blocks)), moved_array(std::move(result.retry_blocks)),
                            result.num_evicted,                              result.num_evicted_soon,
                            result.num_preempted,                            result.num_oversized};
}

py::array_t<bool> run_objects(const std::string& name, std::int64_t capacity, py::handle keys, const py::object& options) {
  const KeyView view(keys, "keys");
  PolicyOptions parsed = parse_options(options);
  if (name == "belady" && parsed.future == nullptr) parsed.future = foreseen({view.data(), view.data() + view.size()});
  const auto cache = make_object_cache(name, capacity, parsed);
  py::array_t<bool> hits(static_cast<py::ssize_t>(view.size()));
  auto* const out = reinterpret_cast<std::uint8_t*>(hits.mutable_data());
  const py::gil_scoped_release release;
  cache->access_many(view.data(), view.size(), out);
  return hits;
}

// False, with an error set: no integer, or one that takes more than 64 bits.
bool is_modulo_key(const py::handle& argument, std::uint64_t& key) {
  const py::object number = py::reinterpret_steal<py::object>(PyNumber_Index(argument.ptr()));
  if (!number) return false;
  key = PyLong_AsUnsignedLongLong(number.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    key = static_cast<std::uint64_t>(PyLong_AsLongLong(number.ptr()));
  }
  return PyErr_Occurred() == nullptr;
}

}  // namespace

KeyView::KeyView(py::handle argument, const char* what) {
  const auto refuse = [&](const std::string& got) {
    throw PolicyError(std::string(what) + " are " + got + "; they must be a one-dimensional array or list of integers. " +
                      "Contiguous int64 and uint64 are used without a copy.");
  };
  try {
    array_ = py::array::ensure(argument, py::array::c_style);
    if (array_ && array_.size() == 0 && array_.ndim() == 1) array_ = array_.attr("astype")("uint64");
    char kind = array_ ? array_.dtype().kind() : '?';
    if ((kind == 'f' || kind == 'O') && !py::isinstance<py::array>(argument)) {
      // Integers that no type of numpy's holds all of, or so it decided.
      std::vector<std::uint64_t> keys;
      for (const py::handle& key : argument) {
        if (!is_modulo_key(key, keys.emplace_back())) break;
      }
      if (keys.size() == static_cast<std::size_t>(py::len(argument)) && PyErr_Occurred() == nullptr) {
        array_ = py::array_t<std::uint64_t>(static_cast<py::ssize_t>(keys.size()), keys.data());
        kind = 'u';
      }
      PyErr_Clear();
    }
    if (kind != 'i' && kind != 'u') refuse(array_ ? "of type " + py::str(array_.dtype()).cast<std::string>() : "no array");
    if (array_.ndim() != 1) refuse("of " + std::to_string(array_.ndim()) + " dimensions");
    const char order = array_.dtype().byteorder();
    if (array_.itemsize() != 8 || (order != '=' && order != '|')) {
      array_ = array_.attr("astype")(kind == 'i' ? "int64" : "uint64");
    }
  } catch (const py::error_already_set&) {
    refuse("no array");
  }
}

PolicyOptions parse_options(const py::object& options) {
  PolicyOptions parsed;
  if (options.is_none()) return parsed;
  if (!py::isinstance<py::dict>(options)) throw PolicyError("options must be a dict of names and numbers.");
  for (const auto& [option, value] : options.cast<py::dict>()) {
    const auto name = py::str(option).cast<std::string>();
    if (name == "future") {
      const KeyView keys(value, "future");
      parsed.future = foreseen({keys.data(), keys.data() + keys.size()});
    } else if (value.is_none()) {
      parsed.numbers[name] = std::nan("");
    } else {
      const double number = py::isinstance<py::bool_>(value) ? std::nan("") : PyFloat_AsDouble(value.ptr());
      if (PyErr_Occurred() != nullptr || !std::isfinite(number)) {
        PyErr_Clear();
        throw PolicyError("option " + name + " is " + py::repr(value).cast<std::string>() + "; it must be a number, and finite.");
      }
      parsed.numbers[name] = number;
    }
  }
  return parsed;
}

void bind_policies(py::module_& module) {
  module.def("policy_names", &policy_names);
  module.def("replay_objects", &run_objects, py::arg("name"), py::arg("capacity"), py::arg("keys"),
             py::arg("options") = py::none());
  py::class_<PrefixReplayArrays>(module, "PrefixReplayResult")
      .def_readonly("hit_blocks", &PrefixReplayArrays::hit_blocks)
      .def_readonly("retries", &PrefixReplayArrays::retries)
      .def_readonly("retry_hit_blocks", &PrefixReplayArrays::retry_hit_blocks)
      .def_readonly("retry_blocks", &PrefixReplayArrays::retry_blocks)
      .def_readonly("num_evicted", &PrefixReplayArrays::num_evicted)
      .def_readonly("num_evicted_soon", &PrefixReplayArrays::num_evicted_soon)
      .def_readonly("num_preempted", &PrefixReplayArrays::num_preempted)
      .def_readonly("num_oversized", &PrefixReplayArrays::num_oversized);
  module.def("replay_prefix", &run_prefix, py::arg("name"), py::arg("capacity"), py::arg("keys"), py::arg("offsets"),
             py::kw_only(), py::arg("running") = 1, py::arg("output_blocks") = py::none(), py::arg("times_s") = py::none(),
             py::arg("soon") = py::none(), py::arg("options") = py::none(), py::arg("block_bytes") = 1.0);
  bind_object_cache(module);
  bind_native_policy(module);
}

}  // namespace sage::python
