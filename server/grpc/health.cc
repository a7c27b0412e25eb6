#include "server/grpc/health.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <list>
#include <mutex>
#include <string_view>
#include <thread>

#include "core/cat.h"
#include "health.grpc.pb.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = grpc::health::v1;
using Serving = pb::HealthCheckResponse;

constexpr std::array<std::string_view, 6> kNames{"",
                                                 "kvasir.v1.Inference",
                                                 "ppl.llm.proto.LLMService",
                                                 "vllm.grpc.engine.VllmEngine",
                                                 "inference.GRPCInferenceService",
                                                 "grpc.health.v1.Health"};

bool known(std::string_view name) { return std::find(kNames.begin(), kNames.end(), name) != kNames.end(); }

class HealthServiceImpl;

// Sends the state, then every change of it. update() comes from the watching thread, one at a time.
class Watch final : public grpc::ServerWriteReactor<pb::HealthCheckResponse> {
 public:
  Watch(HealthServiceImpl& owner, bool known_name) : owner_(owner), known_(known_name) {}
  void update(Serving::ServingStatus status) {
    std::lock_guard lock(mutex_);
    wanted_ = known_ ? status : Serving::SERVICE_UNKNOWN;
    write();
  }
  void end(const grpc::Status& status) {
    std::lock_guard lock(mutex_);
    if (finished_) return;
    finished_ = true;
    Finish(status);
  }
  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    if (ok) write();
  }
  void OnCancel() override { end(grpc::Status(grpc::StatusCode::CANCELLED, "the client went away")); }
  void OnDone() override;

 private:
  void write() {
    if (writing_ || finished_ || (any_sent_ && wanted_ == sent_.status())) return;
    any_sent_ = writing_ = true;
    sent_.set_status(wanted_);
    StartWrite(&sent_);
  }

  HealthServiceImpl& owner_;
  const bool known_;
  std::mutex mutex_;
  pb::HealthCheckResponse sent_;
  Serving::ServingStatus wanted_ = Serving::UNKNOWN;
  bool any_sent_ = false, writing_ = false, finished_ = false;
};

class HealthServiceImpl final : public HealthService, public pb::Health::CallbackService {
 public:
  explicit HealthServiceImpl(const Context& context) : c_(context), thread_([this] { look(); }) {}
  ~HealthServiceImpl() override { stop(); }
  grpc::Service* service() override { return this; }

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* call, const pb::HealthCheckRequest* in,
                                  pb::HealthCheckResponse* out) override {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    if (known(in->service())) {
      out->set_status(status());
      reactor->Finish(grpc::Status::OK);
    } else {
      reactor->Finish({grpc::StatusCode::NOT_FOUND,
                       cat("service '", in->service().substr(0, 128), "' is not one of this server's")});
    }
    return reactor;
  }

  grpc::ServerWriteReactor<pb::HealthCheckResponse>* Watch(grpc::CallbackServerContext*,
                                                           const pb::HealthCheckRequest* in) override {
    auto* watch = new rpc::Watch(*this, known(in->service()));
    std::lock_guard lock(mutex_);
    watches_.push_back(watch);
    watch->update(status());
    if (stopped_) watch->end(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is going away"));
    wake_.notify_all();
    return watch;
  }

  void remove(rpc::Watch* watch) {
    std::lock_guard lock(mutex_);
    watches_.remove(watch);
  }

  void stop() override {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
      for (rpc::Watch* w : watches_) w->end(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is going away"));
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  Serving::ServingStatus status() const { return c_.services.health().ready ? Serving::SERVING : Serving::NOT_SERVING; }

  void look() {
    std::unique_lock lock(mutex_);
    while (!stopped_) {
      if (watches_.empty())
        wake_.wait(lock);
      else
        wake_.wait_for(lock, std::chrono::milliseconds(250));
      Serving::ServingStatus now = status();
      for (rpc::Watch* w : watches_) w->update(now);
    }
  }

  const Context c_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<rpc::Watch*> watches_;
  bool stopped_ = false;
  std::thread thread_;
};

void Watch::OnDone() {
  owner_.remove(this);
  delete this;
}

}  // namespace

std::unique_ptr<HealthService> HealthService::create(const Context& context) {
  return std::make_unique<HealthServiceImpl>(context);
}

}  // namespace kvasir::server::rpc
