// Whether somebody still waits for what this thread works at: who hands a thread its work says so around it, and work
// that takes long asks between its parts.
#pragma once

#include <atomic>

namespace kvasir {

class Awaited {
 public:
  // Until it is destroyed, this thread's work is for somebody who may leave.
  explicit Awaited(const std::atomic<bool>& left) : before_(left_) { left_ = &left; }
  ~Awaited() { left_ = before_; }
  Awaited(const Awaited&) = delete;

  static bool still() { return !left_ || !left_->load(std::memory_order_relaxed); }

 private:
  inline static thread_local const std::atomic<bool>* left_ = nullptr;
  const std::atomic<bool>* before_;
};

}  // namespace kvasir
