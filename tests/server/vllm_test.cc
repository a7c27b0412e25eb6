// vllm.grpc.engine.VllmEngine as a gateway drives it.
#include <gmock/gmock.h>

#include "tests/server/grpc_fixture.h"
#include "vllm_engine.grpc.pb.h"

namespace kvasir::server {
namespace {

namespace pb = vllm::grpc::engine;
using testing::ElementsAre;
using testing::HasSubstr;

class VllmTest : public GrpcFixture {
 protected:
  void SetUp() override {
    GrpcFixture::SetUp();
    stub_ = pb::VllmEngine::NewStub(channel_);
  }
  std::pair<std::vector<pb::GenerateResponse>, grpc::Status> generate(const pb::GenerateRequest& request) {
    grpc::ClientContext call;
    auto reader = stub_->Generate(&call, request);
    auto all = read_all<pb::GenerateResponse>(*reader);
    return {std::move(all), reader->Finish()};
  }
  static pb::GenerateRequest tokens(std::initializer_list<uint32_t> ids) {
    pb::GenerateRequest r;
    for (uint32_t id : ids) r.mutable_tokenized()->add_input_ids(id);
    return r;
  }
  std::unique_ptr<pb::VllmEngine::Stub> stub_;
};

TEST_F(VllmTest, StreamGivesDeltasThenOneCompleteAnIndex) {
  pb::GenerateRequest r = tokens({65, 66});
  r.set_stream(true);
  r.mutable_sampling_params()->set_n(2);
  r.mutable_sampling_params()->set_logprobs(1);
  r.mutable_sampling_params()->set_prompt_logprobs(0);
  auto [all, status] = generate(r);
  ASSERT_TRUE(status.ok()) << status.error_message();
  std::map<uint32_t, std::vector<uint32_t>> deltas;
  std::map<uint32_t, int> completes;
  int input_logprobs = 0;
  for (const auto& m : all) {
    if (m.has_chunk()) {
      EXPECT_EQ(completes[m.chunk().index()], 0);
      for (uint32_t id : m.chunk().token_ids()) deltas[m.chunk().index()].push_back(id);
      EXPECT_EQ(m.chunk().output_logprobs().token_logprobs_size(), m.chunk().token_ids_size());
      EXPECT_EQ(m.chunk().output_logprobs().top_logprobs(0).values_size(), 1);
      input_logprobs += m.chunk().has_input_logprobs();
    } else {
      const auto& c = m.complete();
      ++completes[c.index()];
      EXPECT_THAT(c.output_ids(), ElementsAre(65, 66, 256));
      EXPECT_EQ(c.finish_reason(), "stop");
      EXPECT_EQ(c.prompt_tokens(), 2u);
      EXPECT_EQ(c.completion_tokens(), 3u);
      EXPECT_EQ(c.cached_tokens(), 2u);
    }
  }
  EXPECT_EQ(deltas.size(), 2u);
  EXPECT_THAT(deltas[1], ElementsAre(65, 66, 256));
  EXPECT_EQ(completes[0], 1);
  EXPECT_EQ(completes[1], 1);
  EXPECT_EQ(input_logprobs, 1);
}

TEST_F(VllmTest, WithoutStreamOnlyCompletes) {
  pb::GenerateRequest r = tokens({65, 66});
  r.mutable_sampling_params()->set_max_tokens(1);
  r.mutable_sampling_params()->set_prompt_logprobs(0);
  auto [all, status] = generate(r);
  ASSERT_TRUE(status.ok());
  ASSERT_EQ(all.size(), 1u);
  EXPECT_THAT(all[0].complete().output_ids(), ElementsAre(65));
  EXPECT_EQ(all[0].complete().finish_reason(), "length");
  ASSERT_EQ(all[0].complete().input_logprobs().token_logprobs_size(), 2);
  EXPECT_FALSE(all[0].complete().input_logprobs().token_logprobs(0).has_value());
  EXPECT_TRUE(all[0].complete().input_logprobs().token_logprobs(1).has_value());
}

TEST_F(VllmTest, ZerosAreDefaultsButMaxTokensIsNot) {
  generate(tokens({65}));
  engine::Request r = engine_.last();
  EXPECT_FLOAT_EQ(r.sampling.temperature, 1);
  EXPECT_FLOAT_EQ(r.sampling.top_p, 1);
  EXPECT_FLOAT_EQ(r.sampling.repetition_penalty, 1);
  EXPECT_FALSE(r.max_tokens);
  EXPECT_FALSE(r.detokenize);
  pb::GenerateRequest zero = tokens({65});
  zero.mutable_sampling_params()->set_max_tokens(0);
  zero.mutable_sampling_params()->set_temperature(0);
  zero.mutable_sampling_params()->set_top_k(4294967295u);
  zero.mutable_sampling_params()->set_truncate_prompt_tokens(1);
  generate(zero);
  EXPECT_EQ(engine_.last().max_tokens, 0);
  EXPECT_FLOAT_EQ(engine_.last().sampling.temperature, 0);
  EXPECT_EQ(engine_.last().sampling.top_k, 0);
  zero = tokens({65, 66, 67});
  zero.mutable_sampling_params()->set_truncate_prompt_tokens(2);
  generate(zero);
  EXPECT_THAT(engine_.last().prompt, ElementsAre(66, 67));
}

TEST_F(VllmTest, WhatIsNotServedIsRefusedByName) {
  auto refused = [&](const char* field, const std::function<void(pb::GenerateRequest&)>& set) {
    pb::GenerateRequest r = tokens({65});
    set(r);
    auto status = generate(r).second;
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT) << field;
    EXPECT_THAT(status.error_message(), HasSubstr(field));
  };
  refused("mm_inputs", [](auto& r) { r.mutable_mm_inputs(); });
  refused("extra_mm_inputs", [](auto& r) { r.add_extra_mm_inputs(); });
  refused("media_refs", [](auto& r) { r.mutable_media_refs(); });
  refused("kv_transfer_params", [](auto& r) { r.mutable_kv_transfer_params(); });
  refused("kv_transfer_params_json", [](auto& r) { r.set_kv_transfer_params_json("{}"); });
  refused("data_parallel_rank", [](auto& r) { r.set_data_parallel_rank(1); });
  refused("structural tag nests 100 deep", [](auto& r) {
    r.mutable_sampling_params()->set_structural_tag(std::string(100, '[') + std::string(100, ']'));
  });
  refused("logprobs", [](auto& r) { r.mutable_sampling_params()->set_logprobs(-1); });
  refused("prompt_logprobs", [](auto& r) { r.mutable_sampling_params()->set_prompt_logprobs(-1); });
  refused("truncate_prompt_tokens", [](auto& r) { r.mutable_sampling_params()->set_truncate_prompt_tokens(0); });
  refused("logit_bias", [](auto& r) { (*r.mutable_sampling_params()->mutable_logit_bias())[-5] = 1; });
  refused("input", [](auto& r) { r.clear_input(); });
  EXPECT_TRUE(engine_.requests.empty());
}

TEST_F(VllmTest, AStructuralTagIsAGrammar) {
  pb::GenerateRequest r = tokens({65});
  r.mutable_sampling_params()->set_structural_tag(R"({"format":{"type":"any_text"}})");
  EXPECT_TRUE(generate(r).second.ok());
  EXPECT_EQ(engine_.last().grammar.kind, text::GrammarSpec::Kind::structural_tag);
  EXPECT_EQ(engine_.last().grammar.text, R"({"format":{"type":"any_text"}})");
}

TEST_F(VllmTest, AbortAndDisconnectTogether) {
  pb::GenerateRequest r = tokens({65});
  r.set_request_id("a");
  r.set_stream(true);
  engine_.hang_on(65);
  grpc::ClientContext call;
  auto reader = stub_->Generate(&call, r);
  ASSERT_TRUE(engine_.wait_open(1));
  auto abort = [&](std::initializer_list<const char*> ids) {
    grpc::ClientContext c;
    pb::AbortRequest in;
    pb::AbortResponse out;
    for (const char* id : ids) in.add_request_ids(id);
    EXPECT_TRUE(stub_->Abort(&c, in, &out).ok());
  };
  abort({"a", "never-was"});
  abort({"a"});
  pb::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.complete().finish_reason(), "abort");
  call.TryCancel();
  reader->Finish();
  EXPECT_TRUE(all_gone());
}

TEST_F(VllmTest, InfoLoadsHealthFlush) {
  auto with = [](auto method) {
    grpc::ClientContext c;
    return method(&c);
  };
  pb::GetModelInfoResponse model;
  ASSERT_TRUE(with([&](auto* c) { return stub_->GetModelInfo(c, {}, &model); }).ok());
  EXPECT_EQ(model.served_model_name(), "fake");
  EXPECT_EQ(model.max_context_length(), 128u);
  EXPECT_THAT(model.eos_token_ids(), ElementsAre(256));
  pb::GetServerInfoResponse server;
  ASSERT_TRUE(with([&](auto* c) { return stub_->GetServerInfo(c, {}, &server); }).ok());
  EXPECT_EQ(server.block_size(), 16);
  EXPECT_EQ(server.data_parallel_size(), 1);
  pb::GetLoadsResponse loads;
  ASSERT_TRUE(with([&](auto* c) { return stub_->GetLoads(c, {}, &loads); }).ok());
  EXPECT_DOUBLE_EQ(loads.loads(0).token_usage(), 0.4);
  EXPECT_EQ(loads.loads(0).max_total_num_tokens(), 1600);
  EXPECT_DOUBLE_EQ(loads.loads(0).gen_throughput(), 12.5);
  EXPECT_DOUBLE_EQ(loads.loads(0).cache_hit_rate(), 0.25);
  EXPECT_EQ(loads.loads(0).num_waiting_uncached_tokens(), 750);
  EXPECT_NE(loads.version(), "");
  pb::GetLoadsRequest sections;
  sections.add_include("core");
  sections.add_include("all");
  EXPECT_TRUE(with([&](auto* c) { return stub_->GetLoads(c, sections, &loads); }).ok());
  sections.add_include("weather");
  const grpc::Status unknown = with([&](auto* c) { return stub_->GetLoads(c, sections, &loads); });
  EXPECT_EQ(unknown.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(unknown.error_message(), HasSubstr("'weather'; it must be all, core"));
  pb::HealthCheckResponse health;
  ASSERT_TRUE(with([&](auto* c) { return stub_->HealthCheck(c, {}, &health); }).ok());
  EXPECT_TRUE(health.healthy());
  engine_.set_state(engine::State::stuck);
  ASSERT_TRUE(with([&](auto* c) { return stub_->HealthCheck(c, {}, &health); }).ok());
  EXPECT_FALSE(health.healthy());
  EXPECT_EQ(health.message(), "stuck");
  engine_.set_state(engine::State::serving);
  smg::grpc::common::FlushCacheResponse flush;
  ASSERT_TRUE(with([&](auto* c) { return stub_->FlushCache(c, {}, &flush); }).ok());
  EXPECT_TRUE(flush.success());
  EXPECT_EQ(engine_.flushes, 1);
  smg::grpc::common::ProfileResponse profile;
  EXPECT_EQ(with([&](auto* c) { return stub_->StartProfile(c, {}, &profile); }).error_code(), grpc::UNIMPLEMENTED);
  EXPECT_EQ(with([&](auto* c) { return stub_->StopProfile(c, {}, &profile); }).error_code(), grpc::UNIMPLEMENTED);
}

class KvEventsTest : public VllmTest {
 protected:
  using Kind = engine::CacheEvent::Kind;
  using Batch = smg::grpc::common::KvEventBatch;

  void SetUp() override {
    VllmTest::SetUp();
    engine_.events->name(0, "");
  }
  void stored(uint64_t hash, uint64_t parent, std::vector<int32_t> tokens) {
    engine_.events->add(0, {0, Kind::stored, hash, parent, std::move(tokens)});
  }
  void removed(uint64_t hash) { engine_.events->add(0, {0, Kind::removed, hash, 0, {}}); }

  struct Subscriber {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<Batch>> reader;
    ~Subscriber() { context.TryCancel(); }
    Batch next() {
      Batch batch;
      EXPECT_TRUE(reader->Read(&batch));
      return batch;
    }
    Batch next_with_events() {
      Batch batch = next();
      while (batch.load().load_only()) batch = next();
      return batch;
    }
  };
  std::unique_ptr<Subscriber> subscribe(uint64_t from, bool early_loads = false) {
    auto s = std::make_unique<Subscriber>();
    smg::grpc::common::SubscribeKvEventsRequest in;
    in.set_start_sequence_number(from);
    in.set_load_records_before_first_batch(early_loads);
    s->reader = stub_->SubscribeKvEvents(&s->context, in);
    s->reader->WaitForInitialMetadata();
    return s;
  }
};

TEST_F(KvEventsTest, AreNumberedAndCanBeAskedForAgain) {
  stored(11, 0, {1, 2});
  auto live = subscribe(2), replay = subscribe(1);
  stored(22, 11, {3, 4});
  removed(11);
  Batch batch = live->next_with_events();
  EXPECT_EQ(batch.sequence_number(), 2u);
  EXPECT_FALSE(batch.has_snapshot());
  const auto& e = batch.events(0).stored();
  EXPECT_EQ(e.parent_block_hash(), 11);
  EXPECT_EQ(e.blocks(0).block_hash(), 22);
  EXPECT_EQ(e.blocks(0).block_size(), 16);
  EXPECT_THAT(e.blocks(0).token_ids(), ElementsAre(3, 4));
  batch = live->next_with_events();
  EXPECT_EQ(batch.sequence_number(), 3u);
  EXPECT_THAT(batch.events(0).removed().block_hashes(), ElementsAre(11));
  for (uint64_t want : {1, 2, 3}) EXPECT_EQ(replay->next_with_events().sequence_number(), want);
}

TEST_F(KvEventsTest, WithoutACursorTheStateComesFirst) {
  stored(11, 0, {1, 2});
  stored(22, 11, {3, 4});
  stored(33, 0, {5, 6});
  removed(33);
  auto s = subscribe(0);
  Batch batch = s->next_with_events();
  EXPECT_EQ(batch.sequence_number(), 4u);
  EXPECT_EQ(batch.snapshot().index(), 0u);
  EXPECT_EQ(batch.snapshot().count(), 1u);
  EXPECT_EQ(batch.snapshot().blocks(), 2u);
  EXPECT_EQ(batch.snapshot().unknown_before(), 0u);
  ASSERT_EQ(batch.events_size(), 3);
  EXPECT_TRUE(batch.events(0).has_cleared());
  EXPECT_EQ(batch.events(1).stored().blocks(0).block_hash(), 11);
  EXPECT_EQ(batch.events(2).stored().parent_block_hash(), 11);
  EXPECT_EQ(batch.events(2).event_id(), 0u);
  removed(22);
  EXPECT_EQ(s->next_with_events().sequence_number(), 5u);
}

TEST_F(KvEventsTest, ACursorTheRingHasLostGetsTheState) {
  for (uint64_t i = 1; i <= 9; ++i) stored(i, 0, {int32_t(i)});  // the ring holds four
  auto s = subscribe(2);
  Batch batch = s->next_with_events();
  EXPECT_TRUE(batch.has_snapshot());
  EXPECT_EQ(batch.sequence_number(), 9u);
  EXPECT_EQ(batch.events_size(), 10);
  auto ahead = subscribe(50);  // of an engine that is no more
  Batch none;
  EXPECT_FALSE(ahead->reader->Read(&none));
  grpc::Status status = ahead->reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::OUT_OF_RANGE);
  EXPECT_THAT(status.error_message(), HasSubstr("start_sequence_number is 50"));
}

TEST_F(KvEventsTest, ALargeStateComesInChunksThatEndAtItsNumber) {
  for (uint64_t i = 1; i <= 300; ++i) stored(i, 0, std::vector<int32_t>(512, 7));
  auto s = subscribe(0);
  Batch batch = s->next_with_events();
  uint32_t count = batch.snapshot().count();
  EXPECT_EQ(count, 3u);
  size_t blocks = 0;
  for (uint32_t i = 0;; batch = s->next_with_events()) {
    EXPECT_EQ(batch.snapshot().index(), i);
    EXPECT_EQ(batch.sequence_number(), 300 - count + 1 + i);
    for (const auto& e : batch.events()) blocks += e.has_stored();
    if (++i == count) break;
  }
  EXPECT_EQ(blocks, 300u);
  removed(5);
  EXPECT_EQ(s->next_with_events().sequence_number(), 301u);
}

TEST_F(KvEventsTest, TheLoadIsToldBeforeTheFirstEventOnlyToThoseWhoAsked) {
  auto asked = subscribe(0, true), not_asked = subscribe(0, false);
  Batch batch = asked->next();
  EXPECT_EQ(batch.sequence_number(), 0u);
  EXPECT_TRUE(batch.load().load_only());
  EXPECT_EQ(batch.load().sample(), 1u);
  EXPECT_DOUBLE_EQ(batch.load().token_usage(), 0.4);
  EXPECT_DOUBLE_EQ(batch.load().gen_throughput(), 12.5);
  EXPECT_EQ(batch.load().waiting_uncached_tokens(), 750u);
  EXPECT_EQ(batch.events_size(), 0);
  stored(11, 0, {1, 2});
  batch = not_asked->next();
  EXPECT_EQ(batch.sequence_number(), 1u);
  EXPECT_EQ(batch.events_size(), 1);
  EXPECT_TRUE(batch.has_load());
  EXPECT_FALSE(batch.load().load_only());
}

}  // namespace
}  // namespace kvasir::server
