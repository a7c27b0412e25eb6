#include "server/grpc/grpc_server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "core/cat.h"
#include "core/log.h"
#include "server/grpc/credentials.h"
#include "server/grpc/health.h"
#include "server/grpc/inflate_limit.h"
#include "server/grpc/kserve.h"
#include "server/grpc/kvasir_v1.h"
#include "server/grpc/listener.h"
#include "server/grpc/ppl.h"
#include "server/grpc/unread.h"
#include "server/grpc/vllm.h"

namespace kvasir::server::rpc {
namespace {

constexpr int64_t kLeastQuota = int64_t(512) << 20, kQuotaMessages = 64;

// What the libraries say of clients' bytes goes where our own lines go, and only at level debug: a client that fails
// handshakes for sport writes no log.
void log_as_ours() {
  gpr_set_log_function([](gpr_log_func_args* line) { log_debug("grpc", {{"says", line->message}}); });
  google::protobuf::SetLogHandler([](google::protobuf::LogLevel, const char*, int, const std::string& says) {
    log_debug("protobuf", {{"says", says}});
  });
}

void set_limits(grpc::ServerBuilder& builder, const ServerOptions& o) {
  builder.SetMaxReceiveMessageSize(int(o.max_body.bytes));
  // What all connections together may hold of what was sent to them: over it gRPC cancels streams and closes.
  builder.SetResourceQuota(
      grpc::ResourceQuota("kvasir").Resize(size_t(std::max<int64_t>(kLeastQuota, kQuotaMessages * o.max_body.bytes))));
  limit_inflated(size_t(o.max_body.bytes));
  if (!inflate_is_limited())
    for (auto algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP})
      builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, o.max_streams_per_connection);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  // Idle clients may ping every 30 s (every 10 are forgiven); a flood of pings ends the connection.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 5);
  // A peer that vanished without a word is noticed.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  // A client that connects and does not say its first words.
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, int(o.header_timeout.count()));
}

class GrpcServerImpl final : public GrpcServer {
 public:
  GrpcServerImpl(Services& services, std::shared_ptr<TlsSource> tls)
      : tls_(std::move(tls)),
        workers_(services.options().workers, 4096),
        delivery_(1, SIZE_MAX),  // at most a task a stream: a wake-up may not be lost
        context_{services, workers_, delivery_},
        health_(HealthService::create(context_)) {
    for (auto* make : {kvasir_v1_service, ppl_service, vllm_service, kserve_service})
      services_.push_back(make(context_));
  }
  ~GrpcServerImpl() override { stop(std::chrono::milliseconds(0)); }

  Status listen() {
    static std::once_flag reflection;
    std::call_once(reflection, [] {
      grpc::reflection::InitProtoReflectionServerBuilderPlugin();
      log_as_ours();
    });
    const ServerOptions& o = context_.services.options();
    auto creds = credentials(tls_);
    KVASIR_ASSIGN(listener_, Listener::open(o.host, o.grpc_port, o.max_connections));
    grpc::ServerBuilder builder;
    auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, creds);
    set_limits(builder, o);
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
    interceptors.push_back(answer_the_unread());
    builder.experimental().SetInterceptorCreators(std::move(interceptors));
    builder.RegisterService(health_->service());
    for (auto& service : services_) builder.RegisterService(service.get());
    server_ = builder.BuildAndStart();
    if (!server_) return internal_error("gRPC did not start");
    listener_->start(std::move(acceptor));
    return {};
  }

  int port() const override { return listener_->port(); }

  void stop(std::chrono::milliseconds limit) override {
    std::lock_guard lock(mutex_);
    if (!server_) return;
    listener_->stop();
    health_->stop();
    server_->Shutdown(std::chrono::system_clock::now() + limit);
    server_->Wait();
    server_.reset();
    workers_.stop();
    delivery_.stop();
  }

 private:
  const std::shared_ptr<TlsSource> tls_;
  Workers workers_, delivery_;
  const Context context_;
  std::unique_ptr<HealthService> health_;
  std::vector<std::unique_ptr<grpc::Service>> services_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
};

}  // namespace

Result<std::unique_ptr<GrpcServer>> GrpcServer::start(Services& services, std::shared_ptr<TlsSource> tls) {
  auto server = std::make_unique<GrpcServerImpl>(services, std::move(tls));
  KVASIR_TRY(server->listen());
  return std::unique_ptr<GrpcServer>(std::move(server));
}

}  // namespace kvasir::server::rpc
