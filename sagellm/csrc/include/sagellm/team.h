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
// must still be mapped. `Team::run` returns when no thread computes, so what chunks read may be freed then. The work
// itself lives until no thread is in it.
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

  // Runs all stages. One caller at a time. No thread reads what the work points to once this returns.
  void run(const std::shared_ptr<Work>& work);

  // Number of chunks that were computed again, since the start.
  std::uint64_t repeated() const { return repeated_.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) Place {             // of a thread
    std::atomic<std::uint64_t> step{0};  // that it is in; 0: none
    std::atomic<int> computing{0};       // 1 while it calls `compute` or `commit`
    std::vector<char> local;
    std::uint64_t chunk_ns = 0;
  };
  // Chunk c of a stage is in lane c % threads. A thread takes the chunks of its own lane first, so that what it wrote in
  // one stage is in its cache in the next, and threads share few lines of it.
  struct alignas(64) Lane {
    std::atomic<std::uint64_t> next{0};  // stage id, and the number of its chunks that were taken
  };
  struct alignas(64) Line {
    static constexpr std::size_t kFlags = 8;
    std::atomic<std::uint64_t> flags[kFlags]{};
  };

  void serve(Place& place, int lane);
  void take_part(Work& work, std::uint64_t step, Place& place, int lane);
  int take(std::uint64_t id, int lane, int num_chunks);
  void execute(Work& work, std::uint64_t id, int chunk, Place& place);
  void wait_or_repeat(Work& work, std::uint64_t id, int num_chunks, Place& place);
  void wait_for_leavers(std::uint64_t oldest);
  void wait_for_computing();
  void reserve(const Work& work);

  // Stages are numbered over all steps.
  static constexpr int kChunkBits = 20, kStageBits = 12;
  static constexpr int stage_of(std::uint64_t id) { return static_cast<int>(id & ((1U << kStageBits) - 1)); }
  static constexpr std::uint64_t claimed(std::uint64_t id) { return 2 * id; }
  static constexpr std::uint64_t committed(std::uint64_t id) { return 2 * id + 1; }
  std::atomic<std::uint64_t>& flag(int chunk) {  // the last stage in which the chunk was claimed or committed
    const auto at = static_cast<std::size_t>(chunk / threads());
    return flags_[static_cast<std::size_t>(chunk % threads()) * lines_ + at / Line::kFlags].flags[at % Line::kFlags];
  }

  std::atomic<std::uint64_t> step_{0};
  alignas(64) std::atomic<std::uint64_t> repeated_{0};
  std::unique_ptr<Lane[]> lanes_;
  std::unique_ptr<Line[]> flags_;
  std::size_t lines_ = 0;            // of a lane's flags
  std::shared_ptr<Work> works_[2];   // of the last two steps, by parity
  std::unique_ptr<Place[]> places_;  // the caller's first
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace sage
