#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>

#include "client/tls.h"

namespace kvasir::client {

inline Result<std::shared_ptr<grpc::ChannelCredentials>> grpc_credentials(const TlsFiles& files) {
  if (!files.wanted()) return grpc::InsecureChannelCredentials();
  KVASIR_ASSIGN(const TlsPems pems, read_tls(files));
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = pems.ca;
  options.pem_cert_chain = pems.cert;
  options.pem_private_key = pems.key;
  return grpc::SslCredentials(options);
}

}  // namespace kvasir::client
