// A TCP connection whose every wait has an end.
#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "core/status.h"

namespace kvasir::cli {

using Deadline = std::chrono::steady_clock::time_point;

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket();
  Socket(Socket&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  Socket& operator=(Socket&& o) noexcept {
    std::swap(fd_, o.fd_);
    return *this;
  }
  int fd() const { return fd_; }
  // Until poll's `what` holds.
  Status wait(short what, Deadline until) const;

 private:
  int fd_;
};

// "localhost:8000", "[::1]:8000".
std::string host_port(const std::string& host, int port);

// Non-blocking.
Result<Socket> connect_to(const std::string& host, int port, Deadline until);

}  // namespace kvasir::cli
