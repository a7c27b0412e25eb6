// The gRPC port's credentials: plain, or TLS with the certificate that the HTTP port has at that moment.
#pragma once

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "server/tls.h"

namespace kvasir::server::rpc {

// No `files`: plain.
std::shared_ptr<grpc::ServerCredentials> credentials(const std::shared_ptr<TlsSource>& files);

}  // namespace kvasir::server::rpc
