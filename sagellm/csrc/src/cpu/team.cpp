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
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(places_[static_cast<std::size_t>(i)]); });
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
  const std::uint64_t step = step_of(ticket_.load(std::memory_order_relaxed)) + 1;
  wait_for_leavers(step - 1);  // of the step before the last, whose place in works_ this one takes
  reserve(*work);
  {
    std::lock_guard lock(mutex_);
    works_[step & 1] = work;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(step << (kChunkBits + kStageBits), std::memory_order_seq_cst);
  }
  wake_.notify_all();
  take_part(*work, step, places_[0]);
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

void Team::reserve(const Work& work) {
  std::size_t chunks = 0;
  for (int stage = 0; stage < work.num_stages(); ++stage) {
    chunks = std::max(chunks, static_cast<std::size_t>(work.num_chunks(stage)));
  }
  if (chunks >= (1U << kChunkBits) - 1) throw std::invalid_argument("too many chunks in a stage");
  const std::size_t bytes = work.local_bytes() + 64;
  if (chunks <= num_committed_ && bytes <= places_[0].local.size()) return;
  wait_for_leavers(~std::uint64_t{0});
  if (chunks > num_committed_) {
    num_committed_ = chunks + chunks / 2;
    committed_ = std::make_unique<std::atomic<std::uint64_t>[]>(num_committed_);
  }
  for (std::size_t i = 0; i <= workers_.size(); ++i) {
    if (places_[i].local.size() < bytes) places_[i].local.resize(bytes);
  }
}

void Team::serve(Place& place) {
  std::uint64_t last = 0;
  for (;;) {
    std::uint64_t step;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || step_of(ticket_.load(std::memory_order_relaxed)) != last; });
      if (stopping_) return;
      step = step_of(ticket_.load(std::memory_order_seq_cst));
      place.step.store(step, std::memory_order_seq_cst);
      // The step is published under the mutex, so `works_` cannot change before the caller has seen this place.
    }
    take_part(*works_[step & 1], step, place);
    place.step.store(0, std::memory_order_seq_cst);
    last = step;
  }
}

void Team::take_part(Work& work, std::uint64_t step, Place& place) {
  const int num_stages = work.num_stages();
  for (;;) {
    std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (step_of(ticket) != step || stage_of(ticket) >= num_stages) return;
    const int chunk = chunk_of(ticket), num_chunks = work.num_chunks(stage_of(ticket));
    if (chunk >= num_chunks) {
      if (num_chunks == 0) {  // nobody would end it
        ticket_.compare_exchange_strong(ticket, (stage_id(ticket) + 1) << kChunkBits, std::memory_order_acq_rel);
        continue;
      }
      wait_or_repeat(work, ticket, num_chunks, place);
    } else if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
      execute(work, ticket, chunk, num_chunks, place);
    }
  }
}

void Team::execute(Work& work, std::uint64_t ticket, int chunk, int num_chunks, Place& place) {
  const std::uint64_t id = stage_id(ticket), begin = workers_.empty() ? 0 : now_ns();
  char* local = place.local.data() + (64 - reinterpret_cast<std::uintptr_t>(place.local.data()) % 64) % 64;
  work.compute(stage_of(ticket), chunk, local);
  auto& committed = committed_[static_cast<std::size_t>(chunk)];
  std::uint64_t before = committed.load(std::memory_order_relaxed);
  // A stage ends only when all its chunks are committed, so a stage id of before ours means that this one is not.
  if (before >= id || !committed.compare_exchange_strong(before, id, std::memory_order_acq_rel)) return;
  work.commit(stage_of(ticket), chunk, local);
  if (!workers_.empty()) place.chunk_ns = now_ns() - begin;
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(num_chunks)) {
    done_.store(0, std::memory_order_relaxed);
    ticket_.store((id + 1) << kChunkBits, std::memory_order_release);
  }
}

void Team::wait_or_repeat(Work& work, std::uint64_t ticket, int num_chunks, Place& place) {
  const std::uint64_t id = stage_id(ticket), begin = now_ns();
  const auto is_over = [&] { return stage_id(ticket_.load(std::memory_order_acquire)) != id; };
  for (std::uint64_t patience = std::max(kMinPatienceNs, 3 * place.chunk_ns);;) {
    for (int spins = 0; spins < 50; ++spins) {
      if (is_over()) return;
      relax();
    }
    if (now_ns() - begin < patience) continue;
    bool found = false;
    for (int chunk = 0; chunk < num_chunks && !is_over(); ++chunk) {
      if (committed_[static_cast<std::size_t>(chunk)].load(std::memory_order_acquire) >= id) continue;
      found = true;
      repeated_.fetch_add(1, std::memory_order_relaxed);
      execute(work, ticket, chunk, num_chunks, place);
    }
    if (!found) std::this_thread::yield();  // somebody was preempted while it committed
  }
}

}  // namespace sage
