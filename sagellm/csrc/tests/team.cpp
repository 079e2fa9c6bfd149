// A caller may free what a work read once `Team::run` is back, also where a thread was slow and its chunk was computed again,
// and where a thread begins with a step that is over.

#include "sagellm/team.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "expect.h"

namespace {

using namespace std::chrono_literals;

#if defined(__SANITIZE_THREAD__)
constexpr auto kMost = 0s;  // nothing is computed again there
#else
constexpr auto kMost = 1s;
#endif

// Sums up parts of numbers. A thread that is not the caller reads them after the caller has computed its chunk again.
class Sums : public sage::Work {
 public:
  static constexpr int kChunks = 2, kNumbers = 64 << 10;

  Sums(const int* numbers, std::atomic<int>* reading) : numbers_(numbers), reading_(*reading) {}
  int num_stages() const override { return 1; }
  int num_chunks(int) const override { return kChunks; }
  std::size_t local_bytes() const override { return sizeof(long); }
  void compute(int, int chunk, char* local) const override {
    const bool is_caller = std::this_thread::get_id() == caller_;
    if (is_caller) {
      wait([&] { return begun_ >= 0; });
      is_repeated_ = is_repeated_ || begun_ == chunk;
    } else {
      ++reading_;
      begun_ = chunk;
      wait([&] { return is_repeated_.load(); });
      std::this_thread::sleep_for(2ms);
    }
    long sum = 0;
    for (int i = chunk; i < kNumbers; i += kChunks) sum += numbers_[i];
    *reinterpret_cast<long*>(local) = sum;
    if (!is_caller) --reading_;
  }
  void commit(int, int chunk, const char* local) override { sums_[chunk] = *reinterpret_cast<const long*>(local); }
  long total() const { return std::accumulate(sums_, sums_ + kChunks, 0L); }

 private:
  template <class Condition>
  static void wait(Condition is_met) {
    const auto end = std::chrono::steady_clock::now() + kMost;
    while (!is_met() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  }
  const int* const numbers_;
  std::atomic<int>& reading_;
  const std::thread::id caller_ = std::this_thread::get_id();
  mutable std::atomic<int> begun_{-1};
  mutable std::atomic<bool> is_repeated_{false};
  long sums_[kChunks] = {};
};

void nothing_is_read_after_a_run() {
  sage::Team team(2);
  std::atomic<int> reading{0};
  for (int step = 0; step < 20; ++step) {
    auto numbers = std::make_unique<std::vector<int>>(Sums::kNumbers, step);
    const auto work = std::make_shared<Sums>(numbers->data(), &reading);
    team.run(work);
    EXPECT(reading == 0);
    numbers.reset();
    EXPECT(work->total() == static_cast<long>(step) * Sums::kNumbers);
  }
  EXPECT(kMost == 0s || team.repeated() > 0);
}

class Chunks : public sage::Work {
 public:
  Chunks(int count, std::size_t bytes) : count_(count), bytes_(bytes) {}
  int num_stages() const override { return 1; }
  int num_chunks(int) const override { return count_; }
  std::size_t local_bytes() const override { return bytes_; }
  void compute(int, int, char*) const override { is_late_ = is_late_ || is_over_; }
  void commit(int, int, const char*) override { is_late_ = is_late_ || is_over_; }
  void end() { is_over_ = true; }
  bool is_late() const { return is_late_; }

 private:
  const int count_;
  const std::size_t bytes_;
  std::atomic<bool> is_over_{false};
  mutable std::atomic<bool> is_late_{false};
};

// A thread wakes up when its step is over, while the caller makes room for a larger one.
void a_thread_that_enters_late_computes_nothing() {
  for (int i = 0; i < 20; ++i) {
    sage::Team team(2);
    const auto small = std::make_shared<Chunks>(1, 64);
    team.run(small);
    small->end();
    team.run(std::make_shared<Chunks>(64, std::size_t{8} << 20));
    EXPECT(!small->is_late());
  }
}

}  // namespace

int main() {
  nothing_is_read_after_a_run();
  a_thread_that_enters_late_computes_nothing();
  std::puts("team: passed");
}
