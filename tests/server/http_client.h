// A client that sends exactly the bytes it is given, for tests of how a server takes them.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <string_view>

#include "core/cat.h"

namespace kvasir::server {

class RawClient {
 public:
  // A small receive buffer makes a client whose slowness the server feels soon.
  explicit RawClient(int port, int receive_buffer = 0) {
    fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
    if (receive_buffer > 0) ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_port = htons(static_cast<uint16_t>(port));
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0;
  }
  ~RawClient() { close(); }
  RawClient(const RawClient&) = delete;

  bool connected() const { return connected_; }
  int descriptor() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  // A send() of which nothing is taken for so long fails.
  void give_up_sending_after(std::chrono::milliseconds limit) { patience_ = limit; }
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      pollfd p{fd_, POLLOUT, 0};
      if (::poll(&p, 1, static_cast<int>(patience_.count())) <= 0) return false;
      ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EAGAIN) continue;
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }

  // Whether the other side says anything within this time; what it says stays to be read.
  bool hears_within(std::chrono::milliseconds limit) {
    pollfd p{fd_, POLLIN, 0};
    return ::poll(&p, 1, static_cast<int>(limit.count())) == 1;
  }

  struct Answer {
    int status = 0;  // 0: the connection ended without one
    std::string head, body;
  };
  // One response, its body by Content-Length, chunks, or the end of the connection.
  Answer read() {
    Answer a;
    size_t end;
    while ((end = input_.find("\r\n\r\n")) == std::string::npos)
      if (!more()) return a;
    a.head = input_.substr(0, end + 2);
    input_.erase(0, end + 4);
    a.status = std::stoi(a.head.substr(9, 3));
    if (a.status == 100) return read();
    if (size_t at = a.head.find("Content-Length: "); at != std::string::npos) {
      size_t length = std::stoul(a.head.substr(at + 16));
      while (input_.size() < length)
        if (!more()) return a;
      a.body = input_.substr(0, length);
      input_.erase(0, length);
    } else if (a.head.find("chunked") != std::string::npos) {
      read_chunks(a.body);
    } else {
      while (more()) {
      }
      a.body = std::exchange(input_, {});
    }
    return a;
  }
  // Reads so many bytes at most of what is there; false once the other end has closed.
  bool sip(size_t most) {
    char sink[4096];
    ssize_t n = ::recv(fd_, sink, std::min(most, sizeof sink), MSG_DONTWAIT);
    return n > 0 || (n < 0 && errno == EAGAIN);
  }
  // Throws away what has come.
  void discard() {
    char sink[65536];
    while (::recv(fd_, sink, sizeof sink, MSG_DONTWAIT) > 0) {
    }
  }
  // How much has come, once it is so much or the other end has closed.
  size_t wait_bytes(size_t wanted) {
    while (input_.size() < wanted)
      if (!more()) break;
    return input_.size();
  }
  // True once the other end has closed, within the time.
  bool closed_within(std::chrono::milliseconds limit) {
    auto until = std::chrono::steady_clock::now() + limit;
    while (std::chrono::steady_clock::now() < until) {
      pollfd p{fd_, POLLIN, 0};
      char sink[4096];
      if (::poll(&p, 1, 20) > 0 && ::recv(fd_, sink, sizeof sink, 0) <= 0) return true;
    }
    return false;
  }

  static std::string post(std::string_view path, std::string_view body, std::string_view more_headers = "") {
    return cat("POST ", path,
               " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ", body.size(),
               "\r\n", more_headers, "\r\n", body);
  }
  static std::string get(std::string_view path, std::string_view more_headers = "") {
    return cat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\n", more_headers, "\r\n");
  }

 private:
  bool more() {
    pollfd p{fd_, POLLIN, 0};
    if (::poll(&p, 1, 60'000) <= 0) return false;
    char block[65536];
    ssize_t n = ::recv(fd_, block, sizeof block, 0);
    if (n <= 0) return false;
    input_.append(block, static_cast<size_t>(n));
    return true;
  }
  void read_chunks(std::string& body) {
    while (true) {
      size_t end;
      while ((end = input_.find("\r\n")) == std::string::npos)
        if (!more()) return;
      size_t size = std::stoul(input_.substr(0, end), nullptr, 16);
      while (input_.size() < end + 2 + size + 2)
        if (!more()) return;
      body += input_.substr(end + 2, size);
      input_.erase(0, end + 2 + size + 2);
      if (size == 0) return;
    }
  }

  int fd_ = -1;
  std::chrono::milliseconds patience_{30'000};
  bool connected_ = false;
  std::string input_;
};

}  // namespace kvasir::server
