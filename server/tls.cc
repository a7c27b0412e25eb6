#include "server/tls.h"

#include <openssl/ssl.h>

#include <memory>

#include "core/cat.h"

namespace kvasir::server {

Status check_tls_files(const ServerOptions& o) {
  if (o.tls_cert.empty()) return {};
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> ctx(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
  if (!ctx) return internal_error("OpenSSL made no context");
  if (SSL_CTX_use_certificate_chain_file(ctx.get(), o.tls_cert.c_str()) != 1)
    return failed_precondition(cat("tls_cert ", o.tls_cert, " is no readable PEM certificate chain"));
  if (SSL_CTX_use_PrivateKey_file(ctx.get(), o.tls_key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(ctx.get()) != 1)
    return failed_precondition(cat("tls_key ", o.tls_key, " is no readable PEM key of the certificate ", o.tls_cert));
  if (!o.tls_client_ca.empty() && SSL_CTX_load_verify_locations(ctx.get(), o.tls_client_ca.c_str(), nullptr) != 1)
    return failed_precondition(cat("tls_client_ca ", o.tls_client_ca, " is no readable PEM certificate"));
  return {};
}

}  // namespace kvasir::server
