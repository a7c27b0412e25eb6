#include "server/listen.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/cat.h"

namespace kvasir::server {
namespace {

void set(int fd, int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof value); }

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return -1;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

// A listening socket, or -1 with errno.
int open_one(const addrinfo& a, int port, bool both_families) {
  sockaddr_storage address{};
  std::memcpy(&address, a.ai_addr, a.ai_addrlen);
  auto& port_field = a.ai_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port;
  port_field = htons(uint16_t(port));
  int fd = ::socket(a.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  if (a.ai_family == AF_INET6) set(fd, IPPROTO_IPV6, IPV6_V6ONLY, both_families ? 0 : 1);
  if (::bind(fd, reinterpret_cast<sockaddr*>(&address), a.ai_addrlen) == 0 && ::listen(fd, SOMAXCONN) == 0) return fd;
  int why = errno;
  ::close(fd);
  errno = why;
  return -1;
}

}  // namespace

namespace {

Result<Listening> listen_on_one(const std::string& host, int port, const char* flag) {
  std::string name = host.starts_with('[') && host.ends_with(']') ? host.substr(1, host.size() - 2) : host;
  if (name.empty()) name = "::";
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0)
    return invalid_argument(cat("host '", host, "' is no address and no known name")).with_field("host");
  Listening out;
  int why = 0;
  for (addrinfo* a = found; a; a = a->ai_next) {
    int fd = open_one(*a, out.port > 0 ? out.port : port, host.empty());
    if (fd < 0) {
      why = errno;
      if (why == EADDRINUSE && port > 0) {  // not half of a host: its clients would meet whoever has the other half
        for (int other : out.sockets) ::close(other);
        out.sockets.clear();
        break;
      }
      continue;
    }
    out.sockets.push_back(fd);
    out.port = port_of(fd);
  }
  ::freeaddrinfo(found);
  if (out.sockets.empty() && host.empty() && why != EADDRINUSE) {  // a machine without IPv6
    sockaddr_in any{};
    any.sin_family = AF_INET;
    addrinfo four{};
    four.ai_family = AF_INET;
    four.ai_addr = reinterpret_cast<sockaddr*>(&any);
    four.ai_addrlen = sizeof any;
    if (int fd = open_one(four, port, false); fd >= 0) {
      out.sockets.push_back(fd);
      out.port = port_of(fd);
    }
  }
  if (out.sockets.empty())
    return unavailable(cat("cannot listen on ", host.empty() ? "every interface" : host.c_str(), ":", port, ": ",
                           std::strerror(why), "; choose another port with ", flag, ", or 0 for a free one"));
  return out;
}

}  // namespace

std::vector<std::string> addresses(const std::string& hosts) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= hosts.size();) {
    const size_t end = std::min(hosts.find(',', at), hosts.size());
    const size_t first = std::min(hosts.find_first_not_of(' ', at), end);
    out.push_back(hosts.substr(first, end - first));
    out.back().resize(out.back().find_last_not_of(' ') + 1);
    at = end + 1;
  }
  return out;
}

Result<Listening> listen_on(const std::string& host, int port, const char* flag) {
  const std::vector<std::string> names = addresses(host);
  Listening all;
  for (const std::string& name : names) {
    auto one = name.empty() && names.size() > 1
                   ? invalid_argument(cat("host '", host, "' names no address between two commas")).with_field("host")
                   : listen_on_one(name, all.port > 0 ? all.port : port, flag);
    if (!one.ok()) {  // all of them or none, as of the addresses of one name
      for (int fd : all.sockets) ::close(fd);
      return one.status();
    }
    all.sockets.insert(all.sockets.end(), one->sockets.begin(), one->sockets.end());
    all.port = one->port;
  }
  return all;
}

}  // namespace kvasir::server
