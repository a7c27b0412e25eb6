#include "cli/grpc_health.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>

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
  if (tls.plain()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions pems;
  if (!tls.ca.empty()) {
    KVASIR_ASSIGN(pems.pem_root_certs, read(tls.ca));
  }
  if (!tls.cert.empty()) {
    KVASIR_ASSIGN(pems.pem_cert_chain, read(tls.cert));
    KVASIR_ASSIGN(pems.pem_private_key, read(tls.key));
  }
  if (!tls.trust_anybody) return grpc::SslCredentials(pems);
  namespace any = grpc::experimental;
  any::TlsChannelCredentialsOptions options;
  options.set_verify_server_certs(false);
  options.set_check_call_host(false);
  options.set_certificate_verifier(std::make_shared<any::NoOpCertificateVerifier>());
  if (!tls.cert.empty()) {
    options.set_certificate_provider(std::make_shared<any::StaticDataCertificateProvider>(
        std::vector<any::IdentityKeyCertPair>{{pems.pem_private_key, pems.pem_cert_chain}}));
    options.watch_identity_key_cert_pairs();
  }
  return any::TlsCredentials(options);
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
