// How the model's makers sample it (generation_config.json) holds for what a request leaves unset, and for no more.
#include "tests/server/contract_fixture.h"

namespace kvasir::server {
namespace {

class GenerationConfig : public ContractFixture {
 protected:
  GenerationConfig() : ContractFixture(options()) {}
  static ServerOptions options() {
    ServerOptions o;
    o.sampling.temperature = 0.6f;
    o.sampling.top_k = 20;
    o.sampling.repetition_penalty = 1.25f;
    o.sampling_json = "{\"top_k\":20}";
    return o;
  }
  void expect(const Outcome& out, float temperature, int32_t top_k, float penalty) {
    ASSERT_EQ(out.code, Code::ok) << out.protocol << ": " << out.message;
    const model::SamplingParams s = engine_.last().sampling;
    EXPECT_EQ(s.temperature, temperature) << out.protocol;
    EXPECT_EQ(s.top_k, top_k) << out.protocol;
    EXPECT_EQ(s.repetition_penalty, penalty) << out.protocol;
  }
};

TEST_F(GenerationConfig, HoldsForWhatIsUnset) {
  expect(send(v1_request()), 0.6f, 20, 1.25f);
  expect(send(infer_request()), 0.6f, 20, 1.25f);
  expect(complete(R"("seed":1)"), 0.6f, 20, 1.25f);
  expect(chat(R"("seed":1)"), 0.6f, 20, 1.25f);
}

TEST_F(GenerationConfig, WhatIsSetIsTheClients) {
  V1 r = v1_request();
  r.mutable_sampling()->set_temperature(0);
  r.mutable_sampling()->set_top_k(0);
  expect(send(r), 0, 0, 1.25f);
  Infer infer = infer_request();
  add_text(infer, "sampling_parameters", R"({"temperature":1,"top_k":-1})");
  expect(send(infer), 1, 0, 1.25f);
  expect(complete(R"("temperature":0,"repetition_penalty":1)"), 0, 20, 1);
  expect(chat(R"("temperature":1,"top_k":-1)"), 1, 0, 1.25f);
}

// Its clients fill in what is missing themselves, from what the server says of the model.
TEST_F(GenerationConfig, IsToldToClientsOfVllm) {
  auto stub = vllm::grpc::engine::VllmEngine::NewStub(channel_);
  grpc::ClientContext call;
  vllm::grpc::engine::GetModelInfoResponse info;
  ASSERT_TRUE(stub->GetModelInfo(&call, {}, &info).ok());
  EXPECT_EQ(info.default_sampling_params_json(), R"({"top_k":20})");
  expect(send(vllm_request()), 1, 0, 1);
}

}  // namespace
}  // namespace kvasir::server
