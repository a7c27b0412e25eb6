#include "cli/http_get.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "cli/socket.h"
#include "core/cat.h"

namespace kvasir::cli {
namespace {

constexpr size_t kMostBytes = 1 << 20;

Status send_plain(const Socket& s, std::string_view ask) {
  if (send(s.fd(), ask.data(), ask.size(), MSG_NOSIGNAL) != ssize_t(ask.size()))
    return unavailable(std::strerror(errno));
  return {};
}

Status read_plain(const Socket& s, Deadline until, std::string& text) {
  char buffer[4096];
  while (text.size() <= kMostBytes) {
    KVASIR_TRY(s.wait(POLLIN, until));
    ssize_t n = recv(s.fd(), buffer, sizeof buffer, 0);
    if (n < 0) return unavailable(std::strerror(errno));
    if (n == 0) return {};
    text.append(buffer, size_t(n));
  }
  return unavailable("the answer is larger than a health answer can be");
}

std::string why_tls() {
  char text[256];
  ERR_error_string_n(ERR_get_error(), text, sizeof text);
  return text;
}

// One exchange over TLS. Every step may want to read or write first.
class TlsExchange {
 public:
  static Status run(const Socket& s, const std::string& host, const TlsFiles& files, std::string_view ask,
                    Deadline until, std::string& text) {
    TlsExchange e(s, until);
    KVASIR_TRY(e.prepare(host, files));
    KVASIR_TRY(e.step([&] { return SSL_connect(e.ssl_.get()); }, "no trust was established"));
    KVASIR_TRY(e.step([&] { return SSL_write(e.ssl_.get(), ask.data(), int(ask.size())); }, "nothing could be sent"));
    char buffer[4096];
    while (text.size() <= kMostBytes) {
      int n = 0;
      Status read = e.step([&] { return n = SSL_read(e.ssl_.get(), buffer, sizeof buffer); }, "no answer");
      if (!read.ok() && !text.empty()) return {};  // it ends as it likes, once it has answered
      KVASIR_TRY(read);
      text.append(buffer, size_t(n));
    }
    return unavailable("the answer is larger than a health answer can be");
  }

 private:
  TlsExchange(const Socket& s, Deadline until) : socket_(s), until_(until) {}

  Status prepare(const std::string& host, const TlsFiles& files) {
    SSL_CTX_set_verify(context_.get(), files.trust_anybody ? SSL_VERIFY_NONE : SSL_VERIFY_PEER, nullptr);
    if (!files.trust_anybody && SSL_CTX_load_verify_locations(context_.get(), files.ca.c_str(), nullptr) != 1)
      return invalid_argument(cat("tls_ca ", files.ca, " is no readable PEM certificate"));
    if (!files.cert.empty() && (SSL_CTX_use_certificate_chain_file(context_.get(), files.cert.c_str()) != 1 ||
                                SSL_CTX_use_PrivateKey_file(context_.get(), files.key.c_str(), SSL_FILETYPE_PEM) != 1))
      return invalid_argument(cat("tls_cert ", files.cert, " and tls_key ", files.key, " are no readable PEM pair"));
    ssl_.reset(SSL_new(context_.get()));
    SSL_set_fd(ssl_.get(), socket_.fd());
    X509_VERIFY_PARAM* verify = SSL_get0_param(ssl_.get());
    if (X509_VERIFY_PARAM_set1_ip_asc(verify, host.c_str()) != 1) {
      X509_VERIFY_PARAM_set1_host(verify, host.c_str(), 0);
      SSL_set_tlsext_host_name(ssl_.get(), host.c_str());
    }
    return {};
  }
  template <class F>
  Status step(F f, const char* failed) {
    while (true) {
      ERR_clear_error();
      int n = f();
      if (n > 0) return {};
      int why = SSL_get_error(ssl_.get(), n);
      if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE)
        return unavailable(cat("TLS: ", failed, ": ", why_tls()));
      KVASIR_TRY(socket_.wait(why == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, until_));
    }
  }

  const Socket& socket_;
  const Deadline until_;
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_{SSL_CTX_new(TLS_client_method()), SSL_CTX_free};
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl_{nullptr, SSL_free};
};

}  // namespace

Result<HttpReply> http_get(const std::string& host, int port, const std::string& path, const TlsFiles& tls,
                           std::chrono::milliseconds limit) {
  Deadline until = std::chrono::steady_clock::now() + limit;
  KVASIR_ASSIGN(Socket s, connect_to(host, port, until));
  std::string ask = cat("GET ", path, " HTTP/1.0\r\nHost: ", host_port(host, port), "\r\nConnection: close\r\n\r\n"),
              text;
  if (tls.plain()) {
    KVASIR_TRY(send_plain(s, ask));
    KVASIR_TRY(read_plain(s, until, text));
  } else {
    KVASIR_TRY(TlsExchange::run(s, host, tls, ask, until, text));
  }
  HttpReply reply;
  size_t space = text.find(' '), head = text.find("\r\n\r\n");
  if (text.rfind("HTTP/1.", 0) != 0 || space == std::string::npos || head == std::string::npos)
    return unavailable("what answers there does not speak HTTP (TLS? then give --tls-ca; another service?)");
  std::from_chars(text.data() + space + 1, text.data() + text.size(), reply.status);
  reply.body = text.substr(head + 4);
  return reply;
}

}  // namespace kvasir::cli
