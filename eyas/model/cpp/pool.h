// Threads that run one function together, with barriers inside it.
//
// Waiting is spinning first (a barrier of a decoder's step is a microsecond away), then sleeping.
// It never yields: on a busy machine a thread that yields loses milliseconds to another process,
// one that sleeps is scheduled at once when it is woken. When the caller waits longer than it
// works, the others have no core: for a while the runs are the caller's alone. No OpenMP: PyTorch's
// own would share its threads and its settings. What a thread throws is thrown on the caller's when
// all have ended; work with barriers must not throw.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "vec.h"

using Clock = std::chrono::steady_clock;

// A number that threads wait on.
class alignas(64) Signal {
 public:
  static Clock::duration& slept_of_thread() {
    thread_local Clock::duration slept{};
    return slept;
  }

  int get() const { return value_.load(std::memory_order_acquire); }

  int wait_while(int old, int spins) {
    for (int i = 0; i < spins; ++i) {
      const int now = get();
      if (now != old) return now;
      relax();
    }
    const auto start = Clock::now();
    sleepers_.fetch_add(1);
    while (value_.load() == old) futex(FUTEX_WAIT_PRIVATE, old);
    sleepers_.fetch_sub(1);
    slept_of_thread() += Clock::now() - start;
    return get();
  }

  void set(int value) {
    value_.store(value);
    wake();
  }

  int add(int step) {
    const int now = value_.fetch_add(step) + step;
    wake();
    return now;
  }

 private:
  void futex(int operation, int number) {
    syscall(SYS_futex, &value_, operation, number, nullptr, nullptr, 0);
  }
  void wake() {
    if (sleepers_.load() > 0) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
  }

  std::atomic<int> value_{0}, sleepers_{0};
};

class Pool {
 public:
  static constexpr int kMaxThreads = 1024, kMaxCrowd = 6;

  static Pool& shared() {
    static Pool* pool = new Pool;  // never destroyed: its threads sleep until the process ends
    return *pool;
  }

  // How many threads the next run should have, of those wanted.
  int advised(int threads) {
    std::lock_guard<std::mutex> guard(mutex_);
    return threads > 1 && Clock::now() < alone_until_ ? 1 : threads;
  }

  // Calls work(0) .. work(threads - 1) at the same time, work(0) on the caller's thread. One caller
  // at a time.
  template <class Work>
  void run(int threads, Work&& work) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (threads <= 1) {
      team_ = 1;
      work(0);
      return;
    }
    start(threads);
    std::function<void(int)> task = [&](int t) { attempt(work, t); };
    task_ = &task;
    team_ = threads;
    running_.set(threads - 1);
    const auto began = Clock::now();
    Signal::slept_of_thread() = {};
    // The team's size travels with the round's number: a thread outside the team may look at any
    // later time.
    round_.set(static_cast<int>(
        (static_cast<unsigned>(round_.get()) / kMaxThreads + 1) * kMaxThreads + threads));
    task(0);
    for (int left = running_.get(); left != 0;) left = running_.wait_while(left, kBarrierSpins);
    if (std::exception_ptr thrown = std::exchange(thrown_, nullptr); thrown != nullptr)
      std::rethrow_exception(thrown);
    judge(Signal::slept_of_thread(), Clock::now() - began, threads);
  }

  // Returns when all threads of the run have come here.
  void barrier() {
    if (team_ == 1) return;
    const int phase = phase_.get();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.add(1);
    } else {
      phase_.wait_while(phase, kBarrierSpins);
    }
  }

 private:
  static constexpr int kBarrierSpins = 2000, kRoundSpins = 40000;  // of some 40 cycles

  // One run that waited too long is chance, two of a few are a crowd: alone for some times what was
  // lost, longer each time.
  void judge(Clock::duration slept, Clock::duration all, int threads) {
    const bool crowded = slept * threads > all * (threads - 1);
    crowd_ = crowded ? std::min(crowd_ + 2, kMaxCrowd) : std::max(crowd_ - 1, 0);
    if (crowded && crowd_ > 2) alone_until_ = Clock::now() + slept * (1 << crowd_);
  }

  template <class Work>
  void attempt(Work& work, int t) {
    try {
      work(t);
    } catch (...) {
      const std::lock_guard<std::mutex> guard(throwing_);
      if (thrown_ == nullptr) thrown_ = std::current_exception();
    }
  }

  void start(int threads) {
    if (pid_ != getpid()) {  // a forked child has none of its parent's threads
      started_ = 1;
      pid_ = getpid();
    }
    for (; started_ < threads; ++started_) {
      const int round = round_.get();
      std::thread([this, index = started_, round] { serve(index, round); }).detach();
    }
  }

  void serve(int index, int round) {
    for (;;) {
      round = round_.wait_while(round, kRoundSpins);
      if (index >= static_cast<int>(static_cast<unsigned>(round) % kMaxThreads)) continue;
      (*task_)(index);
      running_.add(-1);
    }
  }

  std::mutex mutex_, throwing_;
  std::exception_ptr thrown_;
  std::function<void(int)>* task_ = nullptr;
  int team_ = 1, started_ = 1, crowd_ = 0;
  Clock::time_point alone_until_{};
  pid_t pid_ = getpid();
  Signal round_, running_, phase_;
  alignas(64) std::atomic<int> arrived_{0};
};
