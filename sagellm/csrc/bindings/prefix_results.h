#pragma once

#include "arguments.h"

namespace sage::python {

struct PyRemoval {
  Removal removal;
};

struct PyEntry {
  Entry entry;
  std::size_t token_length = 0;
};

}  // namespace sage::python
