// The life of a server process: bad models, SIGTERM under load, a second signal, kill -9 and back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "health.grpc.pb.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/streams.h"
#include "tests/server/http_client.h"
#include "vllm_engine.grpc.pb.h"

namespace kvasir::e2e {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr const char* kSlow =
    "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260,step_ms=20";

std::vector<std::string> slow_model() { return {"--model", kSlow, "--kv-memory", "16MiB", "--threads", "1"}; }

TEST(Life, AModelThatIsNotThereIsOneMessageAndExitCodeOne) {
  ServerProcess server({"--model", "/nonexistent.gguf"});
  EXPECT_EQ(server.wait(), 1);
  EXPECT_THAT(server.log(), HasSubstr("/nonexistent.gguf"));
}

TEST(Life, WhatHasNoEffectHereIsSaidAtTheStart) {
  std::vector<std::string> arguments = slow_model();
  arguments.insert(arguments.end(), {"--thinking-token-budget", "9", "--model-source", "/nonexistent", "--host",
                                     "localhost", "--host", "127.0.0.1"});
  ServerProcess server(arguments);
  ASSERT_TRUE(server.ready()) << server.log();
  EXPECT_THAT(server.log(), HasSubstr("thinking_token_budget is without effect"));
  EXPECT_THAT(server.log(), HasSubstr("model_source is no folder on this machine"));
  EXPECT_THAT(server.log(), HasSubstr("--host is given more than once"));
}

TEST(Life, ALostRankIsSaidByHealthAndEndsWhatWaitsForIt) {
  const std::string model =
      "dummy:llama,layers=1,hidden=64,heads=2,kv_heads=2,ffn=64,vocab=260,step_ms=20,lost_rank=1,lost_step=10";
  ServerProcess server({"--model", model, "--ranks", "2", "--kv-memory", "16MiB", "--threads", "2"});
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  StreamReader first(*stub, greedy("one", 200, true)), second(*stub, greedy("two", 200, true));
  for (StreamReader* s : {&first, &second}) {
    s->wait();
    EXPECT_EQ(s->status.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_THAT(s->status.error_message(), HasSubstr("rank 1 of 2 is lost"));
  }
  server::RawClient http(server.http_port());
  http.send(server::RawClient::get("/health"));
  const auto health = http.read();
  EXPECT_EQ(health.status, 503);
  EXPECT_THAT(health.body, HasSubstr("rank 1 of 2 is lost"));
  StreamReader late(*stub, greedy("three", 4, true));
  late.wait();
  EXPECT_EQ(late.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0) << server.log();
}

TEST(Life, ADraftModelServesAndIsCounted) {
  const std::string model = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260";
  ServerProcess server(
      {"--model", model + ",step_ms=4", "--draft-model", model, "--kv-memory", "1MiB", "--threads", "1"});
  ASSERT_TRUE(server.ready()) << server.log();
  EXPECT_THAT(server.log(), HasSubstr("draft model ready"));
  server::RawClient client(server.http_port());
  client.send(server::RawClient::post("/v1/completions",
                                      R"({"prompt":"Why?","max_tokens":60,"temperature":0,"ignore_eos":true})"));
  const auto answer = client.read();
  EXPECT_EQ(answer.status, 200);
  EXPECT_THAT(answer.body, HasSubstr("\"completion_tokens\":60"));
  EXPECT_THAT(answer.body, ::testing::Not(HasSubstr("\"accepted_prediction_tokens\":0")));
  server::RawClient asks(server.http_port());
  asks.send("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
  const std::string metrics = asks.read().body;
  EXPECT_THAT(metrics, HasSubstr("kvasir_draft_model_up 1"));
  EXPECT_THAT(metrics, HasSubstr("kvasir_drafted_tokens_total{source=\"model\"} "));
  EXPECT_THAT(metrics, ::testing::Not(HasSubstr("kvasir_drafted_tokens_accepted_total{source=\"model\"} 0\n")));
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0) << server.log();

  ServerProcess refused(
      {"--model", model, "--draft-model", "dummy:llama,layers=1,hidden=64,vocab=300", "--threads", "1"});
  EXPECT_EQ(refused.wait(), 1);
  EXPECT_THAT(refused.log(), HasSubstr("it has 300 tokens, the model 260"));
}

TEST(Life, SigtermUnderLoadLosesNothingAndExitsZero) {
  ServerProcess server(slow_model());
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  std::vector<std::unique_ptr<StreamReader>> streams;
  for (int i = 0; i < 20; ++i)
    streams.push_back(std::make_unique<StreamReader>(*stub, greedy("number " + std::to_string(i), 40, true)));
  ASSERT_TRUE(eventually(*stub, [](const auto& stats) { return stats.requests() == 20; }));
  server.signal(SIGTERM);
  ASSERT_TRUE(server.said("draining"));
  for (auto& s : streams) {
    s->wait();
    EXPECT_TRUE(s->status.ok()) << s->status.error_message();
    EXPECT_EQ(s->tokens.size(), 40u);
  }
  EXPECT_EQ(server.wait(), 0) << server.log();
}

// The terminal it was started from has closed.
TEST(Life, SighupDrainsToo) {
  ServerProcess server(slow_model());
  ASSERT_TRUE(server.ready()) << server.log();
  StreamReader stream(*connect(server.address()), greedy("on", 40, true));
  ASSERT_TRUE(stream.begun());
  server.signal(SIGHUP);
  stream.wait();
  EXPECT_TRUE(stream.status.ok()) << stream.status.error_message();
  EXPECT_EQ(stream.tokens.size(), 40u);
  EXPECT_EQ(server.wait(), 0) << server.log();
  EXPECT_THAT(server.log(), HasSubstr("SIGHUP"));
}

TEST(Life, UnderNohupSighupMeansNothing) {
  ::signal(SIGHUP, SIG_IGN);  // is inherited
  ServerProcess server(slow_model());
  ::signal(SIGHUP, SIG_DFL);
  ASSERT_TRUE(server.ready()) << server.log();
  server.signal(SIGHUP);
  StreamReader stream(*connect(server.address()), greedy("on", 3, true));
  stream.wait();
  EXPECT_TRUE(stream.status.ok()) << stream.status.error_message();
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
  EXPECT_THAT(server.log(), HasSubstr("SIGTERM"));
}

TEST(Life, ASecondSignalCutsShort) {
  ServerProcess server(slow_model());
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  StreamReader endless(*stub, greedy("on and on", 1500, true));
  ASSERT_TRUE(endless.begun());
  server.signal(SIGTERM);
  ASSERT_TRUE(server.said("draining"));
  EXPECT_FALSE(endless.done());
  auto began = Clock::now();
  // One that follows within 300 ms is taken for the first: again, until one counts.
  for (int i = 0; i < 100 && !server.said("cut short by a second signal", milliseconds(400)); ++i)
    server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0) << server.log();
  EXPECT_LT(Clock::now() - began, milliseconds(3000));
  endless.wait();
  EXPECT_EQ(endless.status.error_code(), grpc::StatusCode::UNAVAILABLE) << endless.status.error_message();
  EXPECT_LT(endless.tokens.size(), 1500u);
}

// As a preStop hook does it, which may ask again, and after which the first signal comes.
TEST(Life, WhoIsAskedToDrainIsCutShortByASecondSignalOnly) {
  for (const bool cut : {false, true}) {
    ServerProcess server(slow_model());
    ASSERT_TRUE(server.ready()) << server.log();
    StreamReader stream(*connect(server.address()), greedy("on and on", cut ? 1500 : 100, true));
    ASSERT_TRUE(stream.begun());
    server::RawClient first(server.http_port()), second(server.http_port());
    first.send(server::RawClient::post("/drain", "{}"));
    EXPECT_EQ(first.read().status, 202);
    ASSERT_TRUE(server.said("\"signal\":\"POST /drain\""));
    second.send(server::RawClient::post("/drain", "{}"));
    second.read();  // or nobody listens any more
    std::this_thread::sleep_for(milliseconds(400));
    server.signal(SIGTERM);
    if (cut)
      for (int i = 0; i < 100 && !server.said("cut short by a second signal", milliseconds(400)); ++i)
        server.signal(SIGTERM);
    stream.wait();
    EXPECT_EQ(stream.status.ok(), !cut) << stream.status.error_message();
    if (!cut) {
      EXPECT_EQ(stream.tokens.size(), 100u);
    }
    EXPECT_EQ(server.wait(), 0) << server.log();
  }
}

TEST(Life, TheDrainTimeIsALimit) {
  auto arguments = slow_model();
  arguments.insert(arguments.end(), {"--drain-seconds", "0.5"});
  ServerProcess server(arguments);
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  StreamReader endless(*stub, greedy("on and on", 1500, true));
  ASSERT_TRUE(endless.begun());
  server.signal(SIGTERM);
  endless.wait();
  EXPECT_EQ(endless.status.error_code(), grpc::StatusCode::UNAVAILABLE) << endless.status.error_message();
  EXPECT_LT(endless.tokens.size(), 1500u);
  EXPECT_EQ(server.wait(), 0) << server.log();
}

TEST(Life, KilledAndStartedAgainItAnswers) {
  {
    ServerProcess first(slow_model());
    ASSERT_TRUE(first.ready());
    first.signal(SIGKILL);
    EXPECT_EQ(first.wait(), -SIGKILL);
  }
  ServerProcess again(slow_model());
  ASSERT_TRUE(again.ready());
  StreamReader reader(*connect(again.address()), greedy("hello", 3, true));
  reader.wait();
  EXPECT_TRUE(reader.status.ok());
}

// What each probe says: gRPC's health by call and by watch, HTTP, VllmEngine.
struct Probes {
  explicit Probes(ServerProcess& server)
      : http_port(server.http_port()),
        channel(grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials())),
        health(grpc::health::v1::Health::NewStub(channel)),
        vllm(vllm::grpc::engine::VllmEngine::NewStub(channel)),
        watching(health->Watch(&watch_context, {})),
        watcher([this] { watch(); }) {}
  ~Probes() {
    watch_context.TryCancel();
    watcher.join();
  }

  void watch() {
    grpc::health::v1::HealthCheckResponse r;
    while (watching->Read(&r)) watched = r.status() == grpc::health::v1::HealthCheckResponse::SERVING;
  }
  bool checked() const {
    grpc::ClientContext context;
    grpc::health::v1::HealthCheckResponse r;
    grpc::Status s = health->Check(&context, {}, &r);
    return s.ok() && r.status() == grpc::health::v1::HealthCheckResponse::SERVING;
  }
  bool engine() const {
    grpc::ClientContext context;
    vllm::grpc::engine::HealthCheckResponse r;
    return vllm->HealthCheck(&context, {}, &r).ok() && r.healthy();
  }
  int get(const char* path) const {
    server::RawClient client(http_port);
    client.send(server::RawClient::get(path));
    return client.read().status;
  }
  // All of them, or none: 1, 0; -1 while they are on their way.
  int state() const {
    int yes = int(checked()) + int(engine()) + int(get("/health") == 200) + int(get("/ready") == 200) + int(watched);
    return yes == 5 ? 1 : yes == 0 ? 0 : -1;
  }
  // How long it took until all say so; more than the limit if they did not.
  milliseconds until(int wanted, milliseconds limit) const {
    auto began = Clock::now();
    while (state() != wanted && Clock::now() - began < limit) std::this_thread::sleep_for(milliseconds(10));
    return std::chrono::duration_cast<milliseconds>(Clock::now() - began);
  }

  const int http_port;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<grpc::health::v1::Health::Stub> health;
  std::unique_ptr<vllm::grpc::engine::VllmEngine::Stub> vllm;
  grpc::ClientContext watch_context;
  std::atomic<bool> watched{false};
  std::unique_ptr<grpc::ClientReader<grpc::health::v1::HealthCheckResponse>> watching;
  std::thread watcher;
};

TEST(Life, AStuckStepTurnsEveryProbeAndBackWhenItMoves) {
  std::string model = kSlow;
  model.replace(model.find("step_ms=20"), 10, "step_ms=8000");
  ServerProcess server({"--model", model, "--kv-memory", "16MiB", "--threads", "1", "--watchdog-seconds", "2"});
  ASSERT_TRUE(server.ready()) << server.log();
  Probes probes(server);
  ASSERT_LT(probes.until(1, milliseconds(5000)), milliseconds(5000));
  StreamReader one(*connect(server.address()), greedy("hello", 1, true));
  milliseconds turned = probes.until(0, milliseconds(7000));
  std::printf("stuck was told after %lld ms (watchdog 2 s)\n", static_cast<long long>(turned.count()));
  EXPECT_LT(turned, milliseconds(3500));  // two seconds, a quarter of one for the watch, and a busy machine
  EXPECT_GT(turned, milliseconds(1000));
  one.wait();
  EXPECT_TRUE(one.status.ok()) << one.status.error_message();
  EXPECT_LT(probes.until(1, milliseconds(5000)), milliseconds(5000));
}

TEST(Life, KilledAndStartedAgainItIsReadyWithinASecond) {
  if (!readable(default_model())) GTEST_SKIP() << "no model at " << default_model() << "; ./test fetches it";
  {
    ServerProcess first({"--model", default_model()});
    ASSERT_TRUE(first.ready());
    StreamReader reader(*connect(first.address()), greedy("hello", 50, true));
    first.signal(SIGKILL);
    EXPECT_EQ(first.wait(), -SIGKILL);
    reader.wait();
    EXPECT_FALSE(reader.status.ok());
  }
  auto began = Clock::now();
  ServerProcess again({"--model", default_model()});
  ASSERT_TRUE(again.ready());
  double took = std::chrono::duration<double>(Clock::now() - began).count(), cpu = again.cpu_seconds();
  std::printf("ready %.2f s after exec, having taken %.2f s of processor time\n", took, cpu);
  StreamReader reader(*connect(again.address()), greedy("hello", 3, true));
  reader.wait();
  EXPECT_TRUE(reader.status.ok());
#ifndef __SANITIZE_ADDRESS__
  const bool quiet = std::getenv("KVASIR_QUIET") != nullptr;  // by the clock only where nothing else runs
  EXPECT_TRUE(!quiet || took < 1.0) << took;
#endif
}

// Requests on both ports, of which some wait in the queue when the signal comes: each is answered whole.
TEST(Life, SigtermLosesNoAcceptedRequestOnEitherPort) {
  auto arguments = slow_model();
  arguments.insert(arguments.end(), {"--max-running", "8"});
  ServerProcess server(arguments);
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  std::vector<std::unique_ptr<StreamReader>> streams;
  std::vector<std::unique_ptr<server::RawClient>> clients;
  for (int i = 0; i < 12; ++i) {
    streams.push_back(std::make_unique<StreamReader>(*stub, greedy("number " + std::to_string(i), 30, true)));
    clients.push_back(std::make_unique<server::RawClient>(server.http_port()));
    clients.back()->send(server::RawClient::post(
        "/v1/completions",
        R"({"prompt":"x","max_tokens":30,"ignore_eos":true,"stream":)" + std::string(i % 2 ? "true" : "false") + "}"));
  }
  ASSERT_TRUE(eventually(*stub, [](const auto& stats) { return stats.requests() == 24; }));
  server.signal(SIGTERM);
  // The log says so a moment earlier.
  ASSERT_TRUE(eventually(*stub, [](const auto& stats) { return stats.state() == "draining"; }));
  StreamReader late(*stub, greedy("too late", 3, true));
  for (auto& s : streams) {
    s->wait();
    EXPECT_TRUE(s->status.ok()) << s->status.error_message();
    EXPECT_EQ(s->tokens.size(), 30u);
  }
  for (size_t i = 0; i < clients.size(); ++i) {
    auto a = clients[i]->read();
    EXPECT_EQ(a.status, 200);
    EXPECT_THAT(a.body, HasSubstr(i % 2 ? "data: [DONE]" : "\"completion_tokens\":30"));
  }
  late.wait();
  EXPECT_EQ(late.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server.wait(), 0) << server.log();
}

TEST(Life, DrainedOverHttpAsBySigterm) {
  ServerProcess server(slow_model());
  ASSERT_TRUE(server.ready()) << server.log();
  StreamReader one(*connect(server.address()), greedy("hello", 20, true));
  ASSERT_TRUE(one.begun());
  server::RawClient client(server.http_port());
  client.send(server::RawClient::post("/drain", "{}"));
  EXPECT_EQ(client.read().status, 202);
  one.wait();
  EXPECT_TRUE(one.status.ok()) << one.status.error_message();
  EXPECT_EQ(one.tokens.size(), 20u);
  EXPECT_EQ(server.wait(), 0) << server.log();
}

TEST(Life, IdleItTakesNoProcessorTime) {
  ServerProcess server(slow_model());
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  StreamReader reader(*stub, greedy("hello", 3, true));
  reader.wait();
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_LT(server.cpu_share(milliseconds(5000)), 0.001);
}

}  // namespace
}  // namespace kvasir::e2e
