// Clients that ask for much and stop reading, on both ports of the real binary: their requests leave the batch, are
// ended after the limit and give their pages back, while somebody else's stream keeps its pace.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/e2e/server_process.h"
#include "tests/e2e/streams.h"
#include "tests/server/http_client.h"

namespace kvasir::e2e {
namespace {

using std::chrono::milliseconds;

constexpr const char* kModel =
    "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260,context=32768,step_ms=2";

class SlowReaders : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(server.ready()) << server.log();
    stub = connect(server.address());
    StreamReader alone(*stub, witness());
    alone.wait();
    ASSERT_TRUE(alone.status.ok()) << alone.status.error_message();
    right = alone.text;
  }
  static v1::GenerateRequest witness() { return greedy("the witness", 200, true); }

  v1::GetStatsResponse stats() {
    grpc::ClientContext context;
    v1::GetStatsResponse out;
    grpc::Status s = stub->GetStats(&context, {}, &out);
    EXPECT_TRUE(s.ok()) << s.error_message();
    return out;
  }
  // Whole answers of others, until all who are slow have been ended.
  void expect_ended(int slow) {
    v1::GetStatsResponse s;
    for (int i = 0; i < 200 && (s = stats()).failed() < slow; ++i) {
      StreamReader stream(*stub, witness());
      stream.wait();
      EXPECT_TRUE(stream.status.ok()) << stream.status.error_message();
      EXPECT_EQ(stream.text, right);
    }
    EXPECT_EQ(s.failed(), slow);
    for (int i = 0; i < 500 && (s.running() > 0 || s.pages_free() + s.pages_cached() < s.pages_total()); ++i) {
      std::this_thread::sleep_for(milliseconds(10));
      s = stats();
    }
    EXPECT_EQ(s.running(), 0);
    EXPECT_EQ(s.pages_free() + s.pages_cached(), s.pages_total());
    EXPECT_LT(server.cpu_share(milliseconds(1000)), 0.5) << "somebody spins for those who do not read";
  }

  ServerProcess server{{"--model", kModel, "--kv-memory", "64MiB", "--threads", "1", "--event-buffer", "16",
                        "--slow-reader-limit", "1", "--log-level", "info"}};
  std::unique_ptr<v1::Inference::Stub> stub;
  std::string right;
};

// More than the buffers of two kernels take, soon.
constexpr int kChoices = 8, kTokens = 20000;

TEST_F(SlowReaders, OverHttp) {
  std::string body = R"({"prompt":"slow","stream":true,"temperature":0,"ignore_eos":true,"logprobs":20,"n":)" +
                     std::to_string(kChoices) + ",\"max_tokens\":" + std::to_string(kTokens) + "}";
  std::vector<std::unique_ptr<server::RawClient>> slow;
  for (int i = 0; i < 3; ++i) {
    slow.push_back(std::make_unique<server::RawClient>(server.http_port(), 4096));
    ASSERT_TRUE(slow.back()->send(server::RawClient::post("/v1/completions", body)));
    ASSERT_TRUE(slow.back()->hears_within(std::chrono::seconds(20)));
  }
  expect_ended(3);
}

TEST_F(SlowReaders, OverGrpc) {
  auto request = greedy("slow", kTokens, true);
  request.set_n(kChoices);
  request.set_logprobs(20);
  struct Call {
    std::unique_ptr<v1::Inference::Stub> stub;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader;
  };
  std::vector<std::unique_ptr<Call>> slow;
  for (int i = 0; i < 3; ++i) {
    Call& c = *slow.emplace_back(std::make_unique<Call>());
    grpc::ChannelArguments own;  // a connection of its own
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    c.stub =
        v1::Inference::NewStub(grpc::CreateCustomChannel(server.address(), grpc::InsecureChannelCredentials(), own));
    c.reader = c.stub->Generate(&c.context, request);
    v1::GenerateResponse event;
    ASSERT_TRUE(c.reader->Read(&event));
  }
  expect_ended(3);
  for (auto& c : slow) {
    c->context.TryCancel();
    (void)c->reader->Finish();
  }
}

}  // namespace
}  // namespace kvasir::e2e
