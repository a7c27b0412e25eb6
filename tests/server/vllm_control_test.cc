// vllm.Control as Dynamo drives it: what is served, adapters, ends and drains.
#include <gmock/gmock.h>

#include "tests/server/vllm_inference_fixture.h"
#include "vllm_control.grpc.pb.h"

namespace kvasir::server {
namespace {

using testing::HasSubstr;

class VllmControl : public VllmInference {
 protected:
  explicit VllmControl(ServerOptions options = {}) : VllmInference(std::move(options)) {}
  void SetUp() override {
    VllmInference::SetUp();
    control_ = pb::Control::NewStub(channel_);
  }
  template <class Method>
  grpc::Status with(Method method) {
    grpc::ClientContext c;
    return method(&c);
  }
  std::unique_ptr<pb::Control::Stub> control_;
};

TEST_F(VllmControl, AbortEndsOnesOwnAndAsOftenAsOneLikes) {
  pb::GenerateRequest r = text("A");
  r.set_request_id("a");
  r.mutable_kv()->set_cache_salt("hang");
  grpc::ClientContext call;
  auto reader = stub_->GenerateStream(&call, r);
  ASSERT_TRUE(engine_.wait_open(1));
  pb::AbortRequest in;
  for (const char* id : {"a", "never-was"}) in.add_request_ids(id);
  pb::AbortResponse none;
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(with([&](auto* c) { return control_->Abort(c, in, &none); }).ok());
  auto all = read_all<pb::GenerateResponse>(*reader);
  EXPECT_TRUE(reader->Finish().ok());
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all.back().outputs().finish_info().finish_reason(), pb::FinishInfo::ABORTED);
  EXPECT_TRUE(all_gone());
}

TEST_F(VllmControl, ADisconnectEndsTheRequest) {
  pb::GenerateRequest r = text("A");
  r.mutable_kv()->set_cache_salt("hang");
  grpc::ClientContext streamed, whole;
  auto reader = stub_->GenerateStream(&streamed, r);
  ASSERT_TRUE(engine_.wait_open(1));
  streamed.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(all_gone());
  std::thread asking([&] {
    pb::GenerateResponse out;
    EXPECT_EQ(stub_->Generate(&whole, r, &out).error_code(), grpc::CANCELLED);
  });
  EXPECT_TRUE(engine_.wait_open(1));
  whole.TryCancel();
  asking.join();
  EXPECT_TRUE(all_gone());
}

TEST_F(VllmControl, SaysWhatIsServed) {
  pb::ServerInfo server;
  ASSERT_TRUE(with([&](auto* c) { return control_->GetServerInfo(c, {}, &server); }).ok());
  EXPECT_EQ(server.kv_block_size(), 16u);
  EXPECT_EQ(server.total_kv_blocks(), 100u);
  EXPECT_EQ(server.max_model_len(), 128u);
  EXPECT_EQ(server.max_running_requests(), 64u);
  EXPECT_EQ(server.max_batched_tokens(), 512u);
  EXPECT_EQ(server.parallelism().tensor_parallel_size(), 1u);
  EXPECT_EQ(server.parallelism().world_size(), 1u);
  EXPECT_FALSE(server.rl_capabilities().sleep_mode_enabled());
  EXPECT_NE(server.engine_version(), "");
  pb::ServerInfo again;
  ASSERT_TRUE(with([&](auto* c) { return control_->GetServerInfo(c, {}, &again); }).ok());
  EXPECT_EQ(server.instance_id(), again.instance_id());
  pb::ModelInfo model;
  ASSERT_TRUE(with([&](auto* c) { return control_->GetModelInfo(c, {}, &model); }).ok());
  EXPECT_EQ(model.served_model_name(), "fake");
  EXPECT_TRUE(model.supports_text_input());
  EXPECT_TRUE(model.supports_token_ids_input());
  EXPECT_FALSE(model.supports_multimodal());
  EXPECT_EQ(model.reasoning_parser(), "");
  pb::GetKvEventSourcesResponse sources;
  ASSERT_TRUE(with([&](auto* c) { return control_->GetKvEventSources(c, {}, &sources); }).ok());
  EXPECT_EQ(sources.sources_size(), 0);
  engine_.set_state(engine::State::starting);
  EXPECT_EQ(with([&](auto* c) { return control_->GetModelInfo(c, {}, &model); }).error_code(), grpc::UNAVAILABLE);
}

TEST_F(VllmControl, AdaptersComeAndGo) {
  pb::LoadLoraRequest load;
  load.set_lora_name("sql");
  load.set_source_path("/adapters/sql");
  pb::LoadLoraResponse loaded;
  ASSERT_TRUE(with([&](auto* c) { return control_->LoadLora(c, load, &loaded); }).ok());
  EXPECT_EQ(loaded.adapter().source_path(), "/adapters/sql");
  EXPECT_GT(loaded.adapter().lora_id(), 0);
  pb::ListLorasResponse list;
  ASSERT_TRUE(with([&](auto* c) { return control_->ListLoras(c, {}, &list); }).ok());
  ASSERT_EQ(list.adapters_size(), 1);
  EXPECT_EQ(list.adapters(0).lora_id(), loaded.adapter().lora_id());
  pb::UnloadLoraRequest unload;
  pb::UnloadLoraResponse unloaded;
  auto drop = [&] { return with([&](auto* c) { return control_->UnloadLora(c, unload, &unloaded); }); };
  EXPECT_THAT(drop().error_message(), HasSubstr("lora_name is empty"));
  unload.set_lora_name("sql");
  ASSERT_TRUE(drop().ok());
  EXPECT_EQ(unloaded.adapter().lora_id(), loaded.adapter().lora_id());
  EXPECT_EQ(drop().error_code(), grpc::NOT_FOUND);
  load.set_lora_name("fake");
  EXPECT_EQ(with([&](auto* c) { return control_->LoadLora(c, load, &loaded); }).error_code(), grpc::ALREADY_EXISTS);
  load.clear_source_path();
  EXPECT_THAT(with([&](auto* c) { return control_->LoadLora(c, load, &loaded); }).error_message(),
              HasSubstr("source_path is empty"));
}

TEST_F(VllmControl, NeitherPausesNorTakesWeights) {
  pb::IsPausedResponse paused;
  ASSERT_TRUE(with([&](auto* c) { return control_->IsPaused(c, {}, &paused); }).ok());
  EXPECT_FALSE(paused.paused());
  pb::IsSleepingResponse sleeping;
  ASSERT_TRUE(with([&](auto* c) { return control_->IsSleeping(c, {}, &sleeping); }).ok());
  EXPECT_FALSE(sleeping.sleeping());
  pb::PauseGenerationRequest pause;
  pause.set_mode(pb::PAUSE_MODE_WAIT);
  pb::PauseGenerationResponse none;
  EXPECT_EQ(with([&](auto* c) { return control_->PauseGeneration(c, pause, &none); }).error_code(),
            grpc::UNIMPLEMENTED);
  pb::GetWeightVersionResponse version;
  const grpc::Status weights = with([&](auto* c) { return control_->GetWeightVersion(c, {}, &version); });
  EXPECT_EQ(weights.error_code(), grpc::UNIMPLEMENTED);
  EXPECT_THAT(weights.error_message(), HasSubstr("weights"));
  pb::ShutdownResponse bye;
  EXPECT_EQ(with([&](auto* c) { return control_->Shutdown(c, {}, &bye); }).error_code(), grpc::UNIMPLEMENTED);
}

class VllmControlOptions : public VllmControl {
 protected:
  static ServerOptions told(std::atomic<int>* drains) {
    ServerOptions o;
    o.kv_events = {"tcp://*:5557", "tcp://*:5558", "kv@here@fake", 4096, 10000};
    o.on_drain = [drains] { ++*drains; };
    o.tool_parser = "hermes";
    o.model_path = "/models/m.gguf";
    o.model_source = "org/repo";
    return o;
  }
  VllmControlOptions() : VllmControl(told(&drains_)) {}
  std::atomic<int> drains_{0};
};

TEST_F(VllmControlOptions, ShutdownDrainsAndEventsHaveAnAddress) {
  pb::GetKvEventSourcesResponse sources;
  ASSERT_TRUE(with([&](auto* c) { return control_->GetKvEventSources(c, {}, &sources); }).ok());
  ASSERT_EQ(sources.sources_size(), 1);
  EXPECT_EQ(sources.sources(0).transport(), "zmq");
  EXPECT_EQ(sources.sources(0).endpoint(), "tcp://*:5557");
  EXPECT_EQ(sources.sources(0).replay_endpoint(), "tcp://*:5558");
  EXPECT_EQ(sources.sources(0).topic(), "kv@here@fake");
  EXPECT_EQ(sources.sources(0).encoding(), "msgpack");
  EXPECT_EQ(sources.sources(0).buffer_steps(), 4096u);
  EXPECT_EQ(sources.sources(0).hwm(), 10000u);
  pb::ModelInfo model;
  ASSERT_TRUE(with([&](auto* c) { return control_->GetModelInfo(c, {}, &model); }).ok());
  EXPECT_EQ(model.tool_call_parser(), "hermes");
  EXPECT_EQ(model.model_id(), "org/repo");  // Dynamo reads tokenizer and template there
  pb::ShutdownResponse bye;
  ASSERT_TRUE(with([&](auto* c) { return control_->Shutdown(c, {}, &bye); }).ok());
  EXPECT_EQ(drains_, 1);
}

}  // namespace
}  // namespace kvasir::server
