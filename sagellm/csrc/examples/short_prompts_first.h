#pragma once

#include "sage_hooks.h"

// Valid as long as the process, as an installed table has to be.
const SageHooks* short_prompts_first();
