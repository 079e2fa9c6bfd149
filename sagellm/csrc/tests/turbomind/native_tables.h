// The table of the library.
#pragma once

#include "scenarios.h"

namespace sage::host {

Table native_table();
// With an advisor that answers at random, another time otherwise.
Table native_random_table();

}  // namespace sage::host
