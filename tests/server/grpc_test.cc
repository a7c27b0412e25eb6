// kvasir.v1 and grpc.health.v1 over the wire.
#include <gmock/gmock.h>

#include <thread>

#include "health.grpc.pb.h"
#include "kvasir.grpc.pb.h"
#include "tests/server/grpc_fixture.h"

namespace kvasir::server {
namespace {

namespace pb = kvasir::v1;
using testing::ElementsAre;
using testing::HasSubstr;

class KvasirV1Test : public GrpcFixture {
 protected:
  void SetUp() override {
    GrpcFixture::SetUp();
    stub_ = pb::Inference::NewStub(channel_);
  }
  std::pair<std::vector<pb::GenerateResponse>, grpc::Status> generate(const pb::GenerateRequest& request) {
    grpc::ClientContext call;
    auto reader = stub_->Generate(&call, request);
    auto all = read_all<pb::GenerateResponse>(*reader);
    return {std::move(all), reader->Finish()};
  }
  std::unique_ptr<pb::Inference::Stub> stub_;
};

TEST_F(KvasirV1Test, StartedDeltasFinished) {
  pb::GenerateRequest request;
  request.set_prompt("hey");
  request.set_request_id("r1");
  request.mutable_sampling()->set_seed(0);
  request.set_logprobs(2);
  request.set_echo(true);
  auto [events, status] = generate(request);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(events.size(), 5u);  // the token that stopped it is not shown
  const auto& started = events[0].started();
  EXPECT_EQ(started.request_id(), "r1");
  EXPECT_EQ(started.seed(), 0u);
  EXPECT_EQ(started.prompt_tokens(), 3u);
  EXPECT_EQ(started.cached_tokens(), 2u);
  EXPECT_EQ(started.prompt_text(), "hey");
  ASSERT_EQ(started.prompt_size(), 3);
  EXPECT_EQ(started.prompt(1).id(), unsigned('e'));
  EXPECT_EQ(events[1].delta().text(), "h");
  EXPECT_FLOAT_EQ(events[1].delta().tokens(0).logprob(), -0.25f);
  EXPECT_EQ(events[1].delta().tokens(0).top_size(), 2);
  const auto& end = events[4].finished();
  EXPECT_EQ(end.reason(), pb::GenerateResponse::Finished::STOP_TOKEN);
  EXPECT_EQ(end.stop_token_id(), 256u);
  EXPECT_TRUE(end.last());
  EXPECT_EQ(end.usage().completion_tokens(), 4u);
  EXPECT_TRUE(all_gone());
}

TEST_F(KvasirV1Test, PresenceIsSeen) {
  pb::GenerateRequest request;
  request.mutable_tokens()->add_ids(65);
  auto [first, ok] = generate(request);
  ASSERT_TRUE(ok.ok());
  EXPECT_FLOAT_EQ(engine_.last().sampling.temperature, 1.0f);
  EXPECT_FALSE(engine_.last().max_tokens);
  EXPECT_TRUE(engine_.last().skip_special);
  EXPECT_EQ(first[0].started().seed(), engine_.last().sampling.seed);  // drawn, and reported

  request.mutable_sampling()->set_temperature(0);
  request.set_max_tokens(0);
  request.set_n(2);
  request.set_skip_special_tokens(false);
  auto [second, ok2] = generate(request);
  ASSERT_TRUE(ok2.ok());
  EXPECT_FLOAT_EQ(engine_.last().sampling.temperature, 0.0f);
  EXPECT_EQ(engine_.last().max_tokens, 0);
  EXPECT_FALSE(engine_.last().skip_special);
  EXPECT_EQ(second.size(), 3u);  // Started and two Finished
  EXPECT_FALSE(second[1].finished().last());
}

TEST_F(KvasirV1Test, RefusalsKeepTheirCodeAndWords) {
  pb::GenerateRequest request;
  EXPECT_EQ(generate(request).second.error_code(), grpc::INVALID_ARGUMENT);
  request.set_prompt("x");
  request.mutable_sampling()->set_temperature(-1);
  auto status = generate(request).second;
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("temperature is -1; it must be a number from 0 to 100"));
  request.mutable_sampling()->set_temperature(0);
  request.set_n(0);
  EXPECT_EQ(generate(request).second.error_code(), grpc::INVALID_ARGUMENT);
  request.set_n(1);
  request.set_cache_salt("fail");
  auto [events, failed] = generate(request);
  EXPECT_EQ(events.size(), 2u);
  EXPECT_EQ(failed.error_code(), grpc::INTERNAL);
  engine_.set_state(engine::State::starting);
  EXPECT_EQ(generate(request).second.error_code(), grpc::UNAVAILABLE);
  EXPECT_TRUE(all_gone());
}

TEST_F(KvasirV1Test, ADisconnectCancels) {
  pb::GenerateRequest request;
  request.set_prompt("x");
  request.set_cache_salt("hang");
  grpc::ClientContext call;
  auto reader = stub_->Generate(&call, request);
  pb::GenerateResponse first;
  ASSERT_TRUE(reader->Read(&first));
  EXPECT_EQ(engine_.open(), 1);
  call.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(all_gone());
}

TEST_F(KvasirV1Test, TheDeadlineTravels) {
  pb::GenerateRequest request;
  request.set_prompt("x");
  request.set_cache_salt("hang");
  // On a busy machine all the time may be over before the call gets there: then with more of it.
  for (auto time = std::chrono::milliseconds(300); engine_.asked() == 0 && time.count() < 60'000; time *= 2) {
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + time);
    call.AddMetadata("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    auto reader = stub_->Generate(&call, request);
    auto events = read_all<pb::GenerateResponse>(*reader);
    EXPECT_EQ(reader->Finish().error_code(), grpc::DEADLINE_EXCEEDED);
    EXPECT_TRUE(all_gone());
  }
  ASSERT_GT(engine_.asked(), 0u);
  EXPECT_TRUE(engine_.last().deadline);
  EXPECT_EQ(engine_.last().trace_parent, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
  EXPECT_TRUE(all_gone());
}

TEST_F(KvasirV1Test, CancelByIdFromAnotherCall) {
  pb::GenerateRequest request;
  request.set_prompt("x");
  request.set_request_id("mine");
  request.set_cache_salt("hang");
  grpc::ClientContext call;
  auto reader = stub_->Generate(&call, request);
  pb::GenerateResponse event;
  ASSERT_TRUE(reader->Read(&event));
  auto cancel = [&](const std::string& id) {
    grpc::ClientContext c;
    pb::CancelRequest in;
    pb::CancelResponse out;
    in.set_request_id(id);
    EXPECT_TRUE(stub_->Cancel(&c, in, &out).ok());
    return out.found();
  };
  EXPECT_FALSE(cancel("other"));
  EXPECT_TRUE(cancel("mine"));
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_EQ(event.finished().reason(), pb::GenerateResponse::Finished::CANCELLED);
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(all_gone());
  EXPECT_FALSE(cancel("mine"));
}

TEST_F(KvasirV1Test, ASlowReaderHoldsBackItsOwnStreamOnly) {
  pb::GenerateRequest request;
  request.set_prompt("x");
  request.set_cache_salt("flood");
  grpc::ClientContext call;
  auto reader = stub_->Generate(&call, request);
  pb::GenerateResponse event;
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_TRUE(engine_.rests());  // nobody spins, nobody buffers
  pb::GenerateRequest other;
  other.set_prompt("quick");
  EXPECT_TRUE(generate(other).second.ok());
  call.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(all_gone());
}

TEST_F(KvasirV1Test, UnaryMethods) {
  {
    grpc::ClientContext c;
    pb::TokenizeRequest in;
    pb::TokenizeResponse out;
    in.set_text("ab");
    ASSERT_TRUE(stub_->Tokenize(&c, in, &out).ok());
    EXPECT_THAT(out.ids(), ElementsAre(97, 98));
    EXPECT_THAT(out.pieces(), ElementsAre("a", "b"));
  }
  {
    grpc::ClientContext c;
    pb::TokenizeResponse out;
    auto status = stub_->Tokenize(&c, {}, &out);
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("set text or chat"));
  }
  {
    engine_.use_template("{{ messages[0].role }}={{ messages[0].content }}");  // as HTTP has it
    grpc::ClientContext c;
    pb::TokenizeRequest in;
    pb::TokenizeResponse out;
    auto& message = *in.mutable_chat()->add_messages();
    message.set_role("developer");
    message.set_content("x");
    ASSERT_TRUE(stub_->Tokenize(&c, in, &out).ok());
    EXPECT_THAT(out.pieces(), ElementsAre("s", "y", "s", "t", "e", "m", "=", "x"));
  }
  {
    grpc::ClientContext c;
    pb::DetokenizeRequest in;
    pb::DetokenizeResponse out;
    in.add_ids(104);
    ASSERT_TRUE(stub_->Detokenize(&c, in, &out).ok());
    EXPECT_EQ(out.text(), "h");
  }
  {
    grpc::ClientContext c;
    pb::DetokenizeRequest in;
    pb::DetokenizeResponse out;
    in.add_ids(4294967295u);
    auto status = stub_->Detokenize(&c, in, &out);
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("4294967295"));
  }
  {
    grpc::ClientContext c;
    pb::ListModelsResponse out;
    ASSERT_TRUE(stub_->ListModels(&c, {}, &out).ok());
    EXPECT_EQ(out.models(0).id(), "fake");
    EXPECT_EQ(out.models(0).context_length(), 128u);
  }
  {
    grpc::ClientContext c;
    pb::GetStatsResponse out;
    ASSERT_TRUE(stub_->GetStats(&c, {}, &out).ok());
    EXPECT_EQ(out.state(), "serving");
    EXPECT_EQ(out.pages_free(), 60);
  }
}

TEST_F(KvasirV1Test, ManyStreamsAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 25; ++i) {
        pb::GenerateRequest request;
        std::string prompt = cat("stream ", t, " number ", i);
        request.set_prompt(prompt);
        auto [events, status] = generate(request);
        std::string text;
        for (auto& e : events) text += e.delta().text();
        good += status.ok() && text == prompt;
      }
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(good, 200);
  EXPECT_TRUE(all_gone());
}

class HealthTest : public GrpcFixture {};

TEST_F(HealthTest, CheckAndWatchFollowTheEngine) {
  namespace h = grpc::health::v1;
  auto stub = h::Health::NewStub(channel_);
  auto check = [&](const std::string& service, h::HealthCheckResponse& out) {
    grpc::ClientContext c;
    h::HealthCheckRequest in;
    in.set_service(service);
    return stub->Check(&c, in, &out).error_code();
  };
  h::HealthCheckResponse out;
  EXPECT_EQ(check("", out), grpc::OK);
  EXPECT_EQ(out.status(), h::HealthCheckResponse::SERVING);
  EXPECT_EQ(check("kvasir.v1.Inference", out), grpc::OK);
  EXPECT_EQ(check("no.such", out), grpc::NOT_FOUND);
  grpc::ClientContext call;
  auto watch = stub->Watch(&call, {});
  ASSERT_TRUE(watch->Read(&out));
  EXPECT_EQ(out.status(), h::HealthCheckResponse::SERVING);
  engine_.set_state(engine::State::stuck);
  ASSERT_TRUE(watch->Read(&out));
  EXPECT_EQ(out.status(), h::HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(check("", out), grpc::OK);
  EXPECT_EQ(out.status(), h::HealthCheckResponse::NOT_SERVING);
  engine_.set_state(engine::State::serving);
  ASSERT_TRUE(watch->Read(&out));
  EXPECT_EQ(out.status(), h::HealthCheckResponse::SERVING);
  server_->stop();  // with a watch open
  EXPECT_FALSE(watch->Read(&out));
}

}  // namespace
}  // namespace kvasir::server
