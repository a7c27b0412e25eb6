#include "server/workers.h"

namespace kvasir::server {

Workers::Workers(int threads, size_t max_queued) : max_queued_(max_queued) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

bool Workers::post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_ || tasks_.size() >= max_queued_) return false;
    tasks_.push_back(std::move(task));
    if (waking_ >= sleeping_) return true;  // all are up, or on their way
    ++waking_;
  }
  wake_.notify_one();
  return true;
}

void Workers::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    while (tasks_.empty() && !stopped_) {
      ++sleeping_;
      wake_.wait(lock);
      --sleeping_;
      if (waking_ > 0) --waking_;
    }
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds goes before the lock comes back
    lock.lock();
  }
}

void Workers::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  for (std::thread& t : threads_) t.join();
  threads_.clear();
}

}  // namespace kvasir::server
