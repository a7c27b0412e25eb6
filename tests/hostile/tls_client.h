// A client's side of one TLS connection, byte by byte.
#pragma once

#include <fcntl.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>

#include "tests/server/http_client.h"

namespace kvasir::server {

// What it offers is set before connect().
class TlsClient {
 public:
  explicit TlsClient(const std::string& root) : context_(SSL_CTX_new(TLS_client_method()), SSL_CTX_free) {
    SSL_CTX_set_verify(context_.get(), SSL_VERIFY_PEER, nullptr);
    SSL_CTX_load_verify_locations(context_.get(), root.c_str(), nullptr);
  }
  ~TlsClient() { SSL_free(ssl_); }
  TlsClient(const TlsClient&) = delete;

  void only(int version, const char* ciphers) {
    SSL_CTX_set_security_level(context_.get(), 0);
    SSL_CTX_set_max_proto_version(context_.get(), version);
    if (ciphers) SSL_CTX_set_cipher_list(context_.get(), ciphers);
  }
  bool connect(int port) {
    raw_ = std::make_unique<RawClient>(port);
    ssl_ = SSL_new(context_.get());
    static constexpr unsigned char kBoth[] = "\x02h2\x08http/1.1";
    SSL_set_alpn_protos(ssl_, kBoth, sizeof kBoth - 1);
    SSL_set_fd(ssl_, raw_->descriptor());
    return SSL_connect(ssl_) == 1;
  }
  bool send(const std::string& bytes) { return SSL_write(ssl_, bytes.data(), int(bytes.size())) > 0; }
  // A send() of which nothing is taken for so long fails.
  void give_up_sending_after(std::chrono::milliseconds limit) {
    const timeval time{limit.count() / 1000, limit.count() % 1000 * 1000};
    ::setsockopt(raw_->descriptor(), SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
  }
  // What has come, within the time; empty: nothing, or the end.
  std::string hear(std::chrono::milliseconds limit) {
    const auto until = std::chrono::steady_clock::now() + limit;
    const int flags = ::fcntl(raw_->descriptor(), F_GETFL);
    ::fcntl(raw_->descriptor(), F_SETFL, flags | O_NONBLOCK);
    std::string all;
    while (true) {
      char block[16 << 10];
      int n = 0;
      while ((n = SSL_read(ssl_, block, sizeof block)) > 0) all.append(block, size_t(n));
      // What came may have been TLS's own.
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
      if (!all.empty() || SSL_get_error(ssl_, n) != SSL_ERROR_WANT_READ || left.count() <= 0) break;
      if (!raw_->hears_within(left)) break;
    }
    ::fcntl(raw_->descriptor(), F_SETFL, flags);
    return all;
  }
  void say_goodbye() { SSL_shutdown(ssl_); }
  void close() { raw_->close(); }

 private:
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
  std::unique_ptr<RawClient> raw_;
  SSL* ssl_ = nullptr;
};

}  // namespace kvasir::server
