#include "cli/socket.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/cat.h"

namespace kvasir::cli {

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

Status Socket::wait(short what, Deadline until) const {
  for (;;) {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
    pollfd p{fd_, what, 0};
    int ready = left <= 0 ? 0 : poll(&p, 1, int(left));
    if (ready > 0) return {};
    if (ready == 0) return {Code::deadline_exceeded, "no answer in time"};
    if (errno != EINTR) return unavailable(std::strerror(errno));
  }
}

std::string host_port(const std::string& host, int port) {
  const bool six = host.find(':') != std::string::npos;
  return cat(six ? "[" : "", host, six ? "]" : "", ':', port);
}

Result<Socket> connect_to(const std::string& host, int port, Deadline until) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  if (int e = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found))
    return unavailable(cat("cannot look up '", host, "': ", gai_strerror(e)));
  Result<Socket> out = unavailable("no address");
  for (addrinfo* a = found; a; a = a->ai_next) {
    Socket s(socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int error = connect(s.fd(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      if (Status why = s.wait(POLLOUT, until); !why.ok()) {
        out = why;
        continue;
      }
      socklen_t size = sizeof error;
      getsockopt(s.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) {
      out = std::move(s);
      break;
    }
    out = unavailable(cat("nobody answers at ", host_port(host, port), ": ", std::strerror(error)));
  }
  freeaddrinfo(found);
  return out;
}

}  // namespace kvasir::cli
