// A server that speaks vllm.Inference, over a made-up engine.
#pragma once

#include "tests/server/grpc_fixture.h"
#include "vllm_inference.grpc.pb.h"

namespace kvasir::server {

namespace pb = vllm;

class VllmInference : public GrpcFixture {
 protected:
  explicit VllmInference(ServerOptions options = {}) : GrpcFixture(std::move(options)) {}
  void SetUp() override {
    GrpcFixture::SetUp();
    stub_ = pb::Inference::NewStub(channel_);
  }
  std::pair<pb::GenerateResponse, grpc::Status> generate(const pb::GenerateRequest& request) {
    grpc::ClientContext call;
    pb::GenerateResponse out;
    grpc::Status status = stub_->Generate(&call, request, &out);
    return {std::move(out), std::move(status)};
  }
  std::pair<std::vector<pb::GenerateResponse>, grpc::Status> stream(const pb::GenerateRequest& request) {
    grpc::ClientContext call;
    auto reader = stub_->GenerateStream(&call, request);
    auto all = read_all<pb::GenerateResponse>(*reader);
    return {std::move(all), reader->Finish()};
  }
  static pb::GenerateRequest text(const char* prompt) {
    pb::GenerateRequest r;
    r.set_text(prompt);
    return r;
  }
  std::unique_ptr<pb::Inference::Stub> stub_;
};

}  // namespace kvasir::server
