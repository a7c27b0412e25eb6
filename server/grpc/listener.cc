#include "server/grpc/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "core/cat.h"
#include "server/grpc/wire_guard.h"

namespace kvasir::server::rpc {
namespace {

constexpr int kSilenceMs = 20'000;  // a peer that acknowledges nothing for so long has gone

uint64_t inode_of(int fd) {
  struct stat s {};
  return ::fstat(fd, &s) == 0 ? s.st_ino : 0;
}

void set(int fd, int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof value); }

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return -1;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

// A listening socket, or -1 with errno.
int listen_on(const addrinfo& a, int port, bool both_families) {
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

Result<std::unique_ptr<Listener>> Listener::open(const std::string& host, int port, int max_connections) {
  std::string name = host.starts_with('[') && host.ends_with(']') ? host.substr(1, host.size() - 2) : host;
  if (name.empty()) name = "::";
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0)
    return invalid_argument(cat("host '", host, "' is no address and no known name"));
  std::unique_ptr<Listener> out(new Listener(max_connections));
  int why = 0;
  for (addrinfo* a = found; a; a = a->ai_next) {
    int fd = listen_on(*a, out->port_ > 0 ? out->port_ : port, host.empty());
    if (fd < 0) {
      why = errno;
      continue;
    }
    out->sockets_.push_back(fd);
    out->port_ = port_of(fd);
  }
  if (out->sockets_.empty() && host.empty()) {  // a machine without IPv6
    sockaddr_in any{};
    any.sin_family = AF_INET;
    addrinfo four{};
    four.ai_family = AF_INET;
    four.ai_addr = reinterpret_cast<sockaddr*>(&any);
    four.ai_addrlen = sizeof any;
    if (int fd = listen_on(four, port, false); fd >= 0) {
      out->sockets_.push_back(fd);
      out->port_ = port_of(fd);
    }
  }
  ::freeaddrinfo(found);
  if (out->sockets_.empty())
    return unavailable(cat("cannot listen on ", host.empty() ? "every interface" : host.c_str(), ":", port, ": ",
                           std::strerror(why), "; choose another port with --grpc-port, or 0 for a free one"));
  out->wake_ = ::eventfd(0, EFD_CLOEXEC);
  return out;
}

Listener::~Listener() {
  stop();
  if (wake_ >= 0) ::close(wake_);
}

void Listener::start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor) {
  acceptor_ = std::move(acceptor);
  thread_ = std::thread([this] { run(); });
}

void Listener::stop() {
  if (thread_.joinable()) {
    ::eventfd_write(wake_, 1);
    thread_.join();
  }
  for (int fd : sockets_) ::close(fd);
  sockets_.clear();
}

void Listener::run() {
  std::vector<pollfd> all{{wake_, POLLIN, 0}};
  for (int fd : sockets_) all.push_back({fd, POLLIN, 0});
  while (true) {
    if (::poll(all.data(), all.size(), -1) < 0) continue;  // EINTR
    if (all[0].revents != 0) return;
    for (size_t i = 1; i < all.size(); ++i)
      if (all[i].revents != 0) take(all[i].fd);
  }
}

void Listener::take(int listening) {
  int fd = ::accept4(listening, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    // Out of descriptors, most likely: let some connections end.
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return;
  }
  open_.erase(fd);
  if (!has_room()) {
    ::close(fd);
    return;
  }
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kSilenceMs);
  open_[fd] = inode_of(fd);
  guard_connection(fd);
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
  connection.listener_fd = listening;
  connection.fd = fd;
  acceptor_->HandleNewConnection(&connection);
}

bool Listener::has_room() {
  if (open_.size() < max_connections_) return true;
  std::erase_if(open_, [](const auto& entry) { return inode_of(entry.first) != entry.second; });
  return open_.size() < max_connections_;
}

}  // namespace kvasir::server::rpc
