#include "server/grpc/wire_guard.h"

#include <sys/socket.h>
#include <sys/stat.h>

namespace kvasir::server::rpc {

uint64_t inode_of(int fd) {
  struct stat s {};
  return ::fstat(fd, &s) == 0 ? s.st_ino : 0;
}

}  // namespace kvasir::server::rpc

#ifdef KVASIR_WRAP_INFLATE

#include <linux/tcp.h>
#include <netinet/in.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "server/grpc/frame_scanner.h"

namespace {

using kvasir::server::rpc::FrameScanner;

std::mutex g_closing;  // gRPC closes no connection while it is looked at

using kvasir::server::rpc::Pacer;

struct Guard {
  FrameScanner scanner;
  std::string peer;
  std::shared_ptr<Pacer> pacer;
  std::atomic<bool> rests{false};  // nothing of it is read
  int epoll = -1;                  // gRPC's, and what it waits for there
  epoll_event event{};

  // Strangers who open streams too fast are read on later, unless they have left meanwhile.
  void rest(int fd);
  void read_on(int fd);

  // gRPC reads on and on where the kernel says that more has come (TCP_INQ), and one busy connection keeps a thread.
  // It is told that there is no more, and woken for it when the others have had their turns.
  void let_others(int fd, msghdr& message);
};

std::unordered_map<std::string, int> g_peers;  // those of strangers and others, under g_closing

// By descriptor. A slot is filled before gRPC knows the descriptor and emptied before its number is free again, and
// gRPC reads a connection from one thread at a time.
std::array<std::atomic<Guard*>, 1 << 20> g_guards;  // untouched pages take no memory

Guard* guard_of(int fd) {
  return fd >= 0 && size_t(fd) < g_guards.size() ? g_guards[size_t(fd)].load(std::memory_order_acquire) : nullptr;
}

// The same for TLS, where it lives with the session.
int ssl_slot() {
  static const int slot = SSL_get_ex_new_index(
      0, nullptr, nullptr, nullptr,
      [](void*, void* scanner, CRYPTO_EX_DATA*, int, long, void*) { delete static_cast<FrameScanner*>(scanner); });
  return slot;
}

bool speaks_http2(SSL* ssl) {
  const unsigned char* name = nullptr;
  unsigned length = 0;
  SSL_get0_alpn_selected(ssl, &name, &length);
  return SSL_is_server(ssl) && length == 2 && name[0] == 'h' && name[1] == '2';
}

// gRPC reads and writes a session under one lock.
FrameScanner* scanner_of(SSL* ssl) {
  auto* scanner = static_cast<FrameScanner*>(SSL_get_ex_data(ssl, ssl_slot()));
  if (!scanner && speaks_http2(ssl)) SSL_set_ex_data(ssl, ssl_slot(), scanner = new FrameScanner);
  return scanner;
}

}  // namespace

namespace kvasir::server::rpc {

void guard_connection(int fd, std::string peer, std::shared_ptr<Pacer> pacer) {
  if (fd < 0 || size_t(fd) >= g_guards.size()) return;
  auto guard = std::make_unique<Guard>();
  guard->peer = std::move(peer);
  guard->pacer = std::move(pacer);
  std::lock_guard lock(g_closing);
  g_peers[guard->peer] = fd;
  delete g_guards[size_t(fd)].exchange(guard.release());
}

void know_connection(const std::string& peer) {
  std::lock_guard lock(g_closing);
  auto at = g_peers.find(peer);
  Guard* guard = at == g_peers.end() ? nullptr : guard_of(at->second);
  if (!guard || !guard->scanner.stranger()) return;
  guard->scanner.know();
  guard->read_on(at->second);
}

void wake(const std::vector<Pacer::Connection>& rested) {
  std::lock_guard lock(g_closing);
  for (const Pacer::Connection& one : rested)
    if (Guard* guard = inode_of(one.fd) == one.inode ? guard_of(one.fd) : nullptr) guard->read_on(one.fd);
}

void shut_connection(int fd, uint64_t inode) {
  std::lock_guard lock(g_closing);
  if (inode == 0 || inode_of(fd) != inode) return;
  if (Guard* guard = guard_of(fd)) guard->scanner.end();  // what has come in and was not read yet is not read
  ::shutdown(fd, SHUT_RDWR);
}

}  // namespace kvasir::server::rpc

// --wrap makes these names.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" int __real_epoll_ctl(int epoll, int operation, int fd, epoll_event* event);

void Guard::rest(int fd) {
  const auto time = scanner.rest();
  if (time.count() == 0 || epoll < 0) return;
  rests = true;
  const uint64_t inode = kvasir::server::rpc::inode_of(fd);
  if (!pacer->rests({fd, inode}, Pacer::Clock::now() + time)) rests = false;
}

void Guard::read_on(int fd) {
  if (rests.exchange(false)) __real_epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event);
}

bool has_left(int fd) {
  constexpr unsigned char kEstablished = 1;  // TCP_ESTABLISHED of <netinet/tcp.h>, which does not go with <linux/tcp.h>
  tcp_info info{};
  socklen_t size = sizeof info;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_state != kEstablished;
}

void Guard::let_others(int fd, msghdr& message) {
  if (epoll < 0) return;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != IPPROTO_TCP || c->cmsg_type != TCP_CM_INQ) continue;
    int waiting = 0;
    std::memcpy(&waiting, CMSG_DATA(c), sizeof waiting);
    if (waiting <= 0) return;
    if (!rests && __real_epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event) != 0) return;
    waiting = 0;
    std::memcpy(CMSG_DATA(c), &waiting, sizeof waiting);
    return;
  }
}

extern "C" {

ssize_t __real_recvmsg(int fd, msghdr* message, int flags);
ssize_t __wrap_recvmsg(int fd, msghdr* message, int flags);
ssize_t __wrap_recvmsg(int fd, msghdr* message, int flags) {
  Guard* guard = guard_of(fd);
  if (!guard || message->msg_iovlen == 0) return __real_recvmsg(fd, message, flags);
  if (guard->rests) {
    errno = EAGAIN;
    return -1;
  }
  if (guard->scanner.rest().count() > 0 && has_left(fd)) return 0;  // what a stranger left behind
  const size_t most = guard->scanner.most_at_once(), parts = message->msg_iovlen, first = message->msg_iov[0].iov_len;
  if (most < first) {
    message->msg_iovlen = 1;
    message->msg_iov[0].iov_len = most;
  }
  ssize_t n = __real_recvmsg(fd, message, flags);
  message->msg_iovlen = parts;
  message->msg_iov[0].iov_len = first;
  if (n <= 0) return n;
  size_t left = size_t(n);
  bool fine = true;
  for (size_t i = 0; i < parts && left > 0; ++i) {
    size_t part = std::min(left, message->msg_iov[i].iov_len);
    fine = guard->scanner.take(static_cast<const unsigned char*>(message->msg_iov[i].iov_base), part);
    left -= part;
  }
  if (!fine) return 0;
  guard->rest(fd);
  guard->let_others(fd, *message);
  return n;
}

int __wrap_epoll_ctl(int epoll, int operation, int fd, epoll_event* event);
int __wrap_epoll_ctl(int epoll, int operation, int fd, epoll_event* event) {
  if (Guard* guard = operation == EPOLL_CTL_ADD ? guard_of(fd) : nullptr) {
    guard->epoll = epoll;
    guard->event = *event;
  }
  return __real_epoll_ctl(epoll, operation, fd, event);
}

ssize_t __real_sendmsg(int fd, const msghdr* message, int flags);
ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags);
ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags) {
  if (Guard* guard = guard_of(fd)) guard->scanner.sends();
  return __real_sendmsg(fd, message, flags);
}

int __real_close(int fd);
int __wrap_close(int fd);
int __wrap_close(int fd) {
  if (!guard_of(fd)) return __real_close(fd);
  std::lock_guard lock(g_closing);
  std::unique_ptr<Guard> guard(g_guards[size_t(fd)].exchange(nullptr));
  if (auto at = g_peers.find(guard->peer); at != g_peers.end() && at->second == fd) g_peers.erase(at);
  return __real_close(fd);
}

int __real_SSL_read(SSL* ssl, void* to, int size);
int __wrap_SSL_read(SSL* ssl, void* to, int size);
int __wrap_SSL_read(SSL* ssl, void* to, int size) {
  int n = __real_SSL_read(ssl, to, size);
  FrameScanner* scanner = n > 0 ? scanner_of(ssl) : nullptr;
  if (!scanner || scanner->take(static_cast<const unsigned char*>(to), size_t(n))) return n;
  ERR_raise(ERR_LIB_SSL, SSL_R_BAD_LENGTH);
  return -1;
}

int __real_SSL_write(SSL* ssl, const void* from, int size);
int __wrap_SSL_write(SSL* ssl, const void* from, int size);
int __wrap_SSL_write(SSL* ssl, const void* from, int size) {
  if (FrameScanner* scanner = scanner_of(ssl)) scanner->sends();
  return __real_SSL_write(ssl, from, size);
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)

#else

namespace kvasir::server::rpc {
void guard_connection(int, std::string, std::shared_ptr<Pacer>) {}
void know_connection(const std::string&) {}
void wake(const std::vector<Pacer::Connection>&) {}
void shut_connection(int fd, uint64_t inode) {
  if (inode != 0 && inode_of(fd) == inode) ::shutdown(fd, SHUT_RDWR);
}
}  // namespace kvasir::server::rpc

#endif
