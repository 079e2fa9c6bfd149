// The threads of the ranks of a group: each rank does all of its work on one, and all are done when a call returns.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace sage::host {

class RankThreads {
 public:
  explicit RankThreads(int num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
  }
  ~RankThreads() {
    {
      const std::lock_guard guard(mutex_);
      stopped_ = true;
    }
    wanted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }
  // On all ranks at once. `work` must not throw.
  void run(const std::function<void(int)>& work) { run_until(size(), work); }
  void run_first(const std::function<void(int)>& work) { run_until(1, work); }

 private:
  void run_until(int num_ranks, const std::function<void(int)>& work) {
    std::unique_lock lock(mutex_);
    work_ = &work;
    num_ranks_ = num_ranks;
    num_busy_ = num_ranks;
    ++round_;
    wanted_.notify_all();
    done_.wait(lock, [this] { return num_busy_ == 0; });
  }
  void serve(int rank) {
    std::size_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wanted_.wait(lock, [&] { return stopped_ || round_ != seen; });
      if (stopped_) return;
      seen = round_;
      if (rank >= num_ranks_) continue;
      const auto& work = *work_;
      lock.unlock();
      work(rank);
      lock.lock();
      if (--num_busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wanted_, done_;
  const std::function<void(int)>* work_ = nullptr;
  std::size_t round_ = 0;
  int num_ranks_ = 0, num_busy_ = 0;
  bool stopped_ = false;
  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace sage::host
