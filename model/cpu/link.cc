#include "model/cpu/link.h"

#include <chrono>
#include <thread>

#include "core/cat.h"

namespace kvasir::model::cpu {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);

// For at most 50 us, giving way to whoever wants this processor: perhaps a rank that is still computing.
void spin_while(const std::atomic<uint32_t>& value, uint32_t seen) {
  for (auto until = Clock::now() + kSpin; Clock::now() < until; std::this_thread::yield())
    for (int i = 0; i < 64; ++i)
      if (value.load(std::memory_order_acquire) != seen) return;
}

}  // namespace

Status Link::meet(int32_t rank, const float* published) {
  const uint32_t round = round_.load(std::memory_order_acquire);
  if (is_lost_.load(std::memory_order_acquire)) return lost();
  published_[slot_of(round + 1)][size_t(rank)] = published;
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  } else {
    spin_while(round_, round);
    round_.wait(round, std::memory_order_acquire);
  }
  return is_lost_.load(std::memory_order_acquire) ? lost() : Status();
}

void Link::lose(int32_t rank, const Status& why) {
  {
    std::lock_guard lock(mutex_);
    if (is_lost_.load(std::memory_order_relaxed)) return;
    why_ = unavailable(
        cat("rank ", rank, " of ", ranks_, " is lost, and no step can be computed without it: ", why.message()));
    is_lost_.store(true, std::memory_order_release);
  }
  // By two: waiters see a change, and published_by() keeps its slot.
  round_.fetch_add(2, std::memory_order_release);
  round_.notify_all();
}

Status Link::lost() const {
  std::lock_guard lock(mutex_);
  return why_;
}

}  // namespace kvasir::model::cpu
