#include "server/grpc/grpc_server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "core/cat.h"
#include "core/log.h"
#include "server/grpc/calls.h"
#include "server/grpc/credentials.h"
#include "server/grpc/door.h"
#include "server/grpc/health.h"
#include "server/grpc/inflate_limit.h"
#include "server/grpc/kserve.h"
#include "server/grpc/kvasir_v1.h"
#include "server/grpc/listener.h"
#include "server/grpc/ppl.h"
#include "server/grpc/reflection.h"
#include "server/grpc/vllm.h"
#include "server/grpc/vllm_control.h"
#include "server/grpc/vllm_inference.h"

namespace kvasir::server::rpc {
namespace {

constexpr int kLookahead = 4 << 10;

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
  builder.SetResourceQuota(grpc::ResourceQuota("kvasir").Resize(size_t(o.max_held.bytes)));
  limit_inflated(size_t(o.max_body.bytes));
  if (!inflate_is_limited())
    for (auto algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP})
      builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  // So much of a message may come before somebody who may has asked for it to be read.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookahead);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
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
        calls_(limits(services.options())),
        context_{services, calls_, workers_, delivery_},
        door_(context_),
        kv_events_(context_),
        health_(HealthService::create(door_, services)) {
    add_kvasir_v1(door_, services);
    add_ppl(door_);
    add_vllm(door_, services, kv_events_);
    add_vllm_inference(door_);
    add_vllm_control(door_, services);
    add_kserve(door_, services);
    add_reflection(door_);
  }
  ~GrpcServerImpl() override { stop(std::chrono::milliseconds(0)); }

  Status listen() {
    static std::once_flag logs;
    std::call_once(logs, log_as_ours);
    const ServerOptions& o = context_.services.options();
    auto creds = credentials(tls_);
    KVASIR_ASSIGN(listener_, Listener::open(o.host, o.grpc_port, o.max_connections));
    grpc::ServerBuilder builder;
    auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, creds);
    set_limits(builder, o);
    builder.RegisterCallbackGenericService(&door_);
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
    calls_.stop();
    server_->Shutdown(std::chrono::system_clock::now() + limit);
    server_->Wait();
    server_.reset();
    workers_.stop();
    delivery_.stop();
  }

 private:
  CallLimits limits(const ServerOptions& o) {
    CallLimits limits;
    limits.known = size_t(o.max_calls);
    limits.silence = o.header_timeout;
    limits.drop = [this](const std::string& peer) { listener_->drop(peer); };
    return limits;
  }

  const std::shared_ptr<TlsSource> tls_;
  Workers workers_, delivery_;
  Calls calls_;
  const Context context_;
  Door door_;
  KvEvents kv_events_;
  std::unique_ptr<HealthService> health_;
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
