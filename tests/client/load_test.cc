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

#include <future>
#include <mutex>
#include <thread>

#include "client/bench.h"
#include "client/report.h"
#include "client/verify.h"
#include "kvasir.grpc.pb.h"
#include "ppl_llm.grpc.pb.h"

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
  EXPECT_LT(run.seconds, 3.0);  // one after the other would take four seconds
  EXPECT_GE(f.ttft.p50, 0.199);
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

TEST(OverGrpc, AnOpenLoopHoldsConversationsToo) {
  SlowServer server(Ms(0), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 6;
  o.turns = 2;
  o.due = {0, 0.02, 0.04};
  const client::Run run = run_load(*target, same_prompt(3, "hello"), o, never, {});
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

TEST(OverGrpc, ASweepMayBeOfConversationsAndIsVerified) {
  SlowServer server(Ms(0), Ms(0));
  for (const char* of : {"rate", "concurrency"}) {
    BenchOptions b;
    b.target.address = server.address();
    b.sweep = of;
    b.sweep_low = b.sweep_high = 4;
    b.duration = 0.3;
    b.turns = 2;
    b.turn_words = 3;
    b.verify = 5;
    b.workload.output_length = "2";
    b.slo = *parse_slo("e2e=20s");
    auto target = *make_target(b.target);
    auto done = run_bench(*target, b, never, {});
    ASSERT_TRUE(done.ok()) << done.status().to_string();
    EXPECT_EQ(done->report.best, 4) << of;
    EXPECT_EQ(done->report.verification.equal, 5) << of;
    EXPECT_TRUE(std::any_of(done->run.records.begin(), done->run.records.end(), [](const Record& r) {
      return r.turn == 1 && r.status.ok();
    })) << of;
  }
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
  b.slo = *parse_slo("ttft=20s");
  auto target = *make_target(b.target);
  auto done = run_bench(*target, b, never, {});
  ASSERT_TRUE(done.ok()) << done.status().to_string();
  EXPECT_EQ(done->report.best, 4);
  EXPECT_EQ(done->report.points.size(), 3u);
  b.slo = *parse_slo("ttft=1ms");
  done = run_bench(*target, b, never, {});
  EXPECT_EQ(done->report.best, 0);
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
  w.prompts = {{"alpha", 2}, {"refuse", 2}, {"beta", 2}};
  LoadOptions o;
  o.requests = 7;
  o.due.assign(7, 0.0);
  o.batch = 4;
  o.keep_text = true;
  const client::Run run = run_load(*target, w, o, never, {});
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
    }
  }
}

// Answers given in advance, each with its tokens' log-probabilities.
class Oracle final : public Target {
 public:
  struct Token {
    std::string text;
    double top_gap, logprob;
  };
  explicit Oracle(std::vector<std::vector<Token>> answers) : answers_(std::move(answers)) {}
  void start(const Ask& ask, std::shared_ptr<Sink> sink) override {
    asked_top_two.push_back(ask.top_two);
    for (const Token& t : answers_[next_++ % answers_.size()]) sink->on_tokens({1, t.text, t.top_gap, t.logprob});
    sink->on_done({}, {});
  }
  std::vector<bool> asked_top_two;

 private:
  std::vector<std::vector<Token>> answers_;
  size_t next_ = 0;
};

// The first answer is the one under load, the second the one alone.
Verification verified(std::vector<Oracle::Token> under_load, std::vector<Oracle::Token> alone) {
  Oracle oracle({std::move(under_load), std::move(alone)});
  LoadOptions o;
  o.requests = 1;
  o.concurrency = 1;
  o.keep_text = true;
  const client::Run run = run_load(oracle, same_prompt(2), o, never, {});
  Verification v = verify(oracle, same_prompt(2), o, run, 1, never);
  EXPECT_EQ(oracle.asked_top_two, (std::vector<bool>{false, true}));
  return v;
}

TEST(NearTies, AreCountedApartWhereTheTopTwoAreKnown) {
  EXPECT_EQ(verified({{"a", -1, NAN}, {"b", -1, NAN}}, {{"a", 0.5, NAN}, {"c", 0.0005, NAN}}).near_ties, 1);
  EXPECT_EQ(verified({{"a", -1, NAN}, {"b", -1, NAN}}, {{"a", 0.0005, NAN}, {"c", 0.5, NAN}}).different, 1);
  EXPECT_EQ(verified({{"a", -1, NAN}, {"b", -1, NAN}}, {{"a", -1, NAN}, {"c", -1, NAN}}).different, 1);  // not known
}

TEST(NearTies, AreCountedApartWhereOnlyTheChosenTokensOddsAreKnown) {
  EXPECT_EQ(verified({{"a", -1, -1.0}, {"b", -1, -0.7000}}, {{"a", -1, -1.0}, {"c", -1, -0.7004}}).near_ties, 1);
  EXPECT_EQ(verified({{"a", -1, -1.0}, {"b", -1, -0.9000}}, {{"a", -1, -1.0}, {"c", -1, -0.7004}}).different, 1);
}

TEST(NearTies, TheGapOfSeveralTokensIsTheLeastKnown) {
  EXPECT_EQ(top_gap_of({-1.0}), -1);
  EXPECT_NEAR(top_gap_of({-3.0, -1.0, -1.5}), 0.5, 1e-12);
  EXPECT_EQ(lesser_gap(-1, 0.25), 0.25);
  EXPECT_EQ(lesser_gap(0.25, 0.5), 0.25);
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

TEST(OverHttp, TheTopTwoAreReadInBothForms) {
  struct Gaps final : Sink {
    void on_tokens(const Piece& piece) override { gaps.push_back(piece.top_gap); }
    void on_done(const Status& status, const Usage&) override { done.set_value(status); }
    std::vector<double> gaps;
    std::promise<Status> done;
  };
  const std::string head = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n";
  const std::string completions =
      R"(data: {"choices":[{"text":"a","logprobs":{"top_logprobs":[{"a":-0.5,"b":-0.75}]}}]})";
  const std::string objects =
      R"(data: {"choices":[{"text":"b","logprobs":{"content":[{"top_logprobs":[{"logprob":-1.5},{"logprob":-1}]}]}}]})";
  HttpServer server({head + completions + "\n\n" + objects + "\n\ndata: [DONE]\n\n"});
  auto target = *make_target({"openai", server.address()});
  auto sink = std::make_shared<Gaps>();
  auto done = sink->done.get_future();
  Ask ask;
  ask.top_two = true;
  target->start(ask, sink);
  EXPECT_TRUE(done.get().ok());
  EXPECT_EQ(sink->gaps, (std::vector<double>{0.25, 0.5}));
  EXPECT_THAT(server.requests[0], HasSubstr("\"logprobs\":2"));
}

TEST(OverHttp, AMetricsPageIsReadBeside) {
  const ServerFigures f = figures_of_metrics(
      "# HELP x y\nrunning 3\nrequests_total{code=\"200\"} 5\nrequests_total{code=\"500\",path=\"/a b\"} 2\n"
      "took_bucket{le=\"0.5\"} 9\ntook_sum 1.5\nbroken{\nnothing\n");
  EXPECT_EQ(f, (ServerFigures{{"requests_total", 7}, {"running", 3}, {"took_sum", 1.5}}));
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
