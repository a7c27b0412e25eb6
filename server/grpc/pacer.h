// Connections that are read on later: those that open streams faster than they may, each of them or all together, and
// those that have shown no key long before the others. It has no thread: whoever polls fd() asks for due() when there
// is something to read from it.
#pragma once

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
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
  Clock::duration turn(size_t streams, bool stranger) {
    using Seconds = std::chrono::duration<double>;
    std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    const double a_second = stranger ? kStrangersASecond : known_a_second();
    const auto time = [a_second](double n) {
      return std::chrono::duration_cast<Clock::duration>(Seconds(n / a_second));
    };
    Clock::time_point& turn = turn_[stranger];
    turn = std::max(turn, now - time(stranger ? kStrangersAtOnce : kKnownAtOnce)) + time(double(streams));
    return std::max(Clock::duration(0), turn - now);
  }
  // Those with a key take no more than a part of gRPC's threads, which are half as many as processors.
  static double known_a_second() {
    return kKnownASecond * double(std::clamp(std::thread::hardware_concurrency() / 2, 2u, 16u));
  }
  static constexpr double kKnownAtOnce = 256, kKnownASecond = 1024;  // for a thread of gRPC

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

  static constexpr double kStrangersAtOnce = 32,
                          kStrangersASecond = 256;  // of all who have shown no key, beyond a few each

  const int timer_;
  std::mutex mutex_;
  Clock::time_point turn_[2];  // of all who have shown a key, of all who have not
  std::multimap<Clock::time_point, Connection> resting_;
  bool stopped_ = false;
};

}  // namespace kvasir::server::rpc
