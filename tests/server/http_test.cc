// How the HTTP port takes bytes: framing, limits, time, and clients that go away.
#include <gmock/gmock.h>

#include "tests/server/http_fixture.h"

namespace kvasir::server {
namespace {

using namespace std::chrono_literals;

class Http : public HttpFixture {
  void configure(ServerOptions& o) override {
    o.max_body = ByteSize{20000};
    o.hosts = {"Models.Example", "other.example:8000"};
  }
};

// Apart from the others: on a busy machine an honest client may take as long for its first words.
class ImpatientHttp : public HttpFixture {
  void configure(ServerOptions& o) override { o.header_timeout = Millis(300); }
};

class NamedHttp : public HttpFixture {
  void configure(ServerOptions& o) override { o.served_model_name = "a/name"; }
};

// It has a name before there is anything to say of it.
TEST_F(NamedHttp, AModelThatIsLoadingIsNotListed) {
  engine_.set_state(engine::State::starting);
  EXPECT_EQ(ask(RawClient::get("/v1/models")).status, 503);
  engine_.set_state(engine::State::serving);
  EXPECT_NE(ask(RawClient::get("/v1/models")).body.find("\"id\":\"a/name\""), std::string::npos);
  EXPECT_EQ(ask(RawClient::get("/v1/models/a/name")).status, 200);
}

TEST_F(Http, KeepsAConnectionForMoreThanOneRequest) {
  RawClient client(server_->http_port());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(client.send(RawClient::get("/health")));
    EXPECT_EQ(client.read().status, 200);
  }
}

TEST_F(Http, AnswersPipelinedRequestsInOrder) {
  RawClient client(server_->http_port());
  client.send(RawClient::get("/health") + RawClient::post("/v1/completions", R"({"prompt":"ab"})") +
              RawClient::get("/v1/nothing"));
  EXPECT_EQ(client.read().status, 200);
  EXPECT_NE(client.read().body.find("\"text\":\"ab\""), std::string::npos);
  EXPECT_EQ(client.read().status, 404);
}

TEST_F(Http, EndsTheConnectionWhenAskedTo) {
  RawClient client(server_->http_port());
  client.send(RawClient::get("/health", "Connection: close\r\n"));
  EXPECT_EQ(client.read().status, 200);
  EXPECT_TRUE(client.closed_within(20s));
}

TEST_F(Http, SpeaksHttp10WithoutChunks) {
  RawClient client(server_->http_port());
  std::string body = R"({"prompt":"ab","stream":true})";
  client.send(
      cat("POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ",
          body.size(), "\r\n\r\n", body));
  RawClient::Answer a = client.read();
  EXPECT_EQ(a.status, 200);
  EXPECT_EQ(a.head.find("chunked"), std::string::npos);
  EXPECT_TRUE(a.body.starts_with("data: {")) << a.body;
  EXPECT_TRUE(a.body.ends_with("data: [DONE]\n\n")) << a.body;
}

TEST_F(ImpatientHttp, DropsSlowHeadersAndSlowBodies) {
  RawClient header(server_->http_port()), body(server_->http_port()), silent(server_->http_port());
  header.send("GET /health HTTP/1.1\r\nHost:");
  body.send(
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
      "99\r\n\r\n{");
  EXPECT_TRUE(header.closed_within(20s));
  EXPECT_TRUE(body.closed_within(20s));
  EXPECT_TRUE(silent.closed_within(20s));
}

TEST_F(Http, RefusesWhatIsTooLarge) {
  expect_error(post("/v1/completions", std::string(20001, ' ')), 413, "", "20000 bytes");
  expect_error(ask(RawClient::get("/health", cat("X-Large: ", std::string(17 << 10, 'x'), "\r\n"))), 431, "", "header");
}

TEST_F(Http, RefusesRequestsWhoseEndIsSaidTwice) {
  expect_error(ask("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: "
                   "chunked\r\n\r\n0\r\n\r\n"),
               400, "", "");
  EXPECT_EQ(ask("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc").status, 400);
  EXPECT_EQ(ask("GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n").status, 400);
}

TEST_F(Http, RefusesCodingsItDoesNotUndo) {
  auto sent = [&](const char* header) {
    return ask(cat("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n", header,
                   "\r\n\r\n0\r\n\r\n"));
  };
  expect_error(sent("Transfer-Encoding: gzip, chunked"), 501, "", "gzip, chunked");
  expect_error(sent("Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked"), 501, "", "must be chunked");
  expect_error(sent("Content-Length: 5\r\nContent-Encoding: gzip"), 415, "", "Content-Encoding is 'gzip'");
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"ab"})", "Content-Encoding: identity\r\n").status, 200);
}

TEST_F(Http, TakesTheNameInTheTargetForTheHost) {
  EXPECT_EQ(ask("GET http://localhost:8000/v1/models?x=/ HTTP/1.1\r\nHost: evil.example\r\n\r\n").status, 200);
  EXPECT_EQ(ask("GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n").status, 200);
  EXPECT_EQ(ask("GET /?x=http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n").status, 200);
  expect_error(ask("GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n"), 403, "", "evil.example");
}

TEST_F(Http, ANameMayBeMissingFromHttp10Alone) {
  expect_error(ask("GET /health HTTP/1.1\r\n\r\n"), 400, "", "Host is missing");
  EXPECT_EQ(ask("GET /health HTTP/1.0\r\n\r\n").status, 200);
}

TEST_F(Http, RefusesWhatIsNotHttp) {
  EXPECT_EQ(ask("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n").status, 400);
  EXPECT_EQ(ask("GET / HTTP/9.9\r\n\r\n").status, 400);
}

TEST_F(Http, TakesChunkedBodies) {
  RawClient::Answer a =
      ask("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
          "Transfer-Encoding: chunked\r\n\r\n8\r\n{\"prompt\r\n7\r\n\":\"ab\"}\r\n0\r\n\r\n");
  EXPECT_EQ(a.status, 200) << a.body;
}

constexpr const char* kChunkedHead =
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Transfer-Encoding: chunked\r\n";

// The parser takes them only when it has all of them, so what waits is bound.
TEST_F(Http, ChunkExtensionsAndTrailersThatNeverEnd) {
  for (const char* begin : {"\r\n1;a=", "\r\n0\r\nX: ", "\r\n0000"}) {
    RawClient client(server_->http_port());
    client.give_up_sending_after(5s);
    client.send(cat(kChunkedHead, begin));
    const std::string piece(64 << 10, std::string_view(begin) == "\r\n0000" ? '0' : 'x');
    bool enough = false;
    for (int i = 0; i < 2000 && !enough; ++i) enough = !client.send(piece);  // 128 MiB
    EXPECT_TRUE(enough) << begin;
  }
  expect_error(ask(cat(kChunkedHead, "\r\n1;a=", std::string(17 << 10, 'x'))), 431, "", "extensions");
  EXPECT_EQ(ask(cat(kChunkedHead, "\r\nf;a=b\r\n{\"prompt\":\"ab\"}\r\n0\r\nX-Sum: 1\r\n\r\n")).status, 200);
}

// What stands behind a body is no header: a proxy that filters headers never saw it.
TEST_F(Http, TrailersAreNoHeaders) {
  const std::string body = "f\r\n{\"prompt\":\"ab\"}\r\n0\r\n";
  EXPECT_EQ(ask(cat(kChunkedHead, "\r\n", body, "X-Request-Timeout: none\r\nHost: evil\r\n\r\n")).status, 200);
  EXPECT_EQ(ask(cat(kChunkedHead, "X-Request-Timeout: none\r\n\r\n", body, "\r\n")).status, 400);
}

TEST_F(Http, HostsThatAreNone) {
  auto status = [&](const std::string& host) {
    return ask(cat("GET /health HTTP/1.1\r\nHost: ", host, "\r\n\r\n")).status;
  };
  for (const char* host :
       {"[evil.example]", "[evil.example]:80", "localhost:80@evil", "localhost:80:80", "127.0.0.1@evil.example",
        "[::1]evil", "[::1", "localhost/evil", "user@localhost", "localhost:999999", "[::1]:8x"})
    EXPECT_EQ(status(host), 400) << host;
  for (const char* host : {"1.2.3", "0x7f.1", "evil.localhost.example", "127.0.0.1.evil.example"})
    EXPECT_EQ(status(host), 403) << host;
  for (const char* host : {"localhost", "localhost:", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "10.1.2.3:1"})
    EXPECT_EQ(status(host), 200) << host;
}

TEST_F(Http, ADisconnectCancels) {
  for (const char* stream : {"true", "false"}) {
    RawClient client(server_->http_port());
    client.send(
        RawClient::post("/v1/completions", cat(R"({"prompt":"ab","cache_salt":"hang","stream":)", stream, "}")));
    ASSERT_TRUE(engine_.wait_open(1));
    client.close();
    EXPECT_TRUE(all_gone()) << "stream " << stream;
  }
}

TEST_F(Http, AReaderThatStopsReadingHoldsItsStreamBack) {
  RawClient client(server_->http_port());
  client.send(RawClient::post("/v1/completions", R"({"prompt":"ab","cache_salt":"flood","stream":true})"));
  ASSERT_TRUE(client.hears_within(60s));  // it has begun
  EXPECT_TRUE(engine_.rests()) << "events are still taken although nobody reads";
  client.close();
  EXPECT_TRUE(all_gone());
}

TEST_F(Http, SaysWhereThingsAre) {
  RawClient::Answer wrong = ask(RawClient::get("/v1/completions"));
  EXPECT_EQ(wrong.status, 405);
  EXPECT_NE(wrong.head.find("Allow: POST"), std::string::npos);
  expect_error(ask(RawClient::get("/v2")), 404, "", "/v1/chat/completions");
  EXPECT_EQ(post("/v1/embeddings", "{}").status, 400);
}

TEST_F(Http, ServesOnlyPagesAndNamesItKnows) {
  std::string body = R"({"prompt":"ab"})";
  expect_error(ask("GET /health HTTP/1.1\r\nHost: evil.example:8000\r\n\r\n"), 403, "", "evil.example");
  EXPECT_EQ(ask("GET /health HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n\r\n").status, 200);
  EXPECT_EQ(ask("GET /health HTTP/1.1\r\nHost: models.EXAMPLE:8000\r\n\r\n").status, 200);
  EXPECT_EQ(ask("GET /health HTTP/1.1\r\nHost: other.example\r\n\r\n").status, 200);
  EXPECT_EQ(ask("GET /health HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n").status, 200);
  expect_error(post("/v1/completions", body, "Origin: https://evil.example\r\n"), 403, "", "--cors");
  EXPECT_EQ(post("/v1/completions", body, "Origin: http://localhost\r\n").status, 200);
  RawClient::Answer form = ask(cat(
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: ", body.size(),
      "\r\n\r\n", body));
  expect_error(form, 400, "", "application/json");
  // No type at all is JSON, unless a page sends it.
  auto untyped = [&](std::string_view origin) {
    return ask(cat("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", origin, "Content-Length: ", body.size(),
                   "\r\n\r\n", body));
  };
  EXPECT_EQ(untyped("").status, 200);
  expect_error(untyped("Origin: http://localhost\r\n"), 400, "", "application/json");
}

TEST_F(Http, ADrainEndsIdleConnectionsAtOnce) {
  RawClient client(server_->http_port());
  client.send(RawClient::get("/health"));
  EXPECT_EQ(client.read().status, 200);
  auto begin = std::chrono::steady_clock::now();
  server_->drain(2s);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 2s);
  EXPECT_TRUE(client.closed_within(20s));
}

TEST_F(Http, ThePageRunsUnderAStrictPolicy) {
  RawClient::Answer page = ask(RawClient::get("/"));
  EXPECT_EQ(page.status, 200);
  EXPECT_NE(page.head.find("default-src 'none'"), std::string::npos);
  EXPECT_NE(page.body.find("<title>kvasir</title>"), std::string::npos);
  EXPECT_EQ(page.body.find("innerHTML"), std::string::npos);  // model output only ever becomes text
}

class Cors : public HttpFixture {
 protected:
  void configure(ServerOptions& o) override { o.cors = {"https://app.example"}; }
  static std::string from(const char* origin) { return cat("Origin: ", origin, "\r\n"); }
  static constexpr const char* kAllowed = "Access-Control-Allow-Origin: https://app.example\r\n";
};

TEST_F(Cors, PagesThatAreNamedMayAskAndReadTheAnswers) {
  RawClient::Answer before = ask(cat("OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n",
                                     from("https://app.example"), "Access-Control-Request-Method: POST\r\n\r\n"));
  EXPECT_EQ(before.status, 200);
  for (const char* line : {kAllowed, "Access-Control-Allow-Credentials: true\r\n",
                           "Access-Control-Allow-Methods: GET, POST, DELETE, OPTIONS\r\n",
                           "Access-Control-Allow-Headers: authorization, content-type"})
    EXPECT_NE(before.head.find(line), std::string::npos) << before.head;
  for (const char* body : {R"({"prompt":"ab"})", R"({"prompt":"ab","stream":true})", R"({"prompt":[-1]})"}) {
    RawClient::Answer a = post("/v1/completions", body, from("https://app.example"));
    EXPECT_NE(a.head.find(kAllowed), std::string::npos) << body << a.head;
    EXPECT_NE(a.head.find("Vary: Origin\r\n"), std::string::npos) << body << a.head;
  }
}

// The openai client in a page sends a dozen headers of its own.
TEST_F(Cors, APageMaySendWhatItsClientAdds) {
  auto preflight = [&](std::string_view headers) {
    return ask(cat("OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n", from("https://app.example"),
                   "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: ", headers, "\r\n\r\n"))
        .head;
  };
  const char* sent = "authorization,content-type,x-stainless-arch,x-stainless-os,x-stainless-retry-count";
  EXPECT_THAT(preflight(sent), testing::HasSubstr(cat("Access-Control-Allow-Headers: ", sent, "\r\n")));
  EXPECT_THAT(preflight("a\tb;c"), testing::HasSubstr("Access-Control-Allow-Headers: authorization, content-type"));
  EXPECT_THAT(post("/v1/completions", R"({"prompt":"ab"})", from("https://app.example")).head,
              testing::HasSubstr("Access-Control-Expose-Headers: X-Request-Id, Retry-After\r\n"));
}

class LocalCors : public HttpFixture {
 protected:
  void configure(ServerOptions& o) override { o.cors = {"localhost"}; }
};

TEST_F(LocalCors, PagesOfThisMachineMayAskFromAnyPort) {
  auto allowed = [&](const char* origin) {
    return post("/v1/completions", R"({"prompt":"ab"})", cat("Origin: ", origin, "\r\n")).status;
  };
  for (const char* origin : {"http://localhost", "http://localhost:3000", "https://localhost:3000",
                             "http://127.0.0.1:81", "http://[::1]", "http://[::1]:3000"})
    EXPECT_EQ(allowed(origin), 200) << origin;
  for (const char* origin : {"http://evil.example", "http://localhost.evil.example", "http://notlocalhost",
                             "ftp://127.0.0.1:9", "http://127.0.0.1.evil.example", "http://localhost:80x", "null"})
    EXPECT_EQ(allowed(origin), 403) << origin;
}

TEST_F(Cors, OthersMayNot) {
  RawClient::Answer before =
      ask(cat("OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\n", from("https://evil.example"), "\r\n"));
  EXPECT_EQ(before.status, 200);  // a browser goes by what it says, which is nothing
  EXPECT_EQ(before.head.find("Access-Control"), std::string::npos) << before.head;
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"ab"})", from("https://evil.example")).status, 403);
  EXPECT_TRUE(engine_.requests.empty());
}

TEST_F(Http, StatsSayWhatTheLastStepsWereMadeOf) {
  Json s = Json::parse(ask(RawClient::get("/stats")).body);
  EXPECT_EQ(s["state"], "serving");
  EXPECT_EQ(s["last_steps"], Json({{2, 1, 66}, {3, 0, 3}}));
}

TEST_F(Http, MetricsAreWhatPrometheusReads) {
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"ab"})").status, 200);
  RawClient::Answer m = ask(RawClient::get("/metrics"));
  EXPECT_EQ(m.status, 200);
  EXPECT_NE(m.head.find("Process-Start-Time-Unix: 1"), std::string::npos) << m.head;
  for (const char* line :
       {"# TYPE kvasir_requests_running gauge\n",
        "\nkvasir_cache_pages_total 100\n",
        "vllm:num_requests_running{model_name=\"fake\"} ",
        "vllm:request_success_total{model_name=\"fake\",finished_reason=\"stop\"} 1\n",
        "\nkvasir_cache_bytes_per_token 128\n",
        "\nkvasir_attention_info{dtype=\"float32\"} 1\n",
        "vllm:prefix_cache_queries_total{",
        "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\",kv_cache_size_tokens=\"1600\","
        "kv_cache_max_concurrency=\"12.5\",cache_dtype=\"float16\"} 1\n",
        "vllm:num_requests_waiting_by_reason{model_name=\"fake\",reason=\"capacity\"} ",
        "vllm:admission_rejections_total{model_name=\"fake\"} 0\n",
        "# TYPE llamacpp:prompt_tokens_total counter\n",
        "\nllamacpp:requests_processing ",
        "\nllamacpp:predicted_tokens_seconds ",
        "vllm:gpu_cache_usage_perc{",
        "vllm:request_prefill_time_seconds_bucket{",
        "vllm:request_inference_time_seconds_count{model_name=\"fake\"} 1\n",
        "vllm:request_num_preemptions_bucket{model_name=\"fake\",le=\"0\"} 3\n",
        "vllm:request_num_preemptions_sum{model_name=\"fake\"} 4\n",
        "vllm:request_params_n_sum{model_name=\"fake\"} 1\n",
        "vllm:request_params_max_tokens_bucket{",
        "vllm:request_decode_time_seconds_count{",
        "kvasir_time_to_first_token_seconds_bucket{le=\"+Inf\"} "})
    EXPECT_NE(m.body.find(line), std::string::npos) << line << m.body;
}

}  // namespace
}  // namespace kvasir::server
