#include "sagellm/chunk_pool.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "prefetch.h"

namespace sage {

namespace {

// Bytes that an allocation takes from the heap; glibc rounds up and adds a word of its own.
std::size_t heap_bytes(void* data, [[maybe_unused]] std::size_t asked) {
#ifdef __GLIBC__
  return malloc_usable_size(data) + sizeof(std::size_t);
#else
  return asked + 2 * sizeof(std::size_t);
#endif
}

std::uint32_t& next_free(std::byte* slab, std::uint32_t chunk) { return *reinterpret_cast<std::uint32_t*>(slab + chunk); }

}  // namespace

ChunkPool::~ChunkPool() { clear(); }

void ChunkPool::clear() noexcept {
  arenas_.clear();
  empty_ = nullptr;
  std::fill(std::begin(with_room_), std::end(with_room_), nullptr);
  slab_bytes_ = num_fresh_slabs_ = 0;
}

std::byte* ChunkPool::arena_of(const void* place) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(place) & ~(kArenaBytes - 1));
}

ChunkPool::Slab* ChunkPool::slab_of(const std::byte* chunk) {
  std::byte* const arena = arena_of(chunk);
  return reinterpret_cast<Slab*>(arena) + (static_cast<std::size_t>(chunk - arena) >> kSlabBits);
}

std::byte* ChunkPool::start_of(const Slab* slab) {
  std::byte* const arena = arena_of(slab);
  return arena + (static_cast<std::size_t>(slab - reinterpret_cast<Slab*>(arena)) << kSlabBits);
}

std::uint32_t ChunkPool::first_chunk(const Slab* slab) {
  return start_of(slab) == arena_of(slab) ? static_cast<std::uint32_t>(kNumSlabs * sizeof(Slab)) : 0;
}

void ChunkPool::link(Slab* slab) noexcept {
  Slab*& head = with_room_[slab->chunk_bytes / 8];
  slab->previous = nullptr;
  slab->next = head;
  if (head != nullptr) head->previous = slab;
  head = slab;
}

void ChunkPool::unlink(Slab* slab) noexcept {
  (slab->previous == nullptr ? with_room_[slab->chunk_bytes / 8] : slab->previous->next) = slab->next;
  if (slab->next != nullptr) slab->next->previous = slab->previous;
}

ChunkPool::Slab* ChunkPool::slab_with_room(std::size_t bytes) {
  if (Slab* const found = with_room_[bytes / 8]) return found;
  if (empty_ == nullptr && num_fresh_slabs_ == 0) {
    // Each slab is touched when it is taken, not before.
    arenas_.emplace_back(kArenaBytes, slab_bytes_ >= kHugeAfter);
    next_slab_ = arenas_.back().as<Slab>();
    num_fresh_slabs_ = kNumSlabs;
  }
  Slab* slab = empty_;
  if (slab != nullptr) {
    empty_ = slab->next;
  } else {
    slab = new (next_slab_++) Slab{};
    --num_fresh_slabs_;
    slab->touched = first_chunk(slab);
    slab_bytes_ += sizeof(Slab);
  }
  slab->chunk_bytes = static_cast<std::uint32_t>(bytes);
  slab->num_used = 0;
  slab->free_chunk = kNoChunk;
  slab->fresh = first_chunk(slab);
  link(slab);
  return slab;
}

std::byte* ChunkPool::allocate(std::size_t asked) {
  const std::size_t bytes = rounded(asked);
  if (bytes > kMaxSmall) {
    auto* const data = static_cast<std::byte*>(std::malloc(bytes));
    if (data == nullptr) throw std::bad_alloc();
    large_bytes_ += heap_bytes(data, bytes);
    return data;
  }
  Slab* const slab = slab_with_room(bytes);
  std::byte* const start = start_of(slab);
  std::uint32_t chunk = slab->free_chunk;
  if (chunk != kNoChunk) {
    slab->free_chunk = next_free(start, chunk);
  } else {
    chunk = slab->fresh;
    slab->fresh += slab->chunk_bytes;
    if (slab->fresh > slab->touched) {
      slab_bytes_ += slab->fresh - slab->touched;
      slab->touched = slab->fresh;
    }
  }
  ++slab->num_used;
  if (slab->free_chunk == kNoChunk && slab->fresh + slab->chunk_bytes > kSlabBytes) unlink(slab);
  return start + chunk;
}

void ChunkPool::expect_free(const std::byte* data, std::size_t asked) const noexcept {
  if (rounded(asked) <= kMaxSmall) prefetch(slab_of(data));
}

void ChunkPool::free(std::byte* data, std::size_t asked) noexcept {
  const std::size_t bytes = rounded(asked);
  if (bytes > kMaxSmall) {
    large_bytes_ -= heap_bytes(data, bytes);
    std::free(data);
    return;
  }
  Slab* const slab = slab_of(data);
  std::byte* const start = start_of(slab);
  const bool was_full = slab->free_chunk == kNoChunk && slab->fresh + slab->chunk_bytes > kSlabBytes;
  const auto chunk = static_cast<std::uint32_t>(data - start);
  next_free(start, chunk) = slab->free_chunk;
  slab->free_chunk = chunk;
  if (was_full) link(slab);
  if (--slab->num_used != 0) return;
  unlink(slab);
  slab->next = empty_;
  empty_ = slab;
}

}  // namespace sage
