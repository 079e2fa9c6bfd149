// Threads that compute the stages of a step together and lose little when others need the processor.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sage {

// Stages that follow each other; a stage begins when all chunks of the one before it are committed.
//
// `compute` writes to `local` alone, so several threads may compute one chunk; exactly one of them calls `commit`. A
// thread that was preempted may compute a chunk of a stage that is long over: its result is dropped, but what it reads
// must still be mapped. So buffers that chunks read live as long as the work, and the work lives until no thread is in
// it.
class Work {
 public:
  virtual ~Work() = default;
  virtual int num_stages() const = 0;
  virtual int num_chunks(int stage) const = 0;
  virtual std::size_t local_bytes() const = 0;
  virtual void compute(int stage, int chunk, char* local) const = 0;
  virtual void commit(int stage, int chunk, const char* local) = 0;
};

// The calling thread and `threads - 1` others, which sleep between two runs.
//
// There is no barrier that waits for a certain thread. A thread that finds no chunk left computes a chunk again that
// another one has begun and not committed in time, as when that one lost its time slice.
class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs all stages. One caller at a time.
  void run(const std::shared_ptr<Work>& work);

  // Number of chunks that were computed again, since the start.
  std::uint64_t repeated() const { return repeated_.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) Place {             // of a thread
    std::atomic<std::uint64_t> step{0};  // that it is in; 0: none
    std::vector<char> local;
    std::uint64_t chunk_ns = 0;
  };

  void serve(Place& place);
  void take_part(Work& work, std::uint64_t step, Place& place);
  void execute(Work& work, std::uint64_t ticket, int chunk, int num_chunks, Place& place);
  void wait_or_repeat(Work& work, std::uint64_t ticket, int num_chunks, Place& place);
  void wait_for_leavers(std::uint64_t oldest);
  void reserve(const Work& work);

  // Step number, stage and next chunk of the stage in one word.
  static constexpr int kChunkBits = 20, kStageBits = 12;
  static constexpr std::uint64_t stage_id(std::uint64_t ticket) { return ticket >> kChunkBits; }
  static constexpr std::uint64_t step_of(std::uint64_t ticket) { return ticket >> (kChunkBits + kStageBits); }
  static constexpr int stage_of(std::uint64_t ticket) {
    return static_cast<int>(stage_id(ticket) & ((1U << kStageBits) - 1));
  }
  static constexpr int chunk_of(std::uint64_t ticket) { return static_cast<int>(ticket & ((1U << kChunkBits) - 1)); }

  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  alignas(64) std::atomic<std::uint32_t> done_{0};  // committed chunks of the stage
  alignas(64) std::atomic<std::uint64_t> repeated_{0};
  std::unique_ptr<std::atomic<std::uint64_t>[]> committed_;  // per chunk: the last stage id that committed it
  std::size_t num_committed_ = 0;
  std::shared_ptr<Work> works_[2];   // of the last two steps, by parity
  std::unique_ptr<Place[]> places_;  // the caller's first
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace sage
