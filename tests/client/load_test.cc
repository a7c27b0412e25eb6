// The client against a server whose delays are known: its figures must be those delays; both loops, one request a call
// and many, and a server that refuses or dies.
#include "client/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/figures.h"
#include "client/report.h"
#include "ppl_llm.grpc.pb.h"
#include "tests/client/slow_server.h"

namespace kvasir::client {
namespace {

using ::testing::HasSubstr;

TEST(OverGrpc, FiguresAreTheServersDelaysWithinTwoPercent) {
  SlowServer server(Ms(60), Ms(25));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 24;
  o.concurrency = 4;
  const client::LoadRun run = run_load(*target, same_prompt(12), o, never, {});
  const Figures f = figures_of(run, {});
  EXPECT_EQ(f.good, 24) << table_of(f);
  const Spread first = spread_of(server.firsts), gap = spread_of(server.gaps);
  EXPECT_GE(first.p50, 0.060);
  // The handler's own thread starts late on a busy machine, before its clock does: so the quickest of them.
  EXPECT_NEAR(f.ttft.curve.front(), first.curve.front(), 0.02 * first.p50);
  EXPECT_NEAR(f.itl.p50, gap.p50, 0.02 * gap.p50);
  EXPECT_NEAR(f.itl.mean, gap.mean, 0.02 * gap.mean);
  EXPECT_NEAR(f.tpot.mean, gap.mean, 0.02 * gap.mean);
  EXPECT_EQ(f.output_tokens, 24 * 12);
  EXPECT_EQ(f.prompt_tokens, 24 * 7);
}

TEST(OverGrpc, HalfAnAnswerIsNoAnswer) {
  SlowServer server(Ms(0), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 3;
  o.concurrency = 1;
  Workload w;
  w.prompts = {{"whole", 3}, {"forget the end", 3}, {"cancel", 3}};
  const Figures f = figures_of(run_load(*target, w, o, never, {}), {});
  EXPECT_EQ(f.good, 1);
  EXPECT_EQ(f.errors.count("INTERNAL: the call ended without this request's end"), 1u);
  EXPECT_EQ(f.errors.count("CANCELLED: the server cancelled the request"), 1u);
}

TEST(OverGrpc, AnOpenLoopDoesNotWaitForASlowServer) {
  SlowServer server(Ms(200), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 20;
  for (int i = 0; i < 20; ++i) o.due.push_back(i * 0.02);
  const client::LoadRun run = run_load(*target, same_prompt(1), o, never, {});
  const Figures f = figures_of(run, {});
  EXPECT_EQ(f.good, 20);
  EXPECT_LT(run.seconds, 3.0);  // one after the other would take four seconds
  EXPECT_GE(f.ttft.p50, 0.199);
}

TEST(OverGrpc, AServerKilledMidRunLeavesAPartialReport) {
  auto server = std::make_unique<SlowServer>(Ms(5), Ms(5));
  auto target = *make_target({"kvasir", server->address()});
  std::thread killer([&] {
    while (server->calls < 12) std::this_thread::sleep_for(Ms(2));  // four of them may not be answered yet
    server->kill();
  });
  LoadOptions o;
  o.requests = 100000;
  o.concurrency = 4;
  const client::LoadRun run = run_load(*target, same_prompt(4), o, never, {});
  killer.join();
  const Figures f = figures_of(run, {});
  EXPECT_TRUE(f.partial);
  EXPECT_THAT(f.why, HasSubstr("gone"));
  EXPECT_GE(f.good, 8);
  EXPECT_GE(f.failed, 3);  // 50 in a row, or a few for ten seconds
  EXPECT_EQ(f.good + f.failed, f.requests);
  EXPECT_LT(f.requests, 1000);
}

TEST(OverGrpc, RefusalsAreCountedByCause) {
  SlowServer server(Ms(0), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  Workload w = same_prompt(2);
  w.prompts.push_back({"refuse", 2});
  LoadOptions o;
  o.requests = 10;
  o.concurrency = 2;
  const Figures f = figures_of(run_load(*target, w, o, never, {}), {});
  EXPECT_EQ(f.good, 5);
  EXPECT_EQ(f.errors.at("RESOURCE_EXHAUSTED: the queue is full"), 5);
}

TEST(OverGrpc, LaterTurnsSayAllThatWasSaidBefore) {
  SlowServer server(Ms(0), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 6;
  o.concurrency = 1;
  o.turns = 3;
  o.turn_words = 4;
  const client::LoadRun run = run_load(*target, same_prompt(3, "hello"), o, never, {});
  ASSERT_EQ(run.records.size(), 6u);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(run.records[i].turn, i % 3);
    EXPECT_EQ(run.records[i].prompt, i / 3);
  }
  EXPECT_TRUE(run.records[1].asked.starts_with("hellohel "));
  EXPECT_TRUE(run.records[2].asked.starts_with(run.records[1].asked + run.records[1].text + " "));
}

TEST(OverGrpc, LaterTurnsAskWhatTheFileSays) {
  SlowServer server(Ms(0), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  Workload w = same_prompt(2, "hello");
  w.prompts[0].later = {"and then?"};
  LoadOptions o;
  o.requests = 3;
  o.concurrency = 1;
  o.turns = 3;
  o.turn_words = 1;
  const client::LoadRun run = run_load(*target, w, o, never, {});
  ASSERT_EQ(run.records.size(), 3u);
  EXPECT_EQ(run.records[1].asked, "hello" + run.records[0].text + " and then?");
  EXPECT_TRUE(run.records[2].asked.starts_with(run.records[1].asked + run.records[1].text + " "));  // a word of ours
}

TEST(OverGrpc, AnOpenLoopHoldsConversationsToo) {
  SlowServer server(Ms(0), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 6;
  o.turns = 2;
  o.due = {0, 0.02, 0.04};
  const client::LoadRun run = run_load(*target, same_prompt(3, "hello"), o, never, {});
  ASSERT_EQ(run.records.size(), 6u);
  int later = 0;
  for (const Record& r : run.records) {
    if (r.turn == 0) continue;
    ++later;
    const Record* first = nullptr;
    for (const Record& f : run.records) {
      if (f.turn == 0 && f.prompt == r.prompt) first = &f;
    }
    ASSERT_NE(first, nullptr);
    EXPECT_EQ(r.due, first->end);  // what the client adds between turns counts as latency
    EXPECT_TRUE(r.asked.starts_with("hello" + first->text + " "));
  }
  EXPECT_EQ(later, 3);
}

// Answers a call's requests in turns, refuses those that ask it to, and forgets the last one of an odd number.
class PplServer final : public ppl::llm::proto::LLMService::Service {
 public:
  PplServer() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~PplServer() override { server_->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  grpc::Status Generation(grpc::ServerContext*, const ppl::llm::proto::BatchedRequest* in,
                          grpc::ServerWriter<ppl::llm::proto::BatchedResponse>* out) override {
    {
      std::lock_guard lock(mutex_);
      sizes.push_back(in->req_size());
    }
    const int answered = in->req_size() > 1 && in->req_size() % 2 ? in->req_size() - 1 : in->req_size();
    for (uint32_t token = 0; token < 2; ++token) {
      ppl::llm::proto::BatchedResponse m;
      for (int i = 0; i < answered; ++i) {
        const auto& r = in->req(i);
        if (r.prompt() == "refuse" && token > 0) continue;
        auto* one = m.add_rsp();
        one->set_id(r.id());
        one->set_generated(r.prompt() == "refuse" ? "no" : r.prompt().substr(0, 1));
        one->set_status(r.prompt() == "refuse" ? ppl::llm::proto::FAILED
                        : token                ? ppl::llm::proto::FINISHED
                                               : ppl::llm::proto::PROCESSING);
      }
      out->Write(m);
    }
    return grpc::Status::OK;
  }
  std::vector<int> sizes;

 private:
  std::mutex mutex_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

TEST(OverGrpc, PplCarriesManyRequestsInOneCallAndEachEndsAlone) {
  PplServer server;
  auto target = *make_target({"ppl", server.address()});
  Workload w;
  w.prompts = {{"alpha", 5}, {"refuse", 2}, {"beta", 2}};
  LoadOptions o;
  o.requests = 7;
  o.due.assign(7, 0.0);
  o.batch = 4;
  o.keep_text = true;
  const client::LoadRun run = run_load(*target, w, o, never, {});
  std::sort(server.sizes.begin(), server.sizes.end());
  EXPECT_EQ(server.sizes, (std::vector<int>{3, 4}));
  ASSERT_EQ(run.records.size(), 7u);
  for (int i = 0; i < 7; ++i) {
    const Record& r = run.records[i];
    if (i == 6) {
      EXPECT_EQ(r.status.to_string(), "INTERNAL: the call ended without this request's end");
    } else if (r.prompt % 3 == 1) {
      EXPECT_EQ(r.status.to_string(), "UNKNOWN: no");
    } else {
      EXPECT_TRUE(r.status.ok()) << r.status.to_string();
      EXPECT_EQ(r.text, r.prompt % 3 == 0 ? "aa" : "bb");
      EXPECT_EQ(r.output_tokens, 2);
      EXPECT_EQ(output_of(r), r.prompt % 3 == 0 ? 5 : 2);  // an answer may carry several tokens: all it was allowed
    }
  }
}

}  // namespace
}  // namespace kvasir::client
