// Threads that run one function together, with barriers inside it. Knows no model.
//
// Waiting is spinning first (a barrier of a decoder's step is half a microsecond away), then yielding (another process may need
// the core), then sleeping. No OpenMP: PyTorch's own would share its threads and its settings.
#pragma once

#include <immintrin.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

class Pool {
 public:
  static constexpr int kMaxThreads = 1024;

  static Pool& shared() {
    static Pool* pool = new Pool;  // never destroyed: its threads sleep until the process ends
    return *pool;
  }

  // Calls work(0) .. work(threads - 1) at the same time, work(0) on the caller's thread. One caller at a time.
  template <class Work>
  void run(int threads, Work&& work) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (threads <= 1) {
      team_ = 1;
      work(0);
      return;
    }
    start(threads);
    std::function<void(int)> task = std::ref(work);
    task_ = &task;
    team_ = threads;
    running_.store(threads - 1, std::memory_order_relaxed);
    // The team's size travels with the round's number: a thread outside the team may look at any later time.
    const unsigned number = static_cast<unsigned>(round_.load(std::memory_order_relaxed)) / kMaxThreads + 1;
    round_.store(static_cast<int>(number * kMaxThreads + threads), std::memory_order_release);
    round_.notify_all();
    work(0);
    for (int spins = 0;; ++spins) {
      int left = running_.load(std::memory_order_acquire);
      if (left == 0) return;
      pause_or_sleep(running_, left, spins);
    }
  }

  // Returns when all threads of the run have come here.
  void barrier() {
    if (team_ == 1) return;
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.fetch_add(1, std::memory_order_release);
      phase_.notify_all();
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) pause_or_sleep(phase_, phase, spins);
  }

 private:
  static constexpr int kSpins = 4000, kYields = 200;

  static void pause_or_sleep(std::atomic<int>& value, int old, int spins) {
    if (spins < kSpins)
      _mm_pause();
    else if (spins < kSpins + kYields)
      sched_yield();
    else
      value.wait(old, std::memory_order_acquire);
  }

  void start(int threads) {
    if (pid_ != getpid()) {  // a forked child has none of its parent's threads
      started_ = 1;
      pid_ = getpid();
    }
    for (; started_ < threads; ++started_) {
      const int round = round_.load(std::memory_order_relaxed);
      std::thread([this, index = started_, round] { serve(index, round); }).detach();
    }
  }

  void serve(int index, int round) {
    for (;;) {
      int next = round;
      for (int spins = 0; (next = round_.load(std::memory_order_acquire)) == round; ++spins) pause_or_sleep(round_, round, spins);
      round = next;
      if (index >= static_cast<int>(static_cast<unsigned>(round) % kMaxThreads)) continue;
      (*task_)(index);
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_all();
    }
  }

  std::mutex mutex_;
  std::function<void(int)>* task_ = nullptr;
  int team_ = 1, started_ = 1;
  pid_t pid_ = getpid();
  alignas(64) std::atomic<int> round_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};
