#include "cli/grpc_health.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <fstream>
#include <iterator>

#include "cli/socket.h"
#include "core/cat.h"
#include "health.grpc.pb.h"

namespace kvasir::cli {
namespace {

Result<std::string> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return not_found(cat(path, " cannot be read"));
  return std::string(std::istreambuf_iterator<char>(file), {});
}

Result<std::shared_ptr<grpc::ChannelCredentials>> credentials(const TlsFiles& tls) {
  if (tls.ca.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  KVASIR_ASSIGN(options.pem_root_certs, read(tls.ca));
  if (!tls.cert.empty()) {
    KVASIR_ASSIGN(options.pem_cert_chain, read(tls.cert));
    KVASIR_ASSIGN(options.pem_private_key, read(tls.key));
  }
  return grpc::SslCredentials(options);
}

}  // namespace

Result<std::string> grpc_health(const std::string& host, int port, const std::string& service, const TlsFiles& tls,
                                std::chrono::milliseconds limit) {
  KVASIR_ASSIGN(auto creds, credentials(tls));
  auto channel = grpc::CreateChannel(host_port(host, port), creds);
  auto stub = grpc::health::v1::Health::NewStub(channel);
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + limit);
  grpc::health::v1::HealthCheckRequest in;
  grpc::health::v1::HealthCheckResponse out;
  in.set_service(service);
  grpc::Status status = stub->Check(&call, in, &out);
  if (!status.ok()) return unavailable(cat("no answer from ", host_port(host, port), ": ", status.error_message()));
  return grpc::health::v1::HealthCheckResponse::ServingStatus_Name(out.status());
}

}  // namespace kvasir::cli
