#include "server/server.h"

#include <atomic>
#include <mutex>
#include <thread>

#include "core/log.h"
#include "server/descriptors.h"
#include "server/grpc/grpc_server.h"
#include "server/http/serve.h"
#include "server/memory.h"
#include "server/services.h"
#include "server/tls.h"

namespace kvasir::server {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kReadTime{5000};

class ServerImpl final : public Server {
 public:
  ServerImpl(std::unique_ptr<Services> services, std::unique_ptr<rpc::GrpcServer> grpc,
             std::unique_ptr<http::HttpServer> http)
      : services_(std::move(services)), grpc_(std::move(grpc)), http_(std::move(http)) {}
  ~ServerImpl() override { stop(); }

  int grpc_port() const override { return grpc_ ? grpc_->port() : -1; }
  int http_port() const override { return http_ ? http_->port() : -1; }

  void drain(milliseconds limit) override {
    services_->set_draining();
    if (http_) http_->drain();
    services_->engine().drain(limit);  // every stream has its last event now
    close(kReadTime);                  // and this long to be read
  }
  void stop() override {
    cut_ = true;
    services_->set_draining();
    services_->engine().drain(milliseconds(0));
    close(milliseconds(0));
  }

 private:
  void close(milliseconds limit) {
    std::lock_guard lock(mutex_);
    auto until = std::chrono::steady_clock::now() + limit;
    while (http_ && http_->connections() > 0 && std::chrono::steady_clock::now() < until && !cut_)
      std::this_thread::sleep_for(milliseconds(10));
    if (http_) http_->stop();
    if (grpc_) grpc_->stop(cut_ ? milliseconds(0) : limit);
  }

  std::unique_ptr<Services> services_;
  std::unique_ptr<rpc::GrpcServer> grpc_;
  std::unique_ptr<http::HttpServer> http_;
  std::mutex mutex_;
  std::atomic<bool> cut_{false};
};

}  // namespace

Result<std::unique_ptr<Server>> Server::start(const ServerOptions& asked, engine::Engine& engine) {
  ServerOptions options = asked;
  bound_free_ends();
  KVASIR_ASSIGN(options.max_connections,
                fit_connections(asked.max_connections, int(asked.grpc_port >= 0) + int(asked.http_port >= 0)));
  KVASIR_ASSIGN(auto services, Services::create(options, engine));
  std::shared_ptr<TlsSource> tls;  // one for both ports
  if (!options.tls_cert.empty()) {
    KVASIR_ASSIGN(tls, TlsSource::open(options.tls_cert, options.tls_key, options.tls_client_ca));
  }
  std::unique_ptr<rpc::GrpcServer> grpc;
  if (options.grpc_port >= 0) {
    KVASIR_ASSIGN(grpc, rpc::GrpcServer::start(*services, tls));
  }
  std::unique_ptr<http::HttpServer> http;
  if (options.http_port >= 0) {
    KVASIR_ASSIGN(http, http::serve_http(*services, tls));
  }
  log_info("listening", {{"grpc_port", grpc ? grpc->port() : -1}, {"http_port", http ? http->port() : -1}});
  return std::unique_ptr<Server>(std::make_unique<ServerImpl>(std::move(services), std::move(grpc), std::move(http)));
}

}  // namespace kvasir::server
