#include "server/grpc/listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "core/cat.h"
#include "server/grpc/wire_guard.h"
#include "server/listen.h"

namespace kvasir::server::rpc {
namespace {

constexpr int kSilenceMs = 20'000;  // a peer that acknowledges nothing for so long has gone
constexpr size_t kSpares = 16;
constexpr std::chrono::seconds kSpareTime{2};  // to ask how the server is

// "ipv4:127.0.0.1:5000", "ipv6:%5B::1%5D:5000"
std::string peer_of(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return {};
  char text[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &four.sin_addr, text, sizeof text);
    return cat("ipv4:", text, ':', ntohs(four.sin_port));
  }
  const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
  const bool mapped = IN6_IS_ADDR_V4MAPPED(&six.sin6_addr);
  ::inet_ntop(mapped ? AF_INET : AF_INET6, six.sin6_addr.s6_addr + (mapped ? 12 : 0), text, sizeof text);
  return mapped ? cat("ipv4:", text, ':', ntohs(six.sin6_port)) : cat("ipv6:%5B", text, "%5D:", ntohs(six.sin6_port));
}

void set(int fd, int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof value); }

}  // namespace

Result<std::unique_ptr<Listener>> Listener::open(const std::string& host, int port, int max_connections) {
  KVASIR_ASSIGN(Listening listening, listen_on(host, port, "--grpc-port"));
  std::unique_ptr<Listener> out(new Listener(max_connections));
  out->sockets_ = std::move(listening.sockets);
  out->port_ = listening.port;
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
  wake(pacer_->due(true));
  for (int fd : sockets_) ::close(fd);
  sockets_.clear();
}

void Listener::run() {
  std::vector<pollfd> all{{wake_, POLLIN, 0}, {pacer_->fd(), POLLIN, 0}};
  for (int fd : sockets_) all.push_back({fd, POLLIN, 0});
  while (true) {
    if (::poll(all.data(), all.size(), spares_.empty() ? -1 : 100) < 0) continue;  // EINTR
    if (all[0].revents != 0) return;
    {
      std::lock_guard lock(mutex_);
      end_spares(kSpares);
    }
    if (all[1].revents != 0) wake(pacer_->due());
    for (size_t i = 2; i < all.size(); ++i)
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
  std::unique_lock lock(mutex_);
  open_.erase(fd);
  const uint64_t inode = inode_of(fd);
  const bool spare = !has_room();
  if (spare) end_spares(kSpares - 1);
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kSilenceMs);
  if (spare)
    spares_.push_back({fd, inode, std::chrono::steady_clock::now() + kSpareTime});
  else
    open_[fd] = inode;
  lock.unlock();
  guard_connection(fd, peer_of(fd), pacer_);
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
  connection.listener_fd = listening;
  connection.fd = fd;
  acceptor_->HandleNewConnection(&connection);
}

void Listener::drop(const std::string& peer) {
  std::lock_guard lock(mutex_);
  for (const auto& [fd, inode] : open_)
    if (peer_of(fd) == peer) shut_connection(fd, inode);
}

void Listener::end_spares(size_t most) {
  const auto now = std::chrono::steady_clock::now();
  while (!spares_.empty() && (spares_.size() > most || spares_.front().until <= now)) {
    const Spare first = spares_.front();
    spares_.pop_front();
    if (inode_of(first.fd) != first.inode) continue;  // it has gone by itself
    if (has_room())
      open_[first.fd] = first.inode;  // others have gone: it may stay
    else
      shut_connection(first.fd, first.inode);
  }
}

bool Listener::has_room() {
  if (open_.size() < max_connections_) return true;
  std::erase_if(open_, [](const auto& entry) { return inode_of(entry.first) != entry.second; });
  return open_.size() < max_connections_;
}

}  // namespace kvasir::server::rpc
