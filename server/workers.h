// A few threads that run what must not run on a thread of gRPC, of HTTP or of the engine. They sleep when there is
// nothing to do; the queue is bounded, and a full one is said rather than waited for.
//
// Owners (tenants) take turns, however many tasks one of them has queued. Tasks over large inputs have threads of their
// own: what is small never waits behind what is large.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace kvasir::server {

class Workers {
 public:
  static constexpr size_t kLarge = 64 << 10;  // bytes to look at: some 10 ms of a tokenizer

  Workers(int threads, size_t max_queued);
  ~Workers() { stop(); }
  Workers(const Workers&) = delete;

  // `bytes`: how much input the task has to look at. False: the queue is full, or stopped.
  [[nodiscard]] bool post(std::function<void()> task, const std::string& owner = {}, size_t bytes = 0);
  void stop();  // finishes what is queued, then joins

 private:
  using Task = std::function<void()>;
  struct Lane {
    std::condition_variable wake;
    std::unordered_map<std::string, std::deque<Task>> tasks;  // of owners that have some
    std::deque<std::string> turns;                            // the same owners, in the order they are served
    size_t queued = 0;
    int sleeping = 0, waking = 0;
  };
  void run(Lane& lane, bool large);
  static Task take(Lane& lane);

  const size_t max_queued_;
  std::mutex mutex_;
  Lane small_, large_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvasir::server
