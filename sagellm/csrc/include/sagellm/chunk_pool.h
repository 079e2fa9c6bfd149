// Memory for the contents of nodes. Most of them are a few blocks long and come and go one by one at random: malloc keeps a
// header for each and merges freed neighbours, which costs several cache misses. Here chunks of one size share a slab,
// without headers, and freeing one touches the chunk and what is kept of its slab; that of 64 slabs is one page, since another
// page costs about as much as another line. Large chunks are malloc's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sagellm/region.h"

namespace sage {

class ChunkPool {
 public:
  ChunkPool() = default;
  ~ChunkPool();
  ChunkPool(const ChunkPool&) = delete;
  ChunkPool& operator=(const ChunkPool&) = delete;

  // Memory aligned to 8 bytes. Throws std::bad_alloc.
  std::byte* allocate(std::size_t bytes);
  // `bytes` as given to `allocate`.
  void free(std::byte* chunk, std::size_t bytes) noexcept;
  // Asks for what `free` will touch besides the chunk.
  void expect_free(const std::byte* chunk, std::size_t bytes) const noexcept;
  // Gives back every slab. Large chunks must have been freed.
  void clear() noexcept;
  // Bytes that are taken from the system: slabs as far as they were ever used, and large chunks with malloc's share.
  std::size_t memory_bytes() const noexcept { return slab_bytes_ + large_bytes_; }

 private:
  static constexpr std::size_t kSlabBits = 15, kSlabBytes = std::size_t{1} << kSlabBits;
  static constexpr std::size_t kArenaBytes = Region::kHugePage;  // and aligned to it
  static constexpr std::size_t kHugeAfter = std::size_t{16} << 20;  // where the last large page, half used, weighs little
  static constexpr std::size_t kMaxSmall = 2048;
  static constexpr std::uint32_t kNoChunk = 0xffffffffu;

  // An arena begins with those of all its slabs, which take the room from its first slab.
  struct alignas(64) Slab {
    Slab *previous, *next;  // among those of its size with room; `next` also links empty slabs
    std::uint32_t chunk_bytes, num_used;
    std::uint32_t free_chunk;  // offset of the first freed chunk; each holds the offset of the next
    std::uint32_t fresh;       // offset from where on nothing was handed out yet
    std::uint32_t touched;     // the highest `fresh` has been since the slab was taken from the system
  };
  static constexpr std::size_t kNumSlabs = kArenaBytes / kSlabBytes;

  static std::byte* arena_of(const void* place);
  static Slab* slab_of(const std::byte* chunk);
  static std::byte* start_of(const Slab* slab);
  static std::uint32_t first_chunk(const Slab* slab);

  static std::size_t rounded(std::size_t bytes) { return (bytes + 7) & ~std::size_t{7}; }
  Slab* slab_with_room(std::size_t bytes);
  void link(Slab* slab) noexcept;
  void unlink(Slab* slab) noexcept;

  std::vector<Region> arenas_;
  Slab* next_slab_ = nullptr;  // of the last arena, never used so far
  std::size_t num_fresh_slabs_ = 0;
  Slab* empty_ = nullptr;
  Slab* with_room_[kMaxSmall / 8 + 1] = {};
  std::size_t slab_bytes_ = 0, large_bytes_ = 0;
};

}  // namespace sage
