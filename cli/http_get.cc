#include "cli/http_get.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "core/cat.h"

namespace kvasir::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMostBytes = 1 << 20;

struct Socket {
  int fd = -1;
  ~Socket() {
    if (fd >= 0) close(fd);
  }
};

Status wait_for(int fd, short what, Clock::time_point until) {
  auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  pollfd p{fd, what, 0};
  if (left <= 0 || poll(&p, 1, int(left)) == 0) return {Code::deadline_exceeded, "no answer in time"};
  return {};
}

Status connect_to(const std::string& host, int port, Clock::time_point until, Socket& out) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  if (int e = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found))
    return unavailable(cat("cannot look up '", host, "': ", gai_strerror(e)));
  Status why = unavailable("no address");
  for (addrinfo* a = found; a; a = a->ai_next) {
    Socket s{socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    int error = connect(s.fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      why = wait_for(s.fd, POLLOUT, until);
      if (!why.ok()) continue;
      socklen_t size = sizeof error;
      getsockopt(s.fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) {
      std::swap(out.fd, s.fd);
      why = {};
      break;
    }
    why = unavailable(cat("nobody answers at ", host, ':', port, ": ", std::strerror(error)));
  }
  freeaddrinfo(found);
  return why;
}

}  // namespace

Result<HttpReply> http_get(const std::string& host, int port, const std::string& path,
                           std::chrono::milliseconds limit) {
  Clock::time_point until = Clock::now() + limit;
  Socket s;
  KVASIR_TRY(connect_to(host, port, until, s));
  std::string ask = cat("GET ", path, " HTTP/1.0\r\nHost: ", host, "\r\nConnection: close\r\n\r\n");
  if (send(s.fd, ask.data(), ask.size(), MSG_NOSIGNAL) != ssize_t(ask.size())) return unavailable(std::strerror(errno));
  std::string text;
  char buffer[4096];
  for (;;) {
    KVASIR_TRY(wait_for(s.fd, POLLIN, until));
    ssize_t n = recv(s.fd, buffer, sizeof buffer, 0);
    if (n < 0) return unavailable(std::strerror(errno));
    if (n == 0) break;
    text.append(buffer, size_t(n));
    if (text.size() > kMostBytes) return unavailable("the answer is larger than a health answer can be");
  }
  HttpReply reply;
  size_t space = text.find(' '), head = text.find("\r\n\r\n");
  if (text.rfind("HTTP/1.", 0) != 0 || space == std::string::npos || head == std::string::npos)
    return unavailable("what answers there does not speak HTTP (TLS? another service?)");
  std::from_chars(text.data() + space + 1, text.data() + text.size(), reply.status);
  reply.body = text.substr(head + 4);
  return reply;
}

}  // namespace kvasir::cli
