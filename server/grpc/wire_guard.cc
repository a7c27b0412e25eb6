#include "server/grpc/wire_guard.h"

#include <sys/socket.h>
#include <sys/stat.h>

#include <mutex>

namespace {
std::mutex g_closing;  // gRPC closes no connection while it is looked at
}

namespace kvasir::server::rpc {

uint64_t inode_of(int fd) {
  struct stat s {};
  return ::fstat(fd, &s) == 0 ? s.st_ino : 0;
}

void shut_connection(int fd, uint64_t inode) {
  std::lock_guard lock(g_closing);
  if (inode != 0 && inode_of(fd) == inode) ::shutdown(fd, SHUT_RDWR);
}

}  // namespace kvasir::server::rpc

#ifdef KVASIR_WRAP_INFLATE

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <array>
#include <atomic>

#include "server/grpc/frame_scanner.h"

namespace {

using kvasir::server::rpc::FrameScanner;

// By descriptor. A slot is filled before gRPC knows the descriptor and emptied before its number is free again, and
// gRPC reads a connection from one thread at a time.
std::array<std::atomic<FrameScanner*>, 1 << 20> g_scanners;  // untouched pages take no memory

FrameScanner* scanner_of(int fd) {
  return fd >= 0 && size_t(fd) < g_scanners.size() ? g_scanners[size_t(fd)].load(std::memory_order_acquire) : nullptr;
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

void guard_connection(int fd) {
  if (fd >= 0 && size_t(fd) < g_scanners.size()) delete g_scanners[size_t(fd)].exchange(new FrameScanner);
}

}  // namespace kvasir::server::rpc

// --wrap makes these names.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" {

ssize_t __real_recvmsg(int fd, msghdr* message, int flags);
ssize_t __wrap_recvmsg(int fd, msghdr* message, int flags);
ssize_t __wrap_recvmsg(int fd, msghdr* message, int flags) {
  ssize_t n = __real_recvmsg(fd, message, flags);
  FrameScanner* scanner = n > 0 ? scanner_of(fd) : nullptr;
  if (!scanner) return n;
  size_t left = size_t(n);
  bool fine = true;
  for (size_t i = 0; i < message->msg_iovlen && left > 0; ++i) {
    size_t part = std::min(left, message->msg_iov[i].iov_len);
    fine = scanner->take(static_cast<const unsigned char*>(message->msg_iov[i].iov_base), part);
    left -= part;
  }
  return fine ? n : 0;
}

ssize_t __real_sendmsg(int fd, const msghdr* message, int flags);
ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags);
ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags) {
  if (FrameScanner* scanner = scanner_of(fd)) scanner->sends();
  return __real_sendmsg(fd, message, flags);
}

int __real_close(int fd);
int __wrap_close(int fd);
int __wrap_close(int fd) {
  if (!scanner_of(fd)) return __real_close(fd);
  std::lock_guard lock(g_closing);
  delete g_scanners[size_t(fd)].exchange(nullptr);
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
void guard_connection(int) {}
}  // namespace kvasir::server::rpc

#endif
