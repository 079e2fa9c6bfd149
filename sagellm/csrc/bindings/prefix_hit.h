// `_core.PrefixHit`, written against the C API: a lookup takes about as long as pybind11 takes to make one object.
#pragma once

#include "arguments.h"

namespace sage::python {

void bind_prefix_hit(py::module_& module);
// A new reference; null with an error set. A long path is taken out of `match`.
PyObject* make_hit(Match& match, std::size_t num_tokens, std::size_t block_size);

}  // namespace sage::python
