// Which edges of the library an input runs through, for the driver that stands in for libFuzzer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sage::fuzz {

// Whether the library was compiled with -fsanitize-coverage=trace-pc at all.
bool has_coverage();

// Forgets what was run through since the last call.
void start_coverage();

// Edges run through since `start_coverage`, each with the order of magnitude of its count, as one number.
std::vector<std::uint32_t> covered();

}  // namespace sage::fuzz
