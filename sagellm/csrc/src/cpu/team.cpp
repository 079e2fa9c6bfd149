#include "sagellm/team.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sage {

namespace {

#if defined(__SANITIZE_THREAD__)
// A chunk that is computed again may read what later stages write, and is then dropped: a race on purpose.
constexpr std::uint64_t kMinPatienceNs = ~std::uint64_t{0};
#else
// A chunk takes about 10 us, a time slice of others some milliseconds.
constexpr std::uint64_t kMinPatienceNs = 40'000;
#endif

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

Team::Team(int threads) {
  if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be between 1 and 1024");
  places_ = std::make_unique<Place[]>(static_cast<std::size_t>(threads));
  lanes_ = std::make_unique<Lane[]>(static_cast<std::size_t>(threads));
  workers_.reserve(static_cast<std::size_t>(threads) - 1);
  for (int i = 1; i < threads; ++i) {
    workers_.emplace_back([this, i] { serve(places_[static_cast<std::size_t>(i)], i); });
  }
}

Team::~Team() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Team::run(const std::shared_ptr<Work>& work) {
  if (work->num_stages() >= (1 << kStageBits) - 1) throw std::invalid_argument("too many stages");
  const std::uint64_t step = step_.load(std::memory_order_relaxed) + 1;
  {
    // No worker enters a step meanwhile. One that woke up late would find the flags of its step, which is over, reset.
    std::lock_guard lock(mutex_);
    wait_for_leavers(step - 1);  // of the step before the last, whose place in works_ this one takes
    reserve(*work);
    works_[step & 1] = work;
    step_.store(step, std::memory_order_seq_cst);
  }
  wake_.notify_all();
  take_part(*work, step, places_[0], 0);
  wait_for_computing();
}

// Waits until no worker is in a step older than `oldest`.
void Team::wait_for_leavers(std::uint64_t oldest) {
  for (std::size_t i = 1; i <= workers_.size(); ++i) {
    for (int spins = 0;; ++spins) {
      const std::uint64_t step = places_[i].step.load(std::memory_order_seq_cst);
      if (step == 0 || step >= oldest) break;
      if (spins < 100)
        relax();
      else
        std::this_thread::yield();
    }
  }
}

// Waits, once all chunks are committed, for threads that still compute one. A thread that begins to compute afterwards sees
// by the exchange in `execute` that its chunk is committed. Sleeping leaves this processor to a thread that was preempted.
void Team::wait_for_computing() {
  for (std::size_t i = 1; i <= workers_.size(); ++i) {
    for (int spins = 0; places_[i].computing.fetch_add(0, std::memory_order_acq_rel) != 0; ++spins) {
      if (spins < 100)
        relax();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

void Team::reserve(const Work& work) {
  std::size_t chunks = 0;
  for (int stage = 0; stage < work.num_stages(); ++stage) {
    chunks = std::max(chunks, static_cast<std::size_t>(work.num_chunks(stage)));
  }
  if (chunks >= (1U << kChunkBits) - 1) throw std::invalid_argument("too many chunks in a stage");
  const std::size_t bytes = work.local_bytes() + 64, lanes = workers_.size() + 1;
  const std::size_t lines = (chunks + lanes * Line::kFlags - 1) / (lanes * Line::kFlags);
  if (lines <= lines_ && bytes <= places_[0].local.size()) return;
  wait_for_leavers(~std::uint64_t{0});
  if (lines > lines_) {
    lines_ = lines + lines / 2;
    flags_ = std::make_unique<Line[]>(lines_ * lanes);
  }
  for (std::size_t i = 0; i <= workers_.size(); ++i) {
    if (places_[i].local.size() < bytes) places_[i].local.resize(bytes);
  }
}

void Team::serve(Place& place, int lane) {
  std::uint64_t last = 0;
  for (;;) {
    std::uint64_t step;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || step_.load(std::memory_order_relaxed) != last; });
      if (stopping_) return;
      step = step_.load(std::memory_order_seq_cst);
      place.step.store(step, std::memory_order_seq_cst);
      // The step is published under the mutex, so `works_` cannot change before the caller has seen this place.
    }
    take_part(*works_[step & 1], step, place, lane);
    place.step.store(0, std::memory_order_seq_cst);
    last = step;
  }
}

// A thread goes to the next stage when it sees that all chunks of its stage are committed. A thread that is late sees
// flags and lanes of later stages, takes nothing, and goes on until it is where the others are.
void Team::take_part(Work& work, std::uint64_t step, Place& place, int lane) {
  const int num_stages = work.num_stages(), num_lanes = threads();
  for (int stage = 0; stage < num_stages; ++stage) {
    const std::uint64_t id = step << kStageBits | static_cast<std::uint64_t>(stage);
    const int num_chunks = work.num_chunks(stage);
    for (int i = 0; i < num_lanes; ++i) {
      const int from = (lane + i) % num_lanes;
      for (int chunk; (chunk = take(id, from, num_chunks)) >= 0;) execute(work, id, chunk, place);
    }
    wait_or_repeat(work, id, num_chunks, place);
  }
}

// The next chunk of a lane, or -1.
int Team::take(std::uint64_t id, int lane, int num_chunks) {
  auto& next = lanes_[static_cast<std::size_t>(lane)].next;
  const int num_lanes = threads();
  for (std::uint64_t at = next.load(std::memory_order_relaxed);;) {
    const std::uint64_t lane_id = at >> kChunkBits;
    if (lane_id > id) return -1;
    const int taken = lane_id < id ? 0 : static_cast<int>(at & ((1U << kChunkBits) - 1));
    const int chunk = lane + taken * num_lanes;
    if (chunk >= num_chunks) return -1;
    if (next.compare_exchange_weak(at, (id << kChunkBits) + static_cast<std::uint64_t>(taken) + 1,
                                   std::memory_order_relaxed)) {
      return chunk;
    }
  }
}

void Team::execute(Work& work, std::uint64_t id, int chunk, Place& place) {
  const std::uint64_t begin = workers_.empty() ? 0 : now_ns();
  char* local = place.local.data() + (64 - reinterpret_cast<std::uintptr_t>(place.local.data()) % 64) % 64;
  auto& state = flag(chunk);
  place.computing.exchange(1, std::memory_order_acq_rel);
  // A stage ends only when all its chunks are committed, so a stage before ours means that this chunk is not.
  std::uint64_t before = state.load(std::memory_order_relaxed);
  if (before < claimed(id)) {
    work.compute(stage_of(id), chunk, local);
    before = state.load(std::memory_order_relaxed);
    if (before < claimed(id) && state.compare_exchange_strong(before, claimed(id), std::memory_order_acq_rel)) {
      work.commit(stage_of(id), chunk, local);
      state.store(committed(id), std::memory_order_release);
      if (!workers_.empty()) place.chunk_ns = now_ns() - begin;
    }
  }
  place.computing.store(0, std::memory_order_release);
}

void Team::wait_or_repeat(Work& work, std::uint64_t id, int num_chunks, Place& place) {
  int first = 0;  // chunk that is not committed
  const auto is_over = [&] {
    while (first < num_chunks && flag(first).load(std::memory_order_acquire) >= committed(id)) ++first;
    return first == num_chunks;
  };
  if (is_over()) return;
  const std::uint64_t begin = now_ns();
  for (const std::uint64_t patience = std::max(kMinPatienceNs, 3 * place.chunk_ns);;) {
    for (int spins = 0; spins < 50; ++spins) {
      if (is_over()) return;
      relax();
    }
    if (now_ns() - begin < patience) continue;
    bool found = false;
    for (int chunk = first; chunk < num_chunks && !is_over(); ++chunk) {
      if (flag(chunk).load(std::memory_order_acquire) >= claimed(id)) continue;
      found = true;
      repeated_.fetch_add(1, std::memory_order_relaxed);
      execute(work, id, chunk, place);
    }
    if (!found) std::this_thread::yield();  // somebody was preempted while it committed
  }
}

}  // namespace sage
