// Layout of a shared segment. All that two processes write is an atomic, or is published by one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "sagellm/shm_segment.h"

namespace sage {

inline constexpr std::uint64_t kShmMagic = 0x53414745'53484d02;  // its last byte is the version of the layout
inline constexpr std::size_t kShmPage = 4096, kShmLabel = 112;

// A waiter announces itself before it looks again, and a notifier publishes before it looks for waiters. So, with
// sequentially consistent operations, one of them sees the other. A waiter that was killed costs a needless system call.
struct ShmEvent {
  std::atomic<std::uint32_t> sequence, num_waiting;
};

enum class ShmState : std::uint32_t { kAbsent, kPresent, kClosed };

struct alignas(64) ShmRank {
  std::atomic<ShmState> state;
  std::int32_t pid;
  std::uint64_t start_time;  // of the process, since a pid may be given to another one
  alignas(64) std::atomic<std::uint64_t> num_meetings;
  std::atomic<std::uint64_t> num_passed;  // meetings that it has gone on from
  std::atomic<std::uint64_t> num_read;    // chunks of the staging that it needs no more
  char labels[2][kShmLabel];  // of meetings of either parity
};

// From one rank to another. Positions are bytes since the beginning.
struct alignas(64) ShmLane {
  std::atomic<std::uint64_t> head;  // written so far
  ShmEvent written;
  alignas(64) std::atomic<std::uint64_t> tail;  // read so far
  ShmEvent read;
};

// The first failure. `phase` is 0 while nothing has, 1 while somebody writes the rest, then 2.
struct ShmCause {
  std::atomic<std::uint32_t> phase;
  CommFault fault;
  char text[512];
};

struct alignas(64) ShmHeader {
  std::uint64_t magic, token;
  std::uint32_t world_size;
  ShmSizes sizes;
  alignas(64) ShmCause cause;
  alignas(64) ShmEvent meeting;  // of the ranks, when they join and at collectives
};

inline constexpr std::size_t kPieceAlign = 128;

// In front of the payload in a ring.
struct alignas(kPieceAlign) ShmMessage {
  std::uint64_t num_bytes;
  std::uint64_t offset;  // in the sender's heap, where the payload is not in the ring
  char label[kShmLabel];
};
inline constexpr std::uint64_t kInRing = ~std::uint64_t{0};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(ShmMessage) == kPieceAlign);

class ShmLayout {
 public:
  ShmLayout(std::uint8_t* data, std::uint32_t world_size, const ShmSizes& sizes)
      : data_(data), world_size_(world_size), sizes_(sizes) {}
  static std::size_t up(std::size_t num_bytes) { return (num_bytes + kShmPage - 1) / kShmPage * kShmPage; }

  ShmHeader& header() const { return *reinterpret_cast<ShmHeader*>(data_); }
  ShmRank& rank(std::size_t rank) const { return reinterpret_cast<ShmRank*>(data_ + up(sizeof(ShmHeader)))[rank]; }
  ShmLane& lane(std::size_t from, std::size_t to) const {
    return reinterpret_cast<ShmLane*>(data_ + lanes_at())[from * world_size_ + to];
  }
  std::uint8_t* ring(std::size_t from, std::size_t to) const {
    return data_ + rings_at() + (from * world_size_ + to) * sizes_.ring;
  }
  std::uint8_t* staging() const { return data_ + staging_at(); }
  std::uint8_t* heap(std::size_t rank) const { return data_ + heaps_at() + rank * sizes_.heap; }
  std::size_t num_bytes() const { return heaps_at() + world_size_ * sizes_.heap; }

 private:
  std::size_t lanes_at() const { return up(sizeof(ShmHeader)) + up(world_size_ * sizeof(ShmRank)); }
  std::size_t rings_at() const { return lanes_at() + up(world_size_ * world_size_ * sizeof(ShmLane)); }
  std::size_t staging_at() const { return rings_at() + world_size_ * world_size_ * sizes_.ring; }
  std::size_t heaps_at() const { return staging_at() + world_size_ * 2 * sizes_.staging; }

  std::uint8_t* data_;
  std::size_t world_size_;
  ShmSizes sizes_;
};

}  // namespace sage
