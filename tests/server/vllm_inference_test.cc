// vllm.Inference and vllm.Control as Dynamo drives them.
#include <gmock/gmock.h>

#include "tests/server/grpc_fixture.h"
#include "vllm_control.grpc.pb.h"
#include "vllm_inference.grpc.pb.h"

namespace kvasir::server {
namespace {

namespace pb = vllm;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

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

TEST_F(VllmInference, GenerateAnswersAllInOne) {
  pb::GenerateRequest r = text("AB");
  r.mutable_response()->set_output_token_ids(true);
  r.mutable_response()->set_prompt_token_ids(true);
  auto [out, status] = generate(r);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(out.prompt_info().num_prompt_tokens(), 2u);
  EXPECT_THAT(out.prompt_info().token_ids(), ElementsAre(65, 66));
  EXPECT_EQ(out.outputs().text(), "AB");
  EXPECT_EQ(out.outputs().num_tokens(), 2u);
  EXPECT_THAT(out.outputs().token_ids(), ElementsAre(65, 66));
  EXPECT_EQ(out.outputs().finish_info().finish_reason(), pb::FinishInfo::STOP);
  EXPECT_EQ(out.outputs().finish_info().eos_token_id(), 256u);
  EXPECT_EQ(out.outputs().finish_info().num_output_tokens(), 3u);
}

// Without text the ids are all that were drawn, and what was not asked for is not sent.
TEST_F(VllmInference, OnlyWhatIsAskedForIsSent) {
  pb::GenerateRequest r = text("AB");
  r.mutable_response()->set_output_text(false);
  r.mutable_response()->set_output_token_ids(true);
  auto [ids, status] = generate(r);
  ASSERT_TRUE(status.ok());
  EXPECT_THAT(ids.outputs().token_ids(), ElementsAre(65, 66, 256));
  EXPECT_EQ(ids.outputs().text(), "");
  EXPECT_EQ(ids.outputs().finish_info().num_output_tokens(), 3u);
  EXPECT_FALSE(engine_.last().detokenize);
  auto [plain, ok] = generate(text("AB"));
  ASSERT_TRUE(ok.ok());
  EXPECT_THAT(plain.prompt_info().token_ids(), IsEmpty());
  EXPECT_THAT(plain.outputs().token_ids(), IsEmpty());
  EXPECT_THAT(plain.outputs().logprobs(), IsEmpty());
}

TEST_F(VllmInference, AStreamBeginsWithThePromptAndEndsEachSequence) {
  pb::GenerateRequest r = text("AB");
  r.mutable_sampling()->set_num_sequences(2);
  r.mutable_stopping()->set_max_new_tokens(2);
  pb::ResponseOptions& shape = *r.mutable_response();
  shape.set_output_token_ids(true);
  shape.set_output_logprobs(true);
  shape.mutable_output_candidates()->set_top_n(2);
  shape.set_prompt_logprobs(true);
  auto [all, status] = stream(r);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_GE(all.size(), 4u);
  EXPECT_EQ(all[0].prompt_info().num_prompt_tokens(), 2u);
  EXPECT_THAT(all[0].prompt_info().logprobs(), ElementsAre(0, -0.5));
  EXPECT_THAT(all[0].prompt_info().ranks(), ElementsAre(0, 0));
  EXPECT_EQ(all[0].prompt_info().candidate_tokens_size(), 2);
  EXPECT_FALSE(all[0].has_outputs());
  std::map<uint32_t, std::vector<uint32_t>> ids;
  std::map<uint32_t, std::string> texts;
  std::map<uint32_t, int> ends;
  for (size_t i = 1; i < all.size(); ++i) {
    const pb::SequenceOutput& o = all[i].outputs();
    EXPECT_FALSE(all[i].has_prompt_info());
    EXPECT_EQ(ends[o.index()], 0);
    EXPECT_EQ(o.num_tokens(), uint32_t(o.token_ids_size()));
    EXPECT_EQ(o.logprobs_size(), o.token_ids_size());
    EXPECT_EQ(o.ranks_size(), o.token_ids_size());
    ASSERT_EQ(o.candidate_tokens_size(), o.token_ids_size());
    if (o.token_ids_size() > 0) {
      EXPECT_EQ(o.candidate_tokens(0).tokens_size(), 2);
      EXPECT_EQ(o.candidate_tokens(0).tokens(1).id(), 1u);
      EXPECT_EQ(o.candidate_tokens(0).tokens(1).rank(), 2u);
    }
    for (uint32_t id : o.token_ids()) ids[o.index()].push_back(id);
    texts[o.index()] += o.text();
    if (o.has_finish_info()) {
      ++ends[o.index()];
      EXPECT_EQ(o.finish_info().finish_reason(), pb::FinishInfo::LENGTH);
      EXPECT_EQ(o.finish_info().num_output_tokens(), 2u);
    }
  }
  for (uint32_t i : {0u, 1u}) {
    EXPECT_THAT(ids[i], ElementsAre(65, 66));
    EXPECT_EQ(texts[i], "AB");
    EXPECT_EQ(ends[i], 1);
  }
}

TEST_F(VllmInference, AStopTokenIsToldFromTheModelsEnd) {
  pb::GenerateRequest r = text("ABC");
  r.mutable_stopping()->add_stop_token_ids(66);
  auto [out, status] = generate(r);
  ASSERT_TRUE(status.ok());
  EXPECT_EQ(out.outputs().text(), "A");
  EXPECT_EQ(out.outputs().finish_info().stop_token_id(), 66u);
  EXPECT_EQ(out.outputs().finish_info().num_output_tokens(), 2u);
  r.mutable_stopping()->set_include_stop_strings(true);
  std::tie(out, status) = generate(r);
  EXPECT_TRUE(engine_.last().include_stop);
  EXPECT_EQ(out.outputs().finish_info().num_output_tokens(), 2u);
}

TEST_F(VllmInference, ZerosAreDefaultsAndEachFieldReachesTheEngine) {
  generate(text("A"));
  engine::Request r = engine_.last();
  EXPECT_FLOAT_EQ(r.sampling.temperature, 0);  // as vLLM's server
  EXPECT_FLOAT_EQ(r.sampling.top_p, 1);
  EXPECT_FLOAT_EQ(r.sampling.repetition_penalty, 1);
  EXPECT_FALSE(r.max_tokens);
  EXPECT_TRUE(r.detokenize);
  EXPECT_TRUE(r.skip_special);
  EXPECT_EQ(r.n, 1);
  EXPECT_EQ(r.sampling.logprobs, -1);
  EXPECT_EQ(r.prompt_logprobs, -1);

  pb::GenerateRequest all;
  for (uint32_t id : {70, 71, 72}) all.mutable_token_ids()->add_ids(id);
  all.set_request_id("r");
  all.set_model("fake");
  all.set_temperature(0.5);
  all.mutable_sampling()->set_top_k(3);
  all.mutable_sampling()->set_top_p(0.25);
  all.mutable_sampling()->set_min_p(0.125);
  all.mutable_sampling()->set_seed(0);
  all.mutable_decoding()->set_presence_penalty(1);
  all.mutable_decoding()->set_frequency_penalty(-1);
  all.mutable_decoding()->set_repetition_penalty(1.5);
  (*all.mutable_decoding()->mutable_logit_bias())[5] = 2;
  all.mutable_decoding()->add_allowed_token_ids(71);
  all.mutable_decoding()->set_regex("[a-z]");
  all.mutable_stopping()->set_max_new_tokens(7);
  all.mutable_stopping()->set_min_new_tokens(2);
  all.mutable_stopping()->add_stop_strings("x");
  all.mutable_stopping()->set_ignore_eos(true);
  all.mutable_response()->set_prompt_logprobs(true);
  all.mutable_response()->mutable_prompt_candidates()->set_top_n(4);
  all.mutable_response()->set_output_logprobs(true);
  all.mutable_response()->set_skip_special_tokens(false);
  all.mutable_kv()->set_cache_salt("mine");
  all.set_priority(-3);
  all.set_truncate_prompt_tokens(2);
  all.set_session_id("s");
  ASSERT_TRUE(generate(all).second.ok()) << generate(all).second.error_message();
  r = engine_.last();
  EXPECT_EQ(r.id, "r");
  EXPECT_THAT(r.prompt, ElementsAre(71, 72));
  EXPECT_FLOAT_EQ(r.sampling.temperature, 0.5);
  EXPECT_EQ(r.sampling.top_k, 3);
  EXPECT_FLOAT_EQ(r.sampling.top_p, 0.25);
  EXPECT_FLOAT_EQ(r.sampling.min_p, 0.125);
  EXPECT_EQ(r.sampling.seed, 0u);
  EXPECT_FLOAT_EQ(r.sampling.presence_penalty, 1);
  EXPECT_FLOAT_EQ(r.sampling.frequency_penalty, -1);
  EXPECT_FLOAT_EQ(r.sampling.repetition_penalty, 1.5);
  EXPECT_THAT(r.sampling.logit_bias, ElementsAre(std::pair(5, 2.0f)));
  EXPECT_THAT(r.allowed_tokens, ElementsAre(71));
  EXPECT_EQ(r.grammar.kind, text::GrammarSpec::Kind::regex);
  EXPECT_EQ(r.max_tokens, 7);
  EXPECT_EQ(r.min_tokens, 2);
  EXPECT_THAT(r.stop_strings, ElementsAre("x"));
  EXPECT_TRUE(r.ignore_eos);
  EXPECT_EQ(r.prompt_logprobs, 4);
  EXPECT_EQ(r.sampling.logprobs, 0);
  EXPECT_FALSE(r.skip_special);
  EXPECT_EQ(r.cache_salt, "mine");
  EXPECT_EQ(r.priority, -3);
}

TEST_F(VllmInference, EachStructureIsAGrammar) {
  using Kind = text::GrammarSpec::Kind;
  auto kind = [&](const std::function<void(pb::DecodingParameters&)>& set) {
    pb::GenerateRequest r = text("A");
    set(*r.mutable_decoding());
    EXPECT_TRUE(generate(r).second.ok());
    return engine_.last().grammar;
  };
  EXPECT_EQ(kind([](auto& d) { d.set_json("{}"); }).kind, Kind::json_schema);
  EXPECT_EQ(kind([](auto& d) { d.set_grammar("start: \"a\""); }).kind, Kind::lark);
  EXPECT_EQ(kind([](auto& d) { d.set_json_object(true); }).kind, Kind::json_object);
  EXPECT_EQ(kind([](auto& d) { d.set_json_object(false); }).kind, Kind::none);
  EXPECT_EQ(kind([](auto& d) { d.set_structural_tag(R"({"format":{"type":"any_text"}})"); }).kind,
            Kind::structural_tag);
  EXPECT_THAT(kind([](auto& d) { d.mutable_choice()->add_choices("yes"); }).choices, ElementsAre("yes"));
}

TEST_F(VllmInference, ABypassedCacheIsSharedWithNobody) {
  pb::GenerateRequest r = text("A");
  r.mutable_kv()->set_bypass_prefix_cache(true);
  ASSERT_TRUE(generate(r).second.ok());
  const std::string first = engine_.last().cache_salt;
  ASSERT_TRUE(generate(r).second.ok());
  EXPECT_NE(first, "");
  EXPECT_NE(engine_.last().cache_salt, first);
}

TEST_F(VllmInference, AnAdapterByItsNameOrAsTheModel) {
  (void)*engine_.load_adapter("sql", "/adapters/sql");
  pb::GenerateRequest r = text("A");
  r.set_lora_name("sql");
  ASSERT_TRUE(generate(r).second.ok());
  EXPECT_EQ(engine_.last().adapter, "sql");
  r.set_lora_name("law");
  EXPECT_EQ(generate(r).second.error_code(), grpc::NOT_FOUND);
  r.clear_lora_name();
  r.set_model("sql");
  ASSERT_TRUE(generate(r).second.ok());
  EXPECT_EQ(engine_.last().adapter, "sql");
}

TEST_F(VllmInference, WhatIsNotServedIsRefusedByName) {
  auto refused = [&](const char* field, const char* value, const std::function<void(pb::GenerateRequest&)>& set) {
    pb::GenerateRequest r = text("A");
    set(r);
    for (const grpc::Status& status : {generate(r).second, stream(r).second}) {
      EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT) << field;
      EXPECT_THAT(status.error_message(), AllOf(HasSubstr(field), HasSubstr(value)));
    }
  };
  refused("media", "text only", [](auto& r) { r.add_media(); });
  refused("kv_transfer_params", "unset", [](auto& r) { r.mutable_kv()->mutable_kv_transfer_params(); });
  refused("ec_transfer_params", "unset", [](auto& r) { r.mutable_kv()->mutable_ec_transfer_params(); });
  refused("prompt", "token_ids", [](auto& r) { r.clear_text(); });
  refused("output_candidates", "token ids", [](auto& r) {
    r.mutable_response()->set_output_logprobs(true);
    r.mutable_response()->mutable_output_candidates()->mutable_token_ids()->add_ids(1);
  });
  refused("prompt_candidates", "-1", [](auto& r) {
    r.mutable_response()->set_prompt_logprobs(true);
    r.mutable_response()->mutable_prompt_candidates()->set_all(true);
  });
  refused("output_candidates", "asked for",
          [](auto& r) { r.mutable_response()->mutable_output_candidates()->set_top_n(2); });
  refused("output_candidates", "21", [](auto& r) {
    r.mutable_response()->set_output_logprobs(true);
    r.mutable_response()->mutable_output_candidates()->set_top_n(21);
  });
  refused("cache_salt", "300", [](auto& r) {
    r.mutable_kv()->set_cache_salt(std::string(300, 's'));
    r.mutable_kv()->set_bypass_prefix_cache(true);
  });
  pb::GenerateRequest two = text("A");
  two.mutable_sampling()->set_num_sequences(2);
  EXPECT_THAT(generate(two).second.error_message(), HasSubstr("num_sequences is 2"));
  EXPECT_TRUE(engine_.requests.empty());
}

TEST_F(VllmInference, FailsWithTheEnginesStatus) {
  pb::GenerateRequest r = text("A");
  r.mutable_kv()->set_cache_salt("fail");
  for (const grpc::Status& status : {generate(r).second, stream(r).second}) {
    EXPECT_EQ(status.error_code(), grpc::INTERNAL);
    EXPECT_EQ(status.error_message(), "the script says so");
  }
}

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
  pb::ShutdownResponse bye;
  ASSERT_TRUE(with([&](auto* c) { return control_->Shutdown(c, {}, &bye); }).ok());
  EXPECT_EQ(drains_, 1);
}

}  // namespace
}  // namespace kvasir::server
