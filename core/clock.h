// Time that tests can drive. Everything that asks "what time is it" takes a Clock.
#pragma once

#include <chrono>

namespace kvasir {

using Time = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Time now() const = 0;
};

class SystemClock final : public Clock {
 public:
  Time now() const override { return std::chrono::steady_clock::now(); }
};

class ManualClock final : public Clock {
 public:
  Time now() const override { return now_; }
  void advance(Duration d) { now_ += d; }

 private:
  Time now_{};
};

}  // namespace kvasir
