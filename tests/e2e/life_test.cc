// The life of a server process: bad models, SIGTERM under load, a second signal, kill -9 and back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "health.grpc.pb.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/streams.h"

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

TEST(Life, SigtermUnderLoadLosesNothingAndExitsZero) {
  ServerProcess server(slow_model());
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  std::vector<std::unique_ptr<StreamReader>> streams;
  for (int i = 0; i < 20; ++i)
    streams.push_back(std::make_unique<StreamReader>(*stub, greedy("number " + std::to_string(i), 40, true)));
  std::this_thread::sleep_for(milliseconds(300));
  server.signal(SIGTERM);
  ASSERT_TRUE(server.said("draining"));
  for (auto& s : streams) {
    s->wait();
    EXPECT_TRUE(s->status.ok()) << s->status.error_message();
    EXPECT_EQ(s->tokens.size(), 40u);
  }
  EXPECT_EQ(server.wait(), 0) << server.log();
}

TEST(Life, ASecondSignalCutsShort) {
  ServerProcess server(slow_model());
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  StreamReader endless(*stub, greedy("on and on", 1500, true));
  std::this_thread::sleep_for(milliseconds(200));
  server.signal(SIGTERM);
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_FALSE(endless.done());
  auto began = Clock::now();
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0) << server.log();
  EXPECT_LT(Clock::now() - began, milliseconds(3000));
  endless.wait();
  EXPECT_EQ(endless.status.error_code(), grpc::StatusCode::UNAVAILABLE) << endless.status.error_message();
}

TEST(Life, TheDrainTimeIsALimit) {
  auto arguments = slow_model();
  arguments.insert(arguments.end(), {"--drain-seconds", "0.5"});
  ServerProcess server(arguments);
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  StreamReader endless(*stub, greedy("on and on", 1500, true));
  std::this_thread::sleep_for(milliseconds(200));
  server.signal(SIGTERM);
  endless.wait();
  EXPECT_EQ(endless.status.error_code(), grpc::StatusCode::UNAVAILABLE) << endless.status.error_message();
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

TEST(Life, AStuckStepTurnsHealthAndBackWhenItMoves) {
  std::string model = kSlow;
  model.replace(model.find("step_ms=20"), 10, "step_ms=4000");
  ServerProcess server({"--model", model, "--kv-memory", "16MiB", "--threads", "1", "--watchdog-seconds", "1"});
  ASSERT_TRUE(server.ready()) << server.log();
  auto health =
      grpc::health::v1::Health::NewStub(grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials()));
  auto serving = [&] {
    grpc::ClientContext context;
    grpc::health::v1::HealthCheckResponse response;
    grpc::Status s = health->Check(&context, {}, &response);
    return s.ok() && response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
  };
  EXPECT_TRUE(serving());
  auto began = Clock::now();
  StreamReader one(*connect(server.address()), greedy("hello", 1, true));
  while (serving() && Clock::now() - began < milliseconds(3500)) std::this_thread::sleep_for(milliseconds(20));
  EXPECT_LT(Clock::now() - began, milliseconds(1500));  // the watchdog's second, and a busy machine
  one.wait();
  EXPECT_TRUE(one.status.ok()) << one.status.error_message();
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_TRUE(serving());
}

TEST(Life, IdleItTakesNoProcessorTime) {
  ServerProcess server(slow_model());
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  StreamReader reader(*stub, greedy("hello", 3, true));
  reader.wait();
  std::this_thread::sleep_for(milliseconds(500));
  double before = server.cpu_seconds();
  std::this_thread::sleep_for(milliseconds(5000));
  EXPECT_LE(server.cpu_seconds() - before, 0.0101);  // one tick of the clock that counts it
}

}  // namespace
}  // namespace kvasir::e2e
