#include "server/grpc/credentials.h"

#include <grpc/grpc_security.h>

#include <mutex>
#include <string>

namespace kvasir::server::rpc {
namespace {

// The C++ interface reads key and certificate from their files one by one, and serves what does not belong together.
// The C interface asks for both at each handshake.
class PairCredentials final : public grpc::ServerCredentials {
 public:
  explicit PairCredentials(std::shared_ptr<TlsSource> files) : files_(std::move(files)) {
    const auto request = files_->current()->client_ca.empty()
                             ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                             : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
    inner_ = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(request, &PairCredentials::fetch, this));
  }
  ~PairCredentials() override { grpc_server_credentials_release(inner_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}  // keys: call.h

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), inner_);
  }

  static grpc_ssl_certificate_config_reload_status fetch(void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<PairCredentials*>(self)->fetch(config);
  }
  grpc_ssl_certificate_config_reload_status fetch(grpc_ssl_server_certificate_config** config) {
    auto now = files_->current();
    std::lock_guard lock(mutex_);
    if (now == given_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair{now->key.c_str(), now->cert.c_str()};
    // gRPC insists on some roots. Where no certificate is asked of clients it looks at none.
    const std::string& roots = now->client_ca.empty() ? now->cert : now->client_ca;
    *config = grpc_ssl_server_certificate_config_create(roots.c_str(), &pair, 1);
    given_ = std::move(now);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const std::shared_ptr<TlsSource> files_;
  std::mutex mutex_;
  std::shared_ptr<const TlsPair> given_;
  grpc_server_credentials* inner_ = nullptr;
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> credentials(const std::shared_ptr<TlsSource>& files) {
  if (!files) return grpc::InsecureServerCredentials();
  return std::make_shared<PairCredentials>(files);
}

}  // namespace kvasir::server::rpc
