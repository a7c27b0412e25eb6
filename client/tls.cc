#include "client/tls.h"

#include <fstream>
#include <iterator>

#include "core/cat.h"

namespace kvasir::client {
namespace {

Result<std::string> read_pem(const std::string& field, const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path, std::ios::binary);
  if (!file) return not_found(cat(field, " is ", path, ", which cannot be read"));
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (text.find("-----BEGIN ") == std::string::npos)
    return invalid_argument(
        cat(field, " is ", path, ", which is no PEM file: it must hold a -----BEGIN ...----- block"));
  return text;
}

}  // namespace

Result<TlsPems> read_tls(const TlsFiles& files) {
  if (files.cert.empty() != files.key.empty()) {
    return invalid_argument(files.key.empty() ? "tls_cert is set without tls_key: set both, they are one identity"
                                              : "tls_key is set without tls_cert: set both, they are one identity");
  }
  TlsPems pems;
  KVASIR_ASSIGN(pems.ca, read_pem("tls_ca", files.ca));
  KVASIR_ASSIGN(pems.cert, read_pem("tls_cert", files.cert));
  KVASIR_ASSIGN(pems.key, read_pem("tls_key", files.key));
  return pems;
}

}  // namespace kvasir::client
