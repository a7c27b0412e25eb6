// Many streams through the real binary: complete, unmixed, and at what cost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

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
TEST(Streams, FiveHundredCostLittleBesideTheModel) {
  constexpr int kStreams = 500, kTokens = 60, kPrompts = 3;
  ServerProcess server({"--model",
                        "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260,step_ms=50",
                        "--max-running", "512", "--max-tokens-per-step", "1024", "--kv-memory", "64MiB", "--threads",
                        "1", "--log-level", "info"});
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  std::vector<v1::GenerateRequest> requests;
  for (int i = 0; i < kStreams; ++i)
    requests.push_back(greedy("stream " + std::to_string(i % kPrompts), kTokens, true));
  std::vector<std::string> alone;
  for (int i = 0; i < kPrompts; ++i) {
    StreamReader reader(*stub, requests[size_t(i)]);
    reader.wait();
    ASSERT_TRUE(reader.status.ok()) << reader.status.error_message();
    alone.push_back(reader.text);
  }
  double before = server.cpu_seconds();
  auto streams = start(*stub, requests);
  std::vector<double> gaps;
  uint64_t tokens = 0;
  for (size_t i = 0; i < streams.size(); ++i) {
    streams[i]->wait();
    ASSERT_TRUE(streams[i]->status.ok()) << i << ": " << streams[i]->status.error_message();
    EXPECT_EQ(streams[i]->text, alone[i % kPrompts]) << i;
    EXPECT_EQ(streams[i]->tokens.size(), size_t(kTokens)) << i;
    tokens += streams[i]->tokens.size();
    gaps.insert(gaps.end(), streams[i]->gaps.begin(), streams[i]->gaps.end());
  }
  double cpu = server.cpu_seconds() - before;
  std::sort(gaps.begin(), gaps.end());
  double p50 = gaps[gaps.size() / 2], p99 = gaps[gaps.size() * 99 / 100];
  std::printf("%llu tokens: %.1f us of the server's processor time each (model and all); ITL p50 %.1f p99 %.1f ms\n",
              static_cast<unsigned long long>(tokens), cpu / double(tokens) * 1e6, p50 * 1e3, p99 * 1e3);
  EXPECT_EQ(tokens, uint64_t(kStreams) * kTokens);
#ifndef __SANITIZE_ADDRESS__
  EXPECT_LE(cpu / double(tokens), 40e-6);
#endif
}

}  // namespace
}  // namespace kvasir::e2e
