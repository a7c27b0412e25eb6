// Trace ids honoured, and spans exported to a collector that is slow, broken or away without anybody noticing.
#include <gmock/gmock.h>
#include <poll.h>

#include "kvasir.grpc.pb.h"
#include "server/span_exporter.h"
#include "server/trace_context.h"
#include "tests/server/contract_fixture.h"

namespace kvasir::server {
namespace {

using namespace std::chrono_literals;
using Json = nlohmann::json;

constexpr const char* kTrace = "0af7651916cd43dd8448eb211c80319c";
constexpr const char* kParent = "b7ad6b7169203331";

// Takes one POST a connection and answers with the statuses given, the last of them for ever.
class Collector {
 public:
  explicit Collector(std::vector<int> answers = {200}) : answers_(std::move(answers)) {
    fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&a), sizeof a), 0);
    EXPECT_EQ(::listen(fd_, 16), 0);
    socklen_t size = sizeof a;
    ::getsockname(fd_, reinterpret_cast<sockaddr*>(&a), &size);
    port_ = ntohs(a.sin_port);
    thread_ = std::thread([this] { run(); });
  }
  ~Collector() {
    stop_ = true;
    thread_.join();
    ::close(fd_);
  }
  std::string url() const { return cat("http://127.0.0.1:", port_); }

  // Every span so far, once there are so many.
  std::vector<Json> spans(size_t wanted) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, 20s, [&] { return spans_.size() >= wanted; });
    return spans_;
  }
  int posts() {
    std::lock_guard lock(mutex_);
    return posts_;
  }

 private:
  void run() {
    while (!stop_) {
      pollfd p{fd_, POLLIN, 0};
      if (::poll(&p, 1, 20) <= 0) continue;
      int client = ::accept(fd_, nullptr, nullptr);
      take(client);
      ::close(client);
    }
  }
  void take(int client) {
    std::string text;
    size_t head = 0, length = 0;
    char block[8192];
    for (ssize_t n; (n = ::recv(client, block, sizeof block, 0)) > 0;) {
      text.append(block, size_t(n));
      if (head == 0 && text.find("\r\n\r\n") != text.npos) {
        head = text.find("\r\n\r\n") + 4;
        length = std::stoul(text.substr(text.find("Content-Length: ") + 16));
      }
      if (head > 0 && text.size() >= head + length) break;
    }
    int status;
    {
      std::lock_guard lock(mutex_);
      status = answers_[std::min(size_t(posts_), answers_.size() - 1)];
      ++posts_;
      EXPECT_TRUE(text.starts_with("POST /v1/traces HTTP/1.1\r\n")) << text.substr(0, 60);
      EXPECT_THAT(text, testing::HasSubstr("Content-Type: application/json\r\n"));
      if (status == 200) {
        Json body = Json::parse(text.substr(head));
        EXPECT_EQ(body["resourceSpans"][0]["resource"]["attributes"][0]["value"]["stringValue"], "kvasir");
        for (const Json& span : body["resourceSpans"][0]["scopeSpans"][0]["spans"]) spans_.push_back(span);
      }
    }
    changed_.notify_all();
    std::string answer = cat("HTTP/1.1 ", status, " X\r\nContent-Length: 2\r\n\r\n{}");
    (void)::send(client, answer.data(), answer.size(), MSG_NOSIGNAL);
  }

  int fd_ = -1, port_ = 0;
  const std::vector<int> answers_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Json> spans_;
  int posts_ = 0;
  std::thread thread_;
};

std::string attribute(const Json& span, const std::string& key) {
  for (const Json& a : span["attributes"])
    if (a["key"] == key) return a["value"].begin()->get<std::string>();
  return "none";
}

class Tracing : public ContractFixture {
 protected:
  Tracing() { options_.otlp_endpoint = collector_.url(); }
  static std::string traceparent(const char* flags = "01") { return cat("00-", kTrace, '-', kParent, '-', flags); }
  grpc::Status generate(const std::string& parent, const std::string& model = "") {
    grpc::ClientContext call;
    if (!parent.empty()) call.AddMetadata("traceparent", parent);
    V1 r = v1_request();
    r.set_request_id(cat("id-", ++ids_));
    r.set_model(model);
    auto stub = kvasir::v1::Inference::NewStub(channel_);
    auto reader = stub->Generate(&call, r);
    (void)read_all<kvasir::v1::GenerateResponse>(*reader);
    return reader->Finish();
  }
  Collector collector_;
  int ids_ = 0;
};

TEST_F(Tracing, ASpanARequestInTheCallersTrace) {
  EXPECT_TRUE(generate(traceparent()).ok());
  EXPECT_EQ(engine_.last().trace_parent, traceparent());
  auto spans = collector_.spans(1);
  ASSERT_EQ(spans.size(), 1u);
  const Json& s = spans[0];
  EXPECT_EQ(s["traceId"], kTrace);
  EXPECT_EQ(s["parentSpanId"], kParent);
  EXPECT_EQ(s["spanId"].get<std::string>().size(), 16u);
  EXPECT_EQ(s["name"], "kvasir.v1");
  EXPECT_EQ(s["kind"], 2);
  EXPECT_EQ(s["status"]["code"], 1);
  EXPECT_EQ(attribute(s, "gen_ai.request.id"), "id-1");
  EXPECT_EQ(attribute(s, "gen_ai.usage.prompt_tokens"), "2");
  EXPECT_EQ(attribute(s, "gen_ai.usage.completion_tokens"), "3");
  EXPECT_EQ(attribute(s, "gen_ai.response.finish_reason"), "stop_token");
  EXPECT_EQ(s["events"][1]["name"], "first token");
  int64_t began = std::stoll(s["startTimeUnixNano"].get<std::string>()),
          ended = std::stoll(s["endTimeUnixNano"].get<std::string>());
  auto now = std::chrono::system_clock::now().time_since_epoch();
  EXPECT_LT(began, ended);
  EXPECT_LT(std::abs(double(std::chrono::nanoseconds(now).count() - began)), 60e9);
}

TEST_F(Tracing, HttpHeadersAndRefusalsToo) {
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"ab"})", cat("Traceparent: ", traceparent(), "\r\n")).code, Code::ok);
  EXPECT_FALSE(generate(traceparent(), "gpt-9").ok());
  auto spans = collector_.spans(2);
  ASSERT_EQ(spans.size(), 2u);
  for (const Json& s : spans) EXPECT_EQ(s["traceId"], kTrace);
  const Json& refused = spans[0]["name"] == "kvasir.v1" ? spans[0] : spans[1];
  EXPECT_EQ(refused["status"]["code"], 2);
  EXPECT_THAT(refused["status"]["message"].get<std::string>(), testing::HasSubstr("gpt-9"));
}

TEST_F(Tracing, WithoutATraceAFreshOneAndUnsampledNone) {
  EXPECT_TRUE(generate(traceparent("00")).ok());
  EXPECT_TRUE(generate("").ok());
  EXPECT_TRUE(generate("00-nonsense").ok());
  auto spans = collector_.spans(2);
  ASSERT_EQ(spans.size(), 2u);
  for (const Json& s : spans) {
    EXPECT_EQ(s["traceId"].get<std::string>().size(), 32u);
    EXPECT_NE(s["traceId"], kTrace);
    EXPECT_FALSE(s.contains("parentSpanId"));
  }
  EXPECT_NE(spans[0]["traceId"], spans[1]["traceId"]);
}

TEST(SpanExporter, ACollectorThatIsBusyIsAskedAgainAndOneThatRefusesIsNot) {
  Collector busy({503, 200});
  {
    SpanExporter exporter(*parse_collector(busy.url()));
    exporter.add({"one"});
    EXPECT_EQ(busy.spans(1).size(), 1u);
    EXPECT_EQ(exporter.dropped(), 0);
  }
  Collector refuses({400});
  SpanExporter exporter(*parse_collector(refuses.url()));
  exporter.add({"one"});
  for (int i = 0; i < 1000 && exporter.dropped() == 0; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(exporter.dropped(), 1);
  EXPECT_EQ(refuses.posts(), 1);
}

TEST(SpanExporter, WithNobodyThereItHoldsABoundedNumberAndEndsAtOnce) {
  auto began = std::chrono::steady_clock::now();
  {
    SpanExporter exporter(*parse_collector("http://127.0.0.1:1"));
    for (int i = 0; i < 6000; ++i) exporter.add({"lost"});
    EXPECT_GE(exporter.dropped(), 6000 - 4096 - 512);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, 15s);
}

TEST(SpanExporter, WhatIsLeftGoesOutAtTheEnd) {
  Collector collector;
  { SpanExporter(*parse_collector(collector.url())).add({"last words"}); }
  EXPECT_EQ(collector.spans(1).size(), 1u);
}

TEST(SpanExporter, AddressesAreCheckedByName) {
  EXPECT_EQ(parse_collector("http://otel")->port, 4318);
  EXPECT_EQ(parse_collector("http://otel/")->path, "/v1/traces");
  EXPECT_EQ(parse_collector("http://[::1]:99/x")->host, "::1");
  EXPECT_EQ(parse_collector("http://[::1]:99/x")->port, 99);
  EXPECT_EQ(parse_collector("http://[::1]:99/x")->path, "/x");
  for (const char* bad : {"otel:4318", "https://otel", "http://", "http://otel:0", "http://otel:x", "http://a/b c"}) {
    Status s = parse_collector(bad).status();
    EXPECT_EQ(s.field(), "otlp_endpoint") << bad;
    EXPECT_THAT(s.message(), testing::HasSubstr(bad));
  }
}

TEST(TraceContext, OnlyWhatW3cAllows) {
  std::string good = cat("00-", kTrace, '-', kParent, "-01");
  ASSERT_TRUE(parse_traceparent(good));
  EXPECT_TRUE(parse_traceparent(good)->sampled);
  EXPECT_FALSE(parse_traceparent(cat("00-", kTrace, '-', kParent, "-02"))->sampled);
  EXPECT_TRUE(parse_traceparent(cat("01-", kTrace, '-', kParent, "-01-more")));
  for (const std::string& bad :
       {std::string(), good + "-more", good.substr(1), cat("ff", good.substr(2)), cat("0G", good.substr(2)),
        cat("00-", std::string(32, '0'), '-', kParent, "-01"), cat("00-", kTrace, '-', std::string(16, '0'), "-01"),
        cat("00-", std::string(32, 'A'), '-', kParent, "-01"), std::string(55, '-')})
    EXPECT_FALSE(parse_traceparent(bad)) << bad;
}

}  // namespace
}  // namespace kvasir::server
