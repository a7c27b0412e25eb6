// Many streams through the real binary: complete, unmixed, and at what cost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/e2e/http_streams.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/streams.h"

namespace kvasir::e2e {
namespace {

std::vector<std::unique_ptr<StreamReader>> start(v1::Inference::Stub& stub,
                                                 const std::vector<v1::GenerateRequest>& all) {
  std::vector<std::unique_ptr<StreamReader>> out;
  for (const auto& r : all) out.push_back(std::make_unique<StreamReader>(stub, r));
  return out;
}

TEST(Streams, AHundredAtOnceSayWhatEachSaysAlone) {
  if (!readable(default_model())) GTEST_SKIP() << "no model at " << default_model() << "; ./test fetches it";
  ServerProcess server({"--model", default_model(), "--max-running", "32", "--kv-memory", "512MiB"});
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  const char* prompts[] = {"Once upon a time", "The capital of France is", "Water boils at", "In the beginning",
                           "def fibonacci(n):"};
  std::vector<std::string> alone;
  for (const char* p : prompts) {
    StreamReader reader(*stub, greedy(p, 12));
    reader.wait();
    ASSERT_TRUE(reader.status.ok()) << reader.status.error_message();
    EXPECT_FALSE(reader.text.empty());
    alone.push_back(reader.text);
  }
  std::vector<v1::GenerateRequest> requests;
  for (int i = 0; i < 100; ++i) requests.push_back(greedy(prompts[i % 5], 12));
  auto streams = start(*stub, requests);
  for (size_t i = 0; i < streams.size(); ++i) {
    streams[i]->wait();
    ASSERT_TRUE(streams[i]->status.ok()) << i << ": " << streams[i]->status.error_message();
    EXPECT_EQ(streams[i]->text, alone[i % 5]) << i;
  }
}

// The model takes 50 ms a step and next to no arithmetic, so what is measured is everything else.
class Many : public ::testing::Test {
 protected:
  static constexpr int kStreams = 500, kTokens = 60, kPrompts = 3;

  static std::string prompt(int i) { return "stream " + std::to_string(i % kPrompts); }
  // Log-probabilities are asked for so that a token whose bytes are no character yet is an event too.
  static std::string body(int i) {
    return R"({"logprobs":0,"temperature":0,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true},"max_tokens":)" +
           std::to_string(kTokens) + R"(,"prompt":")" + prompt(i) + "\"}";
  }
  void SetUp() override {
    ASSERT_TRUE(server.ready()) << server.log();
    stub = connect(server.address());
    for (int i = 0; i < kPrompts; ++i) {
      StreamReader reader(*stub, greedy(prompt(i), kTokens, true));
      reader.wait();
      ASSERT_TRUE(reader.status.ok()) << reader.status.error_message();
      alone.push_back(reader.text);
    }
    before = server.cpu_seconds();
  }
  std::vector<std::unique_ptr<StreamReader>> over_grpc(int n) {
    std::vector<v1::GenerateRequest> requests;
    for (int i = 0; i < n; ++i) requests.push_back(greedy(prompt(i), kTokens, true));
    return start(*stub, requests);
  }
  static std::unique_ptr<HttpStreams> over_http(int port, int n) {
    std::vector<std::string> bodies;
    for (int i = 0; i < n; ++i) bodies.push_back(body(i));
    return std::make_unique<HttpStreams>(port, bodies);
  }
  void expect_right(std::vector<std::unique_ptr<StreamReader>> streams) {
    for (size_t i = 0; i < streams.size(); ++i) {
      streams[i]->wait();
      ASSERT_TRUE(streams[i]->status.ok()) << i << ": " << streams[i]->status.error_message();
      EXPECT_EQ(streams[i]->text, alone[i % kPrompts]) << i;
      EXPECT_EQ(streams[i]->tokens.size(), size_t(kTokens)) << i;
      tokens += int64_t(streams[i]->tokens.size());
      gaps.insert(gaps.end(), streams[i]->gaps.begin(), streams[i]->gaps.end());
    }
  }
  void expect_right(const std::vector<HttpStreams::Stream>& streams) {
    for (size_t i = 0; i < streams.size(); ++i) {
      EXPECT_TRUE(streams[i].finished) << i;
      EXPECT_EQ(streams[i].text, alone[i % kPrompts]) << i;
      EXPECT_EQ(streams[i].tokens, kTokens) << i;
      tokens += streams[i].tokens;
      gaps.insert(gaps.end(), streams[i].gaps.begin(), streams[i].gaps.end());
    }
  }
  void expect_cheap(int64_t streams) {
    double cpu = server.cpu_seconds() - before;
    std::sort(gaps.begin(), gaps.end());
    double p50 = gaps[gaps.size() / 2], p99 = gaps[gaps.size() * 99 / 100];
    std::printf("%lld tokens: %.1f us of the server's processor time each (model and all); ITL p50 %.1f p99 %.1f ms\n",
                static_cast<long long>(tokens), cpu / double(tokens) * 1e6, p50 * 1e3, p99 * 1e3);
    EXPECT_EQ(tokens, streams * kTokens);
#ifndef __SANITIZE_ADDRESS__
    EXPECT_LE(cpu / double(tokens), 40e-6);
#endif
    if (std::getenv("KVASIR_QUIET")) {  // clients and all: two processors that nobody else uses
      EXPECT_LE(p99, 0.075);
    }
  }

  ServerProcess server{{"--model",
                        "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260,step_ms=50",
                        "--max-running", "512", "--max-tokens-per-step", "1024", "--kv-memory", "64MiB", "--threads",
                        "1", "--log-level", "info"}};
  std::unique_ptr<v1::Inference::Stub> stub;
  std::vector<std::string> alone;
  std::vector<double> gaps;
  int64_t tokens = 0;
  double before = 0;
};

TEST_F(Many, FiveHundredCostLittleBesideTheModel) {
  expect_right(over_grpc(kStreams));
  expect_cheap(kStreams);
}

TEST_F(Many, OverBothPortsAtOnce) {
  auto http = over_http(server.http_port(), kStreams / 2);
  auto grpc = over_grpc(kStreams / 2);
  expect_right(http->read(std::chrono::seconds(60)));
  expect_right(std::move(grpc));
  expect_cheap(kStreams);
}

}  // namespace
}  // namespace kvasir::e2e
