// Liveness comes from steps: work pending and no step finished for the limit is stuck, whatever the
// sockets answer. Sleeps without a timer while there is no work.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace kvasir::engine {

class Watchdog {
 public:
  explicit Watchdog(std::chrono::milliseconds limit) : limit_(limit), thread_([this] { run(); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      changed_.notify_one();
    }
    thread_.join();
  }

  // Step thread.
  void working(bool on) {  // is there work that should be moving?
    if (on == working_.load(std::memory_order_relaxed)) return;
    beats_.fetch_add(1, std::memory_order_relaxed);
    std::lock_guard lock(mutex_);
    working_.store(on, std::memory_order_relaxed);
    if (!on) stuck_.store(false);
    if (on) changed_.notify_one();
  }
  void beat() {
    beats_.fetch_add(1, std::memory_order_relaxed);
    if (stuck_.load(std::memory_order_relaxed)) stuck_.store(false);
  }

  bool stuck() const { return stuck_.load(); }

 private:
  // Looks eight times within the limit, and calls it stuck at the seventh look that saw nothing move.
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || working_.load(std::memory_order_relaxed); });
      uint64_t seen = beats_.load(std::memory_order_relaxed);
      for (int still = 0; !stop_ && working_.load(std::memory_order_relaxed);) {
        changed_.wait_for(lock, limit_ / 8, [&] { return stop_; });
        uint64_t now = beats_.load(std::memory_order_relaxed);
        still = now == seen ? still + 1 : 0;
        seen = now;
        if (still >= 7 && working_.load(std::memory_order_relaxed)) stuck_.store(true);
      }
      if (stop_) return;
    }
  }

  const std::chrono::milliseconds limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> working_{false}, stuck_{false};
  std::atomic<uint64_t> beats_{0};
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace kvasir::engine
