// A gRPC server whose delays are known, and what the tests of the load client share.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "client/load.h"
#include "kvasir.grpc.pb.h"

namespace kvasir::client {

using Ms = std::chrono::milliseconds;

class SlowServer final : public v1::Inference::Service {
 public:
  SlowServer(Ms first, Ms gap) : first_(first), gap_(gap) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~SlowServer() override { kill(); }
  void kill() {
    if (server_) server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* r,
                        grpc::ServerWriter<v1::GenerateResponse>* out) override {
    if (r->prompt() == "refuse") return {grpc::StatusCode::RESOURCE_EXHAUSTED, "the queue is full"};
    const auto begin = std::chrono::steady_clock::now();
    auto next = begin + first_, last = begin;
    v1::GenerateResponse m;
    for (uint32_t i = 0; i < r->max_tokens() && !context->IsCancelled(); ++i) {
      if (first_.count() + gap_.count() > 0) std::this_thread::sleep_until(next);
      next += gap_;
      m.mutable_delta()->clear_tokens();
      m.mutable_delta()->add_tokens()->set_id(i);
      m.mutable_delta()->set_text(r->prompt().substr(i % r->prompt().size(), 1) + (flaky && calls == 0 ? "!" : ""));
      const auto now = std::chrono::steady_clock::now();
      {
        std::lock_guard lock(mutex_);
        (i == 0 ? firsts : gaps).push_back(std::chrono::duration<double>(now - last).count());
      }
      last = now;
      out->Write(m);
    }
    ++calls;
    if (r->prompt() == "forget the end") return grpc::Status::OK;
    if (r->prompt() == "cancel") m.mutable_finished()->set_reason(v1::GenerateResponse_Finished_Reason_CANCELLED);
    m.mutable_finished()->mutable_usage()->set_completion_tokens(r->max_tokens());
    m.mutable_finished()->mutable_usage()->set_prompt_tokens(7);
    out->Write(m);
    return grpc::Status::OK;
  }

  bool flaky = false;
  std::atomic<int> calls{0};
  std::vector<double> firsts, gaps;  // as this server kept them: a busy machine wakes sleepers late

 private:
  std::mutex mutex_;
  Ms first_, gap_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

inline Workload same_prompt(int tokens, const std::string& text = "some words") {
  Workload w;
  w.prompts = {{text, tokens}};
  return w;
}

inline std::atomic<bool> never{false};

}  // namespace kvasir::client
