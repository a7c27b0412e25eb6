// A few threads that run what must not run on a thread of gRPC or of the engine. They sleep when there is
// nothing to do; the queue is bounded, and a full one is said rather than waited for.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvasir::server {

class Workers {
 public:
  Workers(int threads, size_t max_queued);
  ~Workers() { stop(); }
  Workers(const Workers&) = delete;

  [[nodiscard]] bool post(std::function<void()> task);  // false: the queue is full, or stopped
  void stop();                                          // finishes what is queued, then joins

 private:
  void run();

  const size_t max_queued_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  int sleeping_ = 0, waking_ = 0;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvasir::server
