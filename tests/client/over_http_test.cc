// The client over OpenAI's HTTP: streams, usage, refusals, odds, a metrics page, and nobody there.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <thread>

#include "client/figures.h"
#include "client/load.h"

namespace kvasir::client {
namespace {

using ::testing::HasSubstr;

Workload same_prompt(int tokens) {
  Workload w;
  w.prompts = {{"some words", tokens}};
  return w;
}

std::atomic<bool> never{false};

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
  const client::LoadRun run = run_load(*target, same_prompt(2), o, never, {});
  ASSERT_EQ(run.records.size(), 3u);
  EXPECT_TRUE(run.records[0].status.ok()) << run.records[0].status.to_string();
  EXPECT_EQ(run.records[0].text, "ab");
  EXPECT_EQ(run.records[0].usage.cached_tokens, 1);
  EXPECT_EQ(run.records[1].status.to_string(), "RESOURCE_EXHAUSTED: HTTP 429: too many");
  EXPECT_EQ(run.records[2].status.code(), Code::unavailable);
  EXPECT_THAT(server.requests[0], HasSubstr("\"stream_options\":{\"include_usage\":true}"));
}

// Of servers whose models think aloud first: their first token is the first thought.
TEST(OverHttp, ThoughtsAreTokensAndNoPartOfTheAnswer) {
  const std::string head = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n";
  HttpServer server({head + R"(data: {"choices":[{"delta":{"role":"assistant","content":""}}]})" + "\n\n" +
                     R"(data: {"choices":[{"delta":{"reasoning_content":"hm"}}]})" + "\n\n" +
                     R"(data: {"choices":[{"delta":{"reasoning":"hm","content":null}}]})" + "\n\n" +
                     R"(data: {"choices":[{"delta":{"content":"yes"}}]})" + "\n\ndata: [DONE]\n\n"});
  auto target = *make_target({"openai-chat", server.address()});
  LoadOptions o;
  o.requests = o.concurrency = 1;
  o.keep_text = true;
  const client::LoadRun run = run_load(*target, same_prompt(3), o, never, {});
  ASSERT_EQ(run.records.size(), 1u);
  EXPECT_TRUE(run.records[0].status.ok()) << run.records[0].status.to_string();
  EXPECT_EQ(run.records[0].output_tokens, 3);
  EXPECT_EQ(run.records[0].text, "yes");
}

TEST(OverHttp, TheTopTwoAreReadInBothForms) {
  struct Gaps final : Sink {
    void on_tokens(const AnswerPiece& piece) override { gaps.push_back(piece.top_gap); }
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
