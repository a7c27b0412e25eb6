#include "server/grpc/health.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <list>
#include <mutex>
#include <string_view>
#include <thread>

#include "core/cat.h"
#include "health.pb.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = grpc::health::v1;
using Serving = pb::HealthCheckResponse;

constexpr std::array<std::string_view, 8> kNames{"",
                                                 "kvasir.v1.Inference",
                                                 "ppl.llm.proto.LLMService",
                                                 "vllm.grpc.engine.VllmEngine",
                                                 "vllm.Inference",
                                                 "vllm.Control",
                                                 "inference.GRPCInferenceService",
                                                 "grpc.health.v1.Health"};

bool known(std::string_view name) { return std::find(kNames.begin(), kNames.end(), name) != kNames.end(); }

class HealthServiceImpl;

// Sends the state, then every change of it. update() comes from the watching thread, one at a time.
class Watch final : public Incoming {
 public:
  Watch(HealthServiceImpl& owner, Opening opening) : Incoming(std::move(opening)), owner_(owner) {}
  ~Watch() override;
  void update(Serving::ServingStatus status) {
    std::lock_guard lock(mutex_);
    wanted_ = known_ ? status : Serving::SERVICE_UNKNOWN;
    write();
  }
  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    if (ok) write();
  }
  void OnCancel() override { end(grpc::Status(grpc::StatusCode::CANCELLED, "the client went away")); }

 private:
  void message() override;
  void write() {
    if (writing_ || finished() || (any_sent_ && wanted_ == sent_.status())) return;
    any_sent_ = writing_ = true;
    sent_.set_status(wanted_);
    serialize(sent_, bytes_);
    StartWrite(&bytes_);
  }

  HealthServiceImpl& owner_;
  bool known_ = false;
  pb::HealthCheckResponse sent_;
  grpc::ByteBuffer bytes_;
  Serving::ServingStatus wanted_ = Serving::UNKNOWN;
  bool any_sent_ = false, writing_ = false;
};

class HealthServiceImpl final : public HealthService {
 public:
  HealthServiceImpl(Door& door, Services& services) : services_(services), thread_([this] { look(); }) {
    door.at_once<pb::HealthCheckRequest, pb::HealthCheckResponse>(
        "/grpc.health.v1.Health/Check", [this](const auto& in, auto& out) -> grpc::Status {
          if (!known(in.service()))
            return {grpc::StatusCode::NOT_FOUND,
                    cat("service '", in.service().substr(0, 128), "' is not one of this server's")};
          out.set_status(status());
          return grpc::Status::OK;
        });
    door.add("/grpc.health.v1.Health/Watch", std::nullopt,
             [this](Opening o) -> std::shared_ptr<Incoming> { return std::make_shared<Watch>(*this, std::move(o)); });
  }
  ~HealthServiceImpl() override { stop(); }

  void add(Watch* watch) {
    std::lock_guard lock(mutex_);
    watches_.push_back(watch);
    watch->update(status());
    wake_.notify_all();
  }
  void remove(Watch* watch) {
    std::lock_guard lock(mutex_);
    watches_.remove(watch);
  }

  void stop() override {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  Serving::ServingStatus status() const { return services_.health().ready ? Serving::SERVING : Serving::NOT_SERVING; }

  void look() {
    std::unique_lock lock(mutex_);
    while (!stopped_) {
      if (watches_.empty())
        wake_.wait(lock);
      else
        wake_.wait_for(lock, std::chrono::milliseconds(250));
      if (stopped_) return;
      Serving::ServingStatus now = status();
      for (Watch* w : watches_) w->update(now);
    }
  }

  Services& services_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<Watch*> watches_;
  bool stopped_ = false;
  std::thread thread_;
};

void Watch::message() {
  pb::HealthCheckRequest in;
  if (Status parsed = parse(received_, in); !parsed.ok()) return end(to_grpc(parsed, call_));
  known_ = known(in.service());
  owner_.add(this);
}

Watch::~Watch() { owner_.remove(this); }

}  // namespace

std::unique_ptr<HealthService> HealthService::create(Door& door, Services& services) {
  return std::make_unique<HealthServiceImpl>(door, services);
}

}  // namespace kvasir::server::rpc
