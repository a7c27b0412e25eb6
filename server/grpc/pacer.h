// Connections that are read on later: those that have shown no key and open streams faster than they may, each of them
// or all together. It has no thread: whoever polls fd() asks for due() when there is something to read from it.
#pragma once

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace kvasir::server::rpc {

class Pacer {
 public:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    int fd;
    uint64_t inode;
  };

  Pacer() : timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {}
  ~Pacer() {
    if (timer_ >= 0) ::close(timer_);
  }
  Pacer(const Pacer&) = delete;

  int fd() const { return timer_; }

  // How long a connection waits that has opened so many streams: each has a time of its own, one after another, so that
  // who asks for health meanwhile waits behind those of one connection and not of all.
  Clock::duration turn(size_t streams) {
    using Seconds = std::chrono::duration<double>;
    std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    const auto time = [](double n) {
      return std::chrono::duration_cast<Clock::duration>(Seconds(n / kStreamsASecond));
    };
    turn_ = std::max(turn_, now - time(kStreamsAtOnce)) + time(double(streams));
    return std::max(Clock::duration(0), turn_ - now);
  }

  // False: nobody would wake it.
  bool rests(Connection connection, Clock::time_point until) {
    std::lock_guard lock(mutex_);
    if (stopped_ || timer_ < 0) return false;
    const bool first = resting_.empty() || until < resting_.begin()->first;
    resting_.emplace(until, connection);
    if (first) set(until);
    return true;
  }
  // Those whose time has come; all of them, and no more after them, when it stops.
  std::vector<Connection> due(bool stop = false) {
    std::lock_guard lock(mutex_);
    stopped_ |= stop;
    uint64_t rings = 0;
    [[maybe_unused]] ssize_t n = timer_ >= 0 ? ::read(timer_, &rings, sizeof rings) : 0;
    std::vector<Connection> out;
    const auto now = Clock::now();
    while (!resting_.empty() && (stopped_ || resting_.begin()->first <= now)) {
      out.push_back(resting_.begin()->second);
      resting_.erase(resting_.begin());
    }
    if (!resting_.empty()) set(resting_.begin()->first);
    return out;
  }

 private:
  void set(Clock::time_point until) {
    const auto left = std::max(std::chrono::nanoseconds(1), std::chrono::nanoseconds(until - Clock::now()));
    itimerspec when{};
    when.it_value.tv_sec = time_t(left.count() / 1'000'000'000);
    when.it_value.tv_nsec = long(left.count() % 1'000'000'000);
    ::timerfd_settime(timer_, 0, &when, nullptr);
  }

  static constexpr double kStreamsAtOnce = 32,
                          kStreamsASecond = 256;  // of all who have shown no key, beyond a few each

  const int timer_;
  std::mutex mutex_;
  Clock::time_point turn_{};  // everybody's
  std::multimap<Clock::time_point, Connection> resting_;
  bool stopped_ = false;
};

}  // namespace kvasir::server::rpc
