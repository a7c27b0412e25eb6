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
#include <vector>

#include "server/grpc/frame_scanner.h"

namespace {

using kvasir::server::rpc::FrameScanner;

std::mutex g_closing;  // gRPC closes no connection while it is looked at

using kvasir::server::rpc::Pacer;

struct WireGuard;

// What a TLS session deciphers. Of a stranger's, and of one that opens many streams, it is handed to gRPC in small
// parts, and what is left waits here while the connection rests: a record brings up to 16 KiB at once, and that is a
// thousand streams.
struct Session {
  FrameScanner scanner;
  WireGuard* guard = nullptr;  // of its connection, which outlives every read
  int fd = -1;
  std::string plain;
  std::atomic<bool> withholds{false};  // `plain` has something
  bool feigned = false;                // gRPC was told of a byte, to make it come for what is withheld
};

struct WireGuard {
  FrameScanner scanner;
  std::string peer;
  std::shared_ptr<Pacer> pacer;
  std::atomic<Session*> session{nullptr};  // the TLS one, where there is one
  std::string greeting, hello;             // the first bytes that go out; the random ones in them
  bool greeted = false;
  std::atomic<bool> rests{false};  // nothing of it is read
  std::atomic<bool> owes{false};   // it was to rest after what came last
  int epoll = -1;                  // gRPC's, and what it waits for there
  epoll_event event{};

  // Those who open streams too fast are read on later, unless they have left meanwhile.
  void rest(int fd, const FrameScanner& read);
  void read_on(int fd);

  // gRPC reads on and on where the kernel says that more has come (TCP_INQ), and one busy connection keeps a thread.
  // It is told that there is no more, and woken for it when the others have had their turns.
  void let_others(int fd, msghdr& message);

  // Remembers by which random bytes the server greets a TLS client: the session has them too, so the two are matched.
  void greets(int fd, const msghdr& message, size_t bytes);
};

// Under g_closing.
std::unordered_map<std::string, int> g_peers;   // the descriptors of connections
std::unordered_map<std::string, int> g_hellos;  // of those whose session has read nothing yet, by their random bytes

// By descriptor. A slot is filled before gRPC knows the descriptor and emptied before its number is free again, and
// gRPC reads a connection from one thread at a time.
std::array<std::atomic<WireGuard*>, 1 << 20> g_guards;  // untouched pages take no memory

WireGuard* guard_of(int fd) {
  return fd >= 0 && size_t(fd) < g_guards.size() ? g_guards[size_t(fd)].load(std::memory_order_acquire) : nullptr;
}

// Connections that are to be read though the kernel has nothing of them: their sessions have. By what epoll calls them.
class Rung {
 public:
  void add(uint64_t name) {
    std::lock_guard lock(mutex_);
    names_.push_back(name);
    any_ = true;
  }
  bool take(uint64_t name) {
    if (!any_) return false;
    std::lock_guard lock(mutex_);
    const bool found = std::erase(names_, name) > 0;
    any_ = !names_.empty();
    return found;
  }

 private:
  std::mutex mutex_;
  std::vector<uint64_t> names_;
  std::atomic<bool> any_{false};
};
Rung g_rung;

void forget_session(Session* session) {
  if (!session) return;
  {
    std::lock_guard lock(g_closing);
    if (WireGuard* guard = guard_of(session->fd); guard && guard->session == session) guard->session = nullptr;
  }
  delete session;
}

int ssl_slot() {
  static const int slot = SSL_get_ex_new_index(
      0, nullptr, nullptr, nullptr,
      [](void*, void* session, CRYPTO_EX_DATA*, int, long, void*) { forget_session(static_cast<Session*>(session)); });
  return slot;
}

bool speaks_http2(SSL* ssl) {
  const unsigned char* name = nullptr;
  unsigned length = 0;
  SSL_get0_alpn_selected(ssl, &name, &length);
  return SSL_is_server(ssl) && length == 2 && name[0] == 'h' && name[1] == '2';
}

constexpr size_t kRandom = 32;

void bind_to_connection(Session& session, SSL* ssl) {
  unsigned char random[kRandom];
  if (SSL_get_server_random(ssl, random, sizeof random) != sizeof random) return;
  std::lock_guard lock(g_closing);
  auto at = g_hellos.find(std::string(reinterpret_cast<const char*>(random), sizeof random));
  if (at == g_hellos.end()) return;
  session.fd = at->second;
  session.guard = guard_of(session.fd);
  g_hellos.erase(at);
  if (!session.guard) return;
  session.guard->session = &session;
  if (!session.guard->scanner.stranger()) session.scanner.know();
}

// gRPC reads and writes a session under one lock.
Session* session_of(SSL* ssl) {
  auto* session = static_cast<Session*>(SSL_get_ex_data(ssl, ssl_slot()));
  if (session || !speaks_http2(ssl)) return session;
  session = new Session;
  SSL_set_ex_data(ssl, ssl_slot(), session);
  bind_to_connection(*session, ssl);
  return session;
}

thread_local bool t_swallows = false;  // the byte that was feigned goes to no session

}  // namespace

namespace kvasir::server::rpc {

void guard_connection(int fd, std::string peer, std::shared_ptr<Pacer> pacer) {
  if (fd < 0 || size_t(fd) >= g_guards.size()) return;
  auto guard = std::make_unique<WireGuard>();
  guard->peer = std::move(peer);
  guard->pacer = std::move(pacer);
  std::lock_guard lock(g_closing);
  g_peers[guard->peer] = fd;
  delete g_guards[size_t(fd)].exchange(guard.release());
}

void know_connection(const std::string& peer) {
  std::lock_guard lock(g_closing);
  auto at = g_peers.find(peer);
  WireGuard* guard = at == g_peers.end() ? nullptr : guard_of(at->second);
  if (!guard || !guard->scanner.stranger()) return;
  guard->scanner.know();
  if (Session* session = guard->session) session->scanner.know();
  guard->read_on(at->second);
}

void wake(const std::vector<Pacer::Connection>& rested) {
  std::lock_guard lock(g_closing);
  for (const Pacer::Connection& one : rested)
    if (WireGuard* guard = inode_of(one.fd) == one.inode ? guard_of(one.fd) : nullptr) guard->read_on(one.fd);
}

void shut_connection(int fd, uint64_t inode) {
  std::lock_guard lock(g_closing);
  if (inode == 0 || inode_of(fd) != inode) return;
  if (WireGuard* guard = guard_of(fd)) {  // what has come in and was not read yet is not read
    guard->scanner.end();
    if (Session* session = guard->session) session->scanner.end();
  }
  ::shutdown(fd, SHUT_RDWR);
}

}  // namespace kvasir::server::rpc

// --wrap makes these names.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" int __real_epoll_ctl(int epoll, int operation, int fd, epoll_event* event);

void WireGuard::rest(int fd, const FrameScanner& read) {
  const bool stranger = scanner.stranger();
  Pacer::Clock::duration time = read.rest();
  if (const size_t streams = read.many_opened(); streams > 0) time = std::max(time, pacer->turn(streams, stranger));
  owes = time.count() > 0;
  if (!owes || epoll < 0) return;
  rests = true;
  const uint64_t inode = kvasir::server::rpc::inode_of(fd);
  if (!pacer->rests({fd, inode}, Pacer::Clock::now() + time)) rests = false;
  if (stranger && !scanner.stranger()) read_on(fd);  // since a moment ago
}

void WireGuard::read_on(int fd) {
  if (!rests.exchange(false)) return;
  if (Session* of = session; of && of->withholds) g_rung.add(event.data.u64);
  __real_epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event);
}

void WireGuard::greets(int fd, const msghdr& message, size_t bytes) {
  // Of a record: its kind, a version, its length. Of the message in it: its kind, its length, a version, 32 random
  // bytes.
  constexpr size_t kRecord = 5, kBefore = kRecord + 6, kMost = 4096;
  constexpr unsigned char kHandshake = 22, kServerHello = 2;
  // A hello that only asks for another one of the client has these bytes in place of random ones (RFC 8446, 4.1.3).
  static constexpr unsigned char kRetry[kRandom] = {0xCF, 0x21, 0xAD, 0x74, 0xE5, 0x9A, 0x61, 0x11, 0xBE, 0x1D, 0x8C,
                                                    0x02, 0x1E, 0x65, 0xB8, 0x91, 0xC2, 0xA2, 0x11, 0x16, 0x7A, 0xBB,
                                                    0x8C, 0x5E, 0x07, 0x9E, 0x09, 0xE2, 0xC8, 0xA8, 0x33, 0x9C};
  for (size_t i = 0; i < message.msg_iovlen && bytes > 0; ++i) {
    const size_t part = std::min(bytes, message.msg_iov[i].iov_len);
    greeting.append(static_cast<const char*>(message.msg_iov[i].iov_base), part);
    bytes -= part;
  }
  auto byte = [this](size_t at) { return static_cast<unsigned char>(greeting[at]); };
  for (size_t at = 0; greeting.size() >= at + kBefore + kRandom;
       at += kRecord + (size_t(byte(at + 3)) << 8 | byte(at + 4))) {
    if (byte(at) != kHandshake || byte(at + kRecord) != kServerHello) continue;
    if (std::memcmp(greeting.data() + at + kBefore, kRetry, kRandom) == 0) continue;
    hello = greeting.substr(at + kBefore, kRandom);
    std::lock_guard lock(g_closing);
    g_hellos[hello] = fd;
    break;
  }
  greeted = !hello.empty() || greeting.size() > kMost || byte(0) < 20 || byte(0) > 24;  // no record begins so
  if (greeted) std::string().swap(greeting);
}

bool has_left(int fd) {
  constexpr unsigned char kEstablished = 1;  // TCP_ESTABLISHED of <netinet/tcp.h>, which does not go with <linux/tcp.h>
  tcp_info info{};
  socklen_t size = sizeof info;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_state != kEstablished;
}

void WireGuard::let_others(int fd, msghdr& message) {
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
  WireGuard* guard = guard_of(fd);
  if (!guard || message->msg_iovlen == 0) return __real_recvmsg(fd, message, flags);
  if (guard->rests) {
    errno = EAGAIN;
    return -1;
  }
  if (guard->owes && has_left(fd)) return 0;  // what was left behind is for nobody
  if (Session* session = guard->session; session && session->withholds) {
    if (std::exchange(session->feigned, true)) {
      errno = EAGAIN;
      return -1;
    }
    *static_cast<char*>(message->msg_iov[0].iov_base) = 0;
    message->msg_controllen = 0;
    return 1;
  }
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
  guard->rest(fd, guard->scanner);
  guard->let_others(fd, *message);
  return n;
}

int __wrap_epoll_ctl(int epoll, int operation, int fd, epoll_event* event);
int __wrap_epoll_ctl(int epoll, int operation, int fd, epoll_event* event) {
  if (WireGuard* guard = operation == EPOLL_CTL_ADD ? guard_of(fd) : nullptr) {
    guard->epoll = epoll;
    guard->event = *event;
  }
  return __real_epoll_ctl(epoll, operation, fd, event);
}

int __real_epoll_wait(int epoll, epoll_event* events, int most, int timeout);
int __wrap_epoll_wait(int epoll, epoll_event* events, int most, int timeout);
int __wrap_epoll_wait(int epoll, epoll_event* events, int most, int timeout) {
  const int n = __real_epoll_wait(epoll, events, most, timeout);
  for (int i = 0; i < n; ++i)
    if (g_rung.take(events[i].data.u64)) events[i].events |= EPOLLIN;
  return n;
}

ssize_t __real_sendmsg(int fd, const msghdr* message, int flags);
ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags);
ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags) {
  WireGuard* guard = guard_of(fd);
  if (guard) guard->scanner.sends();
  const ssize_t n = __real_sendmsg(fd, message, flags);
  if (guard && !guard->greeted && n > 0) guard->greets(fd, *message, size_t(n));
  return n;
}

int __real_close(int fd);
int __wrap_close(int fd);
int __wrap_close(int fd) {
  if (!guard_of(fd)) return __real_close(fd);
  std::lock_guard lock(g_closing);
  std::unique_ptr<WireGuard> guard(g_guards[size_t(fd)].exchange(nullptr));
  if (auto at = g_peers.find(guard->peer); at != g_peers.end() && at->second == fd) g_peers.erase(at);
  if (auto at = g_hellos.find(guard->hello); at != g_hellos.end() && at->second == fd) g_hellos.erase(at);
  g_rung.take(guard->event.data.u64);
  return __real_close(fd);
}

int __real_BIO_write(BIO* bio, const void* from, int size);
int __wrap_BIO_write(BIO* bio, const void* from, int size);
int __wrap_BIO_write(BIO* bio, const void* from, int size) {
  if (std::exchange(t_swallows, false) && size == 1) return 1;
  return __real_BIO_write(bio, from, size);
}

int __real_SSL_read(SSL* ssl, void* to, int size);
int __wrap_SSL_read(SSL* ssl, void* to, int size);
int __wrap_SSL_read(SSL* ssl, void* to, int size) {
  Session* session = session_of(ssl);
  if (!session) return __real_SSL_read(ssl, to, size);
  if (std::exchange(session->feigned, false)) t_swallows = true;
  int n = 0;
  if (!session->withholds && !(session->guard && session->scanner.in_parts())) {
    n = __real_SSL_read(ssl, to, size);
  } else {
    // All that can be deciphered is: then the session itself says that it waits for more.
    char block[4096];
    while ((n = __real_SSL_read(ssl, block, sizeof block)) > 0) session->plain.append(block, size_t(n));
    session->withholds = !session->plain.empty();
    if (!session->withholds || session->guard->rests) return n;
    const size_t part = std::min({size_t(size), session->plain.size(), session->scanner.most_at_once()});
    std::memcpy(to, session->plain.data(), part);
    session->plain.erase(0, part);
    session->withholds = !session->plain.empty();
    n = int(part);
  }
  if (n <= 0) return n;
  if (!session->scanner.take(static_cast<const unsigned char*>(to), size_t(n))) {
    t_swallows = false;
    ERR_raise(ERR_LIB_SSL, SSL_R_BAD_LENGTH);
    return -1;
  }
  if (session->guard) session->guard->rest(session->fd, session->scanner);
  return n;
}

int __real_SSL_write(SSL* ssl, const void* from, int size);
int __wrap_SSL_write(SSL* ssl, const void* from, int size);
int __wrap_SSL_write(SSL* ssl, const void* from, int size) {
  if (Session* session = session_of(ssl)) session->scanner.sends();
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
