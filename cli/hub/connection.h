// Bytes to and from one host, through TLS or not; every wait has an end.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string_view>

#include "cli/hub/url.h"
#include "cli/socket.h"

namespace kvasir::hub {

class Connection {
 public:
  static Result<Connection> open(const Url& url, std::chrono::milliseconds patience);
  Status write(std::string_view bytes);
  Result<size_t> read(char* to, size_t most);  // 0: the other side has ended it

 private:
  Connection(cli::Socket socket, std::chrono::milliseconds patience)
      : socket_(std::move(socket)), patience_(patience) {}
  Status start_tls(const std::string& host);
  // After an SSL call that gave `result`: whether to try again, once the socket allows.
  Status wait_tls(int result, const char* doing);
  cli::Deadline deadline() const { return std::chrono::steady_clock::now() + patience_; }

  struct Free {
    void operator()(SSL_CTX* c) const { SSL_CTX_free(c); }
    void operator()(SSL* s) const { SSL_free(s); }
  };
  cli::Socket socket_;
  std::chrono::milliseconds patience_;
  std::unique_ptr<SSL_CTX, Free> context_;
  std::unique_ptr<SSL, Free> tls_;
};

}  // namespace kvasir::hub
