// The table of the library.
#pragma once

#include "sage_hooks.h"

namespace sage::host {

const SageHooks* native_table();
// With an advisor that answers at random, another time otherwise.
const SageHooks* native_random_table();

}  // namespace sage::host
