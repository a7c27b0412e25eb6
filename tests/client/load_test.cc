// The client against servers whose delays are known: its figures must be those delays.
#include "client/load.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <mutex>
#include <thread>

#include "client/bench.h"
#include "client/report.h"
#include "kvasir.grpc.pb.h"

namespace kvasir::client {
namespace {

using ::testing::HasSubstr;
using Ms = std::chrono::milliseconds;

class SlowServer final : public v1::Inference::Service {
 public:
  SlowServer(Ms first, Ms gap) : first_(first), gap_(gap) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~SlowServer() override { kill(); }
  void kill() {
    if (server_) server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* r,
                        grpc::ServerWriter<v1::GenerateResponse>* out) override {
    if (r->prompt() == "refuse") return {grpc::StatusCode::RESOURCE_EXHAUSTED, "the queue is full"};
    const auto begin = std::chrono::steady_clock::now();
    auto next = begin + first_, last = begin;
    v1::GenerateResponse m;
    for (uint32_t i = 0; i < r->max_tokens() && !context->IsCancelled(); ++i) {
      if (first_.count() + gap_.count() > 0) std::this_thread::sleep_until(next);
      next += gap_;
      m.mutable_delta()->clear_tokens();
      m.mutable_delta()->add_tokens()->set_id(i);
      m.mutable_delta()->set_text(r->prompt().substr(i % r->prompt().size(), 1) + (flaky && calls == 0 ? "!" : ""));
      const auto now = std::chrono::steady_clock::now();
      {
        std::lock_guard lock(mutex_);
        (i == 0 ? firsts : gaps).push_back(std::chrono::duration<double>(now - last).count());
      }
      last = now;
      out->Write(m);
    }
    ++calls;
    m.mutable_finished()->mutable_usage()->set_completion_tokens(r->max_tokens());
    m.mutable_finished()->mutable_usage()->set_prompt_tokens(7);
    out->Write(m);
    return grpc::Status::OK;
  }

  bool flaky = false;
  std::atomic<int> calls{0};
  std::vector<double> firsts, gaps;  // as this server kept them: a busy machine wakes sleepers late

 private:
  std::mutex mutex_;
  Ms first_, gap_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

Workload same_prompt(int tokens, const std::string& text = "some words") {
  Workload w;
  w.prompts = {{text, tokens}};
  return w;
}

std::atomic<bool> never{false};

TEST(OverGrpc, FiguresAreTheServersDelaysWithinTwoPercent) {
  SlowServer server(Ms(60), Ms(25));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 24;
  o.concurrency = 4;
  const client::Run run = run_load(*target, same_prompt(12), o, never, {});
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

TEST(OverGrpc, AnOpenLoopDoesNotWaitForASlowServer) {
  SlowServer server(Ms(200), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 20;
  for (int i = 0; i < 20; ++i) o.due.push_back(i * 0.02);
  const client::Run run = run_load(*target, same_prompt(1), o, never, {});
  const Figures f = figures_of(run, {});
  EXPECT_EQ(f.good, 20);
  EXPECT_LT(run.seconds, 1.0);  // one after the other would take four seconds
  EXPECT_NEAR(f.ttft.p50, 0.2, 0.02);
}

TEST(OverGrpc, AServerKilledMidRunLeavesAPartialReport) {
  auto server = std::make_unique<SlowServer>(Ms(5), Ms(5));
  auto target = *make_target({"kvasir", server->address()});
  std::thread killer([&] {
    while (server->calls < 8) std::this_thread::sleep_for(Ms(2));
    server->kill();
  });
  LoadOptions o;
  o.requests = 100000;
  o.concurrency = 4;
  const client::Run run = run_load(*target, same_prompt(4), o, never, {});
  killer.join();
  const Figures f = figures_of(run, {});
  EXPECT_TRUE(f.partial);
  EXPECT_THAT(f.why, HasSubstr("gone"));
  EXPECT_GE(f.good, 8);
  EXPECT_GE(f.failed, 50);
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

TEST(OverGrpc, VerificationFindsWhatDiffers) {
  SlowServer server(Ms(0), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 6;
  o.concurrency = 1;
  o.keep_text = true;
  server.flaky = true;
  const client::Run run = run_load(*target, same_prompt(5), o, never, {});
  const Verification v = verify(*target, same_prompt(5), o, run, 6, never);
  EXPECT_EQ(v.compared, 6);
  EXPECT_EQ(v.equal, 5);
  EXPECT_EQ(v.different, 1);
  ASSERT_EQ(v.examples.size(), 1u);
  EXPECT_THAT(v.examples[0], HasSubstr("differs from character 1"));
}

TEST(OverGrpc, LaterTurnsSayAllThatWasSaidBefore) {
  SlowServer server(Ms(0), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 6;
  o.concurrency = 1;
  o.turns = 3;
  o.turn_words = 4;
  const client::Run run = run_load(*target, same_prompt(3, "hello"), o, never, {});
  ASSERT_EQ(run.records.size(), 6u);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(run.records[i].turn, i % 3);
    EXPECT_EQ(run.records[i].prompt, i / 3);
  }
  EXPECT_TRUE(run.records[1].asked.starts_with("hellohel "));
  EXPECT_TRUE(run.records[2].asked.starts_with(run.records[1].asked + run.records[1].text + " "));
  const Verification v = verify(*target, same_prompt(3, "hello"), o, run, 6, never);
  EXPECT_EQ(v.equal, 6);
}

TEST(OverGrpc, ASweepEndsAtTheSlo) {
  SlowServer server(Ms(20), Ms(0));
  BenchOptions b;
  b.target.address = server.address();
  b.sweep = "concurrency";
  b.sweep_low = 1;
  b.sweep_high = 4;
  b.duration = 0.3;
  b.workload.output_length = "1";
  b.slo = *parse_slo("ttft=500ms");
  auto target = *make_target(b.target);
  auto done = run_bench(*target, b, never, {});
  ASSERT_TRUE(done.ok()) << done.status().to_string();
  EXPECT_EQ(done->report.best, 4);
  EXPECT_EQ(done->report.points.size(), 3u);
  b.slo = *parse_slo("ttft=1ms");
  done = run_bench(*target, b, never, {});
  EXPECT_EQ(done->report.best, 0);
}

// One connection at a time, each answered with a stream of events.
class HttpServer {
 public:
  explicit HttpServer(std::vector<std::string> answers) : answers_(std::move(answers)) {
    fd_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof a;
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&a), size), 0);
    EXPECT_EQ(listen(fd_, 8), 0);
    getsockname(fd_, reinterpret_cast<sockaddr*>(&a), &size);
    port_ = ntohs(a.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~HttpServer() {
    shutdown(fd_, SHUT_RDWR);
    thread_.join();
    close(fd_);
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  std::vector<std::string> requests;

 private:
  void serve() {
    size_t next = 0;
    for (int c; (c = accept(fd_, nullptr, nullptr)) >= 0; close(c)) {
      std::string in;
      char buffer[4096];
      while (in.find("}") == std::string::npos && in.find("GET") != 0) {
        const ssize_t n = read(c, buffer, sizeof buffer);
        if (n <= 0) break;
        in.append(buffer, static_cast<size_t>(n));
      }
      requests.push_back(in);
      const std::string out = in.starts_with("GET")
                                  ? "HTTP/1.1 404 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                                  : answers_[std::min(next++, answers_.size() - 1)];
      for (size_t i = 0; i < out.size(); i += 20) {
        if (send(c, out.data() + i, std::min<size_t>(20, out.size() - i), MSG_NOSIGNAL) < 0) break;
      }
      shutdown(c, SHUT_WR);
      while (read(c, buffer, sizeof buffer) > 0) {
      }
    }
  }
  std::vector<std::string> answers_;
  int fd_ = -1, port_ = 0;
  std::thread thread_;
};

TEST(OverHttp, StreamsUsageAndErrors) {
  const std::string head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
  const std::string good = head +
                           "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\"}]}\n\n"
                           "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,"
                           "\"prompt_tokens_details\":{\"cached_tokens\":1}}}\n\ndata: [DONE]\n\n";
  const std::string full =
      "HTTP/1.1 429 Too Many\r\nContent-Length: 32\r\nConnection: close\r\n\r\n{\"error\":{\"message\":\"too many\"}}";
  const std::string cut = head + "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
  HttpServer server({good, full, cut});
  auto target = *make_target({"openai", server.address(), "m"});
  LoadOptions o;
  o.requests = 3;
  o.concurrency = 1;
  o.keep_text = true;
  const client::Run run = run_load(*target, same_prompt(2), o, never, {});
  ASSERT_EQ(run.records.size(), 3u);
  EXPECT_TRUE(run.records[0].status.ok()) << run.records[0].status.to_string();
  EXPECT_EQ(run.records[0].text, "ab");
  EXPECT_EQ(run.records[0].usage.cached_tokens, 1);
  EXPECT_EQ(run.records[1].status.to_string(), "RESOURCE_EXHAUSTED: HTTP 429: too many");
  EXPECT_EQ(run.records[2].status.code(), Code::unavailable);
  EXPECT_THAT(server.requests[0], HasSubstr("\"stream_options\":{\"include_usage\":true}"));
}

TEST(OverHttp, NobodyThere) {
  int port = 0;
  {
    HttpServer gone({""});
    port = std::stoi(gone.address().substr(10));
  }
  auto target = *make_target({"openai", "127.0.0.1:" + std::to_string(port)});
  LoadOptions o;
  o.requests = 1000;
  o.concurrency = 2;
  const Figures f = figures_of(run_load(*target, same_prompt(2), o, never, {}), {});
  EXPECT_TRUE(f.partial);
  EXPECT_LT(f.requests, 100);
  EXPECT_EQ(make_target({"openai", "nonsense"}).status().code(), Code::invalid_argument);
  EXPECT_EQ(make_target({"smoke", "h:1"}).status().code(), Code::invalid_argument);
}

}  // namespace
}  // namespace kvasir::client
