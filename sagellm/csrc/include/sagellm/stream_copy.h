// Copying memory that nobody will read soon, as that of a block which moves to a slower tier.
#pragma once

#include <cstddef>

namespace sage {

// As `memcpy`, past the processor's caches where the memory is large: a line of the target is not read before it is
// overwritten, which leaves two passes over the bus in place of three, and what others have in the caches stays there.
void stream_copy(void* target, const void* source, std::size_t num_bytes) noexcept;

}  // namespace sage
