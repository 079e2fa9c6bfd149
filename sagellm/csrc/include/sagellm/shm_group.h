// One rank of a group of processes that share a segment: messages, and the meetings that collectives are made of.
//
// Between each ordered pair of ranks lies a ring with one writer and one reader, so a message is copied out while it is still
// copied in. A message that lies in the sender's heap is not copied in at all: its place is told, the reader copies it from
// there, and the sender waits for that. Waiting is a short spin, then a futex, and at least every 50 ms a look at the deadline
// and at whether those that are waited for still live. The first failure is written down in the segment, for all ranks to see.
//
// Threads: at most one at a time sends to a given rank, one receives from a given rank, one meets; these go on at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sagellm/shm_heap.h"
#include "sagellm/shm_segment.h"

namespace sage {

struct ShmEvent;
struct ShmLane;
struct ShmMessage;
class ShmLayout;

struct ShmOptions {
  std::size_t chunk_bytes = std::size_t{128} << 10;  // of what is copied before it is published; at most half a ring
  double spin_s = 50e-6;
};

enum class ShmNumber { kFloat32, kBFloat16 };

// Deadlines are seconds of `std::chrono::steady_clock`. All that waits throws CommError, and breaks the group.
class ShmGroup {
 public:
  ShmGroup(std::shared_ptr<ShmSegment> segment, std::uint32_t rank, const ShmOptions& options);
  ~ShmGroup();

  // Threads that wait call it now and then. It may throw.
  void on_idle(std::function<void()> call) { idle_ = std::move(call); }

  void join(double deadline);
  // `label` says what the message is; sender and receiver must say the same. Returns what `wait_read` is to be given before
  // the data may be written, 0 if that may be at once; further messages may follow before.
  std::uint64_t post(std::uint32_t to, const void* data, std::size_t num_bytes, std::string_view label, double deadline);
  // Whether the data are read where they lie, and `post` waits for nothing to say so.
  bool can_post_at_once(std::uint32_t to, const void* data, std::size_t num_bytes) const noexcept;
  void wait_read(std::uint32_t to, std::uint64_t position, double deadline);
  // Both.
  void send(std::uint32_t to, const void* data, std::size_t num_bytes, std::string_view label, double deadline);
  void recv(std::uint32_t from, void* data, std::size_t num_bytes, std::string_view label, double deadline);
  // Waits until all ranks have come, with the same label. All then see what each rank has written to shared memory before.
  void meet(std::string_view label, double deadline);
  // uint8 [world_size, 2, sizes().staging]
  std::uint8_t* staging() const noexcept;

  // Collectives over the staging, in chunks. In each a rank writes its part, meets the others and reads theirs. The two halves of
  // the staging take turns; a rank writes to a half when all have read what was there. One rank calls these one at a time, and
  // all in the same order.

  // The half for the next chunk. This rank has read all of its earlier chunks.
  std::size_t next_half(double deadline);
  // numbers[i] becomes the sum over the ranks, in their order and in float32: the same bits for all.
  void add_up(void* numbers, std::size_t count, ShmNumber type, std::string_view label, double deadline);
  // The same in two calls, between which the caller does something else. At most two sums are under way at a time, and no other
  // collective; they end in the order in which they begin. `numbers` are read now, and written at the end.
  std::size_t most_to_begin(ShmNumber type) const noexcept;  // numbers
  void begin_sum(void* numbers, std::size_t count, ShmNumber type, std::string_view label, double deadline);
  void end_sum(double deadline);
  // `all` [ranks][num_bytes] gets what each rank gives.
  void gather(const void* own, std::size_t num_bytes, void* all, std::string_view label, double deadline);
  // Each rank has columns [rank * part, rank * part + part) of `numbers` [rows][columns], and gets the others.
  void gather_columns(float* numbers, std::size_t rows, std::size_t columns, std::size_t part, std::string_view label,
                      double deadline);

  ShmHeap& heap() noexcept { return *heap_; }
  std::uint8_t* heap_data() const noexcept;
  const std::shared_ptr<ShmSegment>& segment() const noexcept { return segment_; }

  // Break the group: the first one to do so is believed.
  void fail(CommFault fault, const std::string& text) noexcept;
  // Leaves the group. Threads that wait here, and ranks that wait for this one, fail.
  void close() noexcept;

 private:
  // Until `ready()`. `missing(rank)` tells who is waited for, `what` the operation.
  template <typename Ready, typename Missing>
  void wait(ShmEvent& event, double deadline, std::string_view what, Ready ready, Missing missing);
  template <typename Ready>
  bool spin(Ready ready) const;
  void check() const;
  [[noreturn]] void fail_and_throw(CommFault fault, const std::string& text);
  void watch(std::uint32_t rank);
  bool has_gone(std::uint32_t rank) const;
  void wake_all() noexcept;
  bool is_read_in_place(const void* data, std::size_t num_bytes) const noexcept;
  std::uint8_t* staged(std::size_t rank, std::size_t half) const noexcept {
    return staging() + (2 * rank + half) * sizes_.staging;
  }
  std::uint64_t arrive(std::string_view label, double deadline);
  void wait_for(std::uint64_t meeting, std::string_view label, double deadline);
  template <typename Number>
  void add(Number* numbers, std::size_t half, std::size_t first, std::size_t end) const;
  template <typename Number>
  void add_up_in_shares(Number* numbers, std::size_t count, std::string_view label, double deadline);
  void put(std::uint8_t* ring, std::uint64_t at, const void* data, std::size_t num_bytes) const;
  void take(const std::uint8_t* ring, std::uint64_t at, void* data, std::size_t num_bytes) const;
  void take_payload(std::uint32_t from, ShmLane& lane, void* data, std::size_t num_bytes, double deadline);

  std::shared_ptr<ShmSegment> segment_;
  const std::unique_ptr<ShmLayout> layout_;
  const std::uint32_t rank_, world_size_;
  const ShmSizes sizes_;
  ShmOptions options_;
  std::shared_ptr<ShmHeap> heap_;
  std::function<void()> idle_;
  std::vector<int> pidfds_;
  struct Begun {
    std::uint64_t chunk, meeting;
    void* numbers;
    std::size_t count;
    ShmNumber type;
    std::string label;
  };
  std::deque<Begun> begun_;
  std::uint64_t num_meetings_ = 0, num_chunks_ = 0;
  std::atomic<bool> has_joined_{false}, is_closed_{false};
};

}  // namespace sage
