// What the step thread tells the rest, and the few things the rest tells it, apart from mail.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "engine/engine.h"
#include "engine/waiting_room.h"

namespace kvasir::engine {

struct Shared {
  WaitingRoom waiting;  // requests taken in and not yet admitted to a step
  std::atomic<double> tokens_per_second{0};
  std::atomic<bool> draining{false};   // nothing new; end when idle
  std::atomic<bool> cut_short{false};  // end now
  std::atomic<bool> flush{false};

  mutable std::mutex mutex;  // the rest
  Stats stats;               // the step thread's part
  std::deque<StepSample> recent;
  Status lost;  // why no step will succeed again
};

}  // namespace kvasir::engine
