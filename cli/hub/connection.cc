#include "cli/hub/connection.h"

#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "core/cat.h"

namespace kvasir::hub {
namespace {

// OpenSSL is linked in and its default place is the build machine's; these are where systems keep theirs.
constexpr const char* kAuthorities[] = {"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt",
                                        "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"};

Status trust_system(SSL_CTX* context) {
  SSL_CTX_set_default_verify_paths(context);  // heeds SSL_CERT_FILE and SSL_CERT_DIR
  if (std::getenv("SSL_CERT_FILE")) return {};
  for (const char* file : kAuthorities)
    if (SSL_CTX_load_verify_locations(context, file, nullptr) == 1) break;
  ERR_clear_error();
  return {};
}

std::string tls_reason(SSL* tls) {
  if (long bad = tls ? SSL_get_verify_result(tls) : X509_V_OK; bad != X509_V_OK)
    return cat("its certificate is not trusted: ", X509_verify_cert_error_string(bad));
  unsigned long code = ERR_get_error();
  char text[160] = "the other side ended the connection";
  if (code != 0) ERR_error_string_n(code, text, sizeof text);
  return text;
}

}  // namespace

Result<Connection> Connection::open(const Url& url, std::chrono::milliseconds patience) {
  KVASIR_ASSIGN(cli::Socket socket, cli::connect_to(url.host, url.port, std::chrono::steady_clock::now() + patience));
  Connection out(std::move(socket), patience);
  if (url.tls) KVASIR_TRY(out.start_tls(url.host));
  return out;
}

Status Connection::start_tls(const std::string& host) {
  context_.reset(SSL_CTX_new(TLS_client_method()));
  if (!context_) return internal_error("OpenSSL made no context");
  SSL_CTX_set_min_proto_version(context_.get(), TLS1_2_VERSION);
  SSL_CTX_set_verify(context_.get(), SSL_VERIFY_PEER, nullptr);
  KVASIR_TRY(trust_system(context_.get()));
  tls_.reset(SSL_new(context_.get()));
  if (!tls_) return internal_error("OpenSSL made no connection");
  X509_VERIFY_PARAM* rules = SSL_get0_param(tls_.get());
  if (X509_VERIFY_PARAM_set1_ip_asc(rules, host.c_str()) != 1) {  // not an address: a name
    ERR_clear_error();
    SSL_set_tlsext_host_name(tls_.get(), host.c_str());
    if (SSL_set1_host(tls_.get(), host.c_str()) != 1) return invalid_argument(cat("'", host, "' is no host name"));
  }
  SSL_set_fd(tls_.get(), socket_.fd());
  for (int r; (r = SSL_connect(tls_.get())) != 1;) KVASIR_TRY(wait_tls(r, cat("no TLS with ", host).c_str()));
  return {};
}

Status Connection::wait_tls(int result, const char* doing) {
  switch (SSL_get_error(tls_.get(), result)) {
    case SSL_ERROR_WANT_READ: return socket_.wait(POLLIN, deadline());
    case SSL_ERROR_WANT_WRITE: return socket_.wait(POLLOUT, deadline());
    default: return unavailable(cat(doing, ": ", tls_reason(tls_.get())));
  }
}

Status Connection::write(std::string_view bytes) {
  while (!bytes.empty()) {
    if (tls_) {
      int n = SSL_write(tls_.get(), bytes.data(), int(bytes.size()));
      if (n > 0)
        bytes.remove_prefix(size_t(n));
      else
        KVASIR_TRY(wait_tls(n, "cannot send"));
      continue;
    }
    ssize_t n = send(socket_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n >= 0)
      bytes.remove_prefix(size_t(n));
    else if (errno == EAGAIN)
      KVASIR_TRY(socket_.wait(POLLOUT, deadline()));
    else
      return unavailable(cat("cannot send: ", std::strerror(errno)));
  }
  return {};
}

Result<size_t> Connection::read(char* to, size_t most) {
  for (;;) {
    if (tls_) {
      int n = SSL_read(tls_.get(), to, int(most));
      if (n > 0) return size_t(n);
      if (SSL_get_error(tls_.get(), n) == SSL_ERROR_ZERO_RETURN) return size_t(0);
      KVASIR_TRY(wait_tls(n, "the connection broke"));
      continue;
    }
    ssize_t n = recv(socket_.fd(), to, most, 0);
    if (n >= 0) return size_t(n);
    if (errno != EAGAIN) return unavailable(cat("the connection broke: ", std::strerror(errno)));
    KVASIR_TRY(socket_.wait(POLLIN, deadline()));
  }
}

}  // namespace kvasir::hub
