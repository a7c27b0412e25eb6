// GET /health over TLS, trusting one root and showing a certificate of its own when it has one.
#pragma once

#include <openssl/bio.h>
#include <openssl/ssl.h>

#include <memory>
#include <optional>
#include <string>

#include "core/cat.h"

namespace kvasir::server {

// The status; nothing when no answer came: one of the two does not trust the other.
inline std::optional<int> https_get(int port, const std::string& root, const std::string& cert,
                                    const std::string& key) {
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  if (SSL_CTX_load_verify_locations(context.get(), root.c_str(), nullptr) != 1) return std::nullopt;
  if (!cert.empty() && (SSL_CTX_use_certificate_chain_file(context.get(), cert.c_str()) != 1 ||
                        SSL_CTX_use_PrivateKey_file(context.get(), key.c_str(), SSL_FILETYPE_PEM) != 1))
    return std::nullopt;
  std::unique_ptr<BIO, decltype(&BIO_free_all)> bio(BIO_new_ssl_connect(context.get()), BIO_free_all);
  BIO_set_conn_hostname(bio.get(), cat("127.0.0.1:", port).c_str());
  if (BIO_do_connect(bio.get()) != 1) return std::nullopt;
  std::string ask = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  if (BIO_write(bio.get(), ask.data(), int(ask.size())) != int(ask.size())) return std::nullopt;
  std::string answer;
  char block[4096];
  for (int n; (n = BIO_read(bio.get(), block, sizeof block)) > 0;) answer.append(block, size_t(n));
  if (answer.size() < 12) return std::nullopt;
  return std::stoi(answer.substr(9, 3));
}

}  // namespace kvasir::server
