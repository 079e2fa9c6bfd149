// The extension `sagellm._core`.

#include "arguments.h"
#include "prefix_hit.h"
#include "sagellm/prefix_replay.h"
#include "sagellm/shm_segment.h"

namespace sage::python {

namespace {

// The classes of sagellm/core/errors.py; they live as long as the process.
PyObject *argument_error, *lock_error, *reuse_error, *policy_error, *capacity_error;
PyObject *comm_error, *comm_timeout_error, *comm_peer_error;

void register_errors() {
  const auto errors = py::module_::import("sagellm.core.errors");
  argument_error = py::object(errors.attr("PrefixIndexError")).release().ptr();
  lock_error = py::object(errors.attr("LockError")).release().ptr();
  reuse_error = py::object(errors.attr("BlockReuseError")).release().ptr();
  policy_error = py::object(errors.attr("PolicyError")).release().ptr();
  capacity_error = py::object(errors.attr("CapacityError")).release().ptr();
  comm_error = py::object(errors.attr("CommError")).release().ptr();
  comm_timeout_error = py::object(errors.attr("CommTimeoutError")).release().ptr();
  comm_peer_error = py::object(errors.attr("CommPeerError")).release().ptr();
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& error) {
      set_error(error);
    } catch (const CapacityError& error) {
      PyErr_SetString(capacity_error, error.what());
    } catch (const PolicyError& error) {
      set_error(error);
    } catch (const CommError& error) {
      PyErr_SetString(error.fault() == CommFault::kTimeout ? comm_timeout_error
                      : error.fault() == CommFault::kPeer  ? comm_peer_error
                                                           : comm_error,
                      error.what());
    }
  });
}

}  // namespace

void set_error(const Error& error) {
  PyObject* const kind = error.kind() == ErrorKind::kLock         ? lock_error
                         : error.kind() == ErrorKind::kBlockReuse ? reuse_error
                                                                  : argument_error;
  PyErr_SetString(kind, error.what());
}

void set_error(const PolicyError& error) { PyErr_SetString(policy_error, error.what()); }

}  // namespace sage::python

PYBIND11_MODULE(_core, module) {
  module.doc() = "The native half of sagellm: what is hot, with no torch inside. C++ users: sagellm/csrc/include.";
  sage::python::register_errors();
  sage::python::bind_prefix_hit(module);
  sage::python::bind_prefix_results(module);
  sage::python::bind_prefix_index(module);
  sage::python::bind_indexed_pool(module);
  sage::python::bind_turbomind(module);
  sage::python::bind_policies(module);
  sage::python::bind_copy_pieces(module);
  sage::python::bind_speculative(module);
  sage::python::bind_shm(module);
  sage::python::bind_exchange(module);
  sage::python::bind_decoder(module);
}
