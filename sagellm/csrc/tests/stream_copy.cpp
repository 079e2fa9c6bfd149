// Copies past the caches: every byte of the target and none beside it, from and to any place.

#include "sagellm/stream_copy.h"

#include <cstdint>
#include <vector>

#include "expect.h"

namespace {

void copies_what_it_is_given() {
  for (const std::size_t num_bytes : {0u, 1u, 100u, (128u << 10) - 1, 128u << 10, (128u << 10) + 1, (1u << 20) + 63}) {
    for (const std::size_t shift : {0u, 1u, 16u, 63u}) {
      // Of just this size, so that a sanitizer sees a read or a write beyond either end.
      std::vector<std::uint8_t> source(shift + num_bytes), target(shift + num_bytes, 7);
      for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::uint8_t>(i * 31 + num_bytes);
      sage::stream_copy(target.data() + shift, source.data() + shift, num_bytes);
      for (std::size_t i = 0; i < target.size(); ++i) EXPECT(target[i] == (i < shift ? 7 : source[i]));
    }
  }
}

}  // namespace

int main() {
  copies_what_it_is_given();
  std::puts("stream_copy: passed");
}
