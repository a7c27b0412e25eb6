#include "server/workers.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "server/memory.h"

namespace kvasir::server {
namespace {

constexpr int kLargeNice = 5;  // the steps of the model come before somebody's megabytes

}  // namespace

Workers::Workers(int threads, size_t max_queued) : max_queued_(max_queued) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(small_, false); });
  for (int i = 0; i < std::max(1, threads / 2); ++i) threads_.emplace_back([this] { run(large_, true); });
}

bool Workers::post(Task task, const std::string& owner, size_t bytes) {
  Lane& lane = bytes > kLarge ? large_ : small_;
  {
    std::lock_guard lock(mutex_);
    if (stopped_ || lane.queued >= max_queued_) return false;
    auto& tasks = lane.tasks[owner];
    if (tasks.empty()) lane.turns.push_back(owner);
    tasks.push_back(std::move(task));
    ++lane.queued;
    if (lane.waking >= lane.sleeping) return true;  // all are up, or on their way
    ++lane.waking;
  }
  lane.wake.notify_one();
  return true;
}

// The first task of the owner whose turn it is, who then stands last.
Workers::Task Workers::take(Lane& lane) {
  std::string owner = std::move(lane.turns.front());
  lane.turns.pop_front();
  auto at = lane.tasks.find(owner);
  Task task = std::move(at->second.front());
  at->second.pop_front();
  --lane.queued;
  if (at->second.empty())
    lane.tasks.erase(at);
  else
    lane.turns.push_back(std::move(owner));
  return task;
}

void Workers::run(Lane& lane, bool large) {
  if (large) ::setpriority(PRIO_PROCESS, id_t(::syscall(SYS_gettid)), kLargeNice);
  std::unique_lock lock(mutex_);
  while (true) {
    while (lane.queued == 0 && !stopped_) {
      ++lane.sleeping;
      lane.wake.wait(lock);
      --lane.sleeping;
      if (lane.waking > 0) --lane.waking;
    }
    if (lane.queued == 0) return;
    Task task = take(lane);
    lock.unlock();
    task();
    task = nullptr;  // what it holds goes before the lock comes back
    if (large) give_memory_back();
    lock.lock();
  }
}

void Workers::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  small_.wake.notify_all();
  large_.wake.notify_all();
  for (std::thread& t : threads_) t.join();
  threads_.clear();
}

}  // namespace kvasir::server
