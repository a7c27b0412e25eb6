// Bytes on the HTTP port that go on and on, or say two things at once: what the server holds of them is bounded,
// and health is heard meanwhile.
#include <gmock/gmock.h>

#include "tests/hostile/hostile.h"
#include "tests/server/http_fixture.h"

namespace kvasir::server {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kMiB = 1 << 20;
constexpr const char* kChunked =
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Transfer-Encoding: chunked\r\n";

class HttpStreams : public HttpFixture {
 protected:
  // Sends `piece` again and again; true when the server had enough before 256 MiB.
  bool endless(const std::string& begin, const std::string& piece) {
    RawClient client(server_->http_port());
    client.give_up_sending_after(5s);
    client.send(begin);
    for (int64_t sent = 0; sent < 256 * kMiB; sent += int64_t(piece.size()))
      if (!client.send(piece)) return true;
    return false;
  }
};

TEST_F(HttpStreams, ChunkExtensionsAndTrailersThatNeverEnd) {
  HealthWatch health(server_->http_port());
  const int64_t before = resident_bytes();
  const std::string filler(64 << 10, 'x');
  std::string fields;
  for (int i = 0; i < 1000; ++i) fields += cat("X-", i, ": ", std::string(50, 'x'), "\r\n");
  EXPECT_TRUE(endless(cat(kChunked, "\r\n1;a="), filler));
  EXPECT_TRUE(endless(cat(kChunked, "\r\n0\r\n"), fields));
  EXPECT_TRUE(endless(cat(kChunked, "\r\n0\r\nX: "), filler));
  EXPECT_TRUE(endless(cat(kChunked, "\r\n", std::string(100, '0')), std::string(64 << 10, '0')));
  EXPECT_LT(resident_bytes() - before, 32 * kMiB);
  RawClient client(server_->http_port());
  client.send(cat(kChunked, "\r\n1;a=", std::string(17 << 10, 'x')));
  expect_error(client.read(), 431, "", "extensions");
  RawClient small(server_->http_port());
  small.send(cat(kChunked, "\r\nf;a=b\r\n{\"prompt\":\"ab\"}\r\n0\r\nX-Checksum: 1\r\n\r\n"));
  EXPECT_EQ(small.read().status, 200);
  health.expect_prompt();
}

class BodiesOfStrangers : public HttpStreams {
 protected:
  void configure(ServerOptions& o) override { o.keys_file = keys_.path(); }
  OneKey keys_;
};

// What stands behind the body is no header: a proxy that filters headers never saw it.
TEST_F(BodiesOfStrangers, TrailersAreNoHeaders) {
  const std::string body = "f\r\n{\"prompt\":\"ab\"}\r\n0\r\n";
  EXPECT_EQ(ask(cat(kChunked, "\r\n", body, keys_.header(), "\r\n")).status, 401);
  EXPECT_EQ(ask(cat(kChunked, keys_.header(), "\r\n", body, "X-Request-Timeout: none\r\nHost: evil\r\n\r\n")).status,
            200);
}

TEST_F(HttpStreams, HostsThatAreNone) {
  auto status = [&](const std::string& host) {
    return ask(cat("GET /health HTTP/1.1\r\nHost: ", host, "\r\n\r\n")).status;
  };
  for (const char* host :
       {"[evil.example]", "[evil.example]:80", "localhost:80@evil", "localhost:80:80", "127.0.0.1@evil.example",
        "[::1]evil", "[::1", "local host", "localhost/evil", "user@localhost", "localhost:999999", "[::1]:8x"})
    EXPECT_EQ(status(host), 400) << host;
  for (const char* host : {"1.2.3", "0x7f.1", "evil.localhost.example", "127.0.0.1.evil.example"})
    EXPECT_EQ(status(host), 403) << host;
  for (const char* host :
       {"localhost", "localhost:", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "[FE80::1]", "10.1.2.3:1"})
    EXPECT_EQ(status(host), 200) << host;
}

// Whatever was sent ahead, an end behind it is the end.
TEST_F(HttpStreams, WhoLeavesIsNoticedWhateverWasSentAhead) {
  for (const char* stream : {"true", "false"})
    for (size_t ahead : {0, 1, 100, 20 << 10, 200 << 10, 2 << 20}) {
      RawClient client(server_->http_port());
      client.send(
          RawClient::post("/v1/completions", cat(R"({"prompt":"ab","cache_salt":"hang","stream":)", stream, "}")));
      ASSERT_TRUE(engine_.wait_open(1));
      client.give_up_sending_after(1s);
      client.send(std::string(ahead, 'G'));
      auto began = std::chrono::steady_clock::now();
      client.close();
      EXPECT_TRUE(all_gone()) << "stream " << stream << ", ahead " << ahead;
      EXPECT_LT(std::chrono::steady_clock::now() - began, 20s) << "stream " << stream << ", ahead " << ahead;
    }
}

// A request that came early is answered in its turn.
TEST_F(HttpStreams, WhatWasSentAheadIsAnswered) {
  RawClient client(server_->http_port());
  const std::string hangs = R"({"prompt":"ab","cache_salt":"hang","max_tokens":1,"stream":true})";
  client.send(RawClient::post("/v1/completions", hangs));
  ASSERT_TRUE(engine_.wait_open(1));
  client.send(RawClient::get("/health"));
  const std::string id = engine_.last().id;
  for (int i = 0; i < 100 && !engine_.cancel("", id); ++i) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(client.read().status, 200);
  EXPECT_NE(client.read().body.find("serving"), std::string::npos);
}

// Large inputs of others, over and over.
class UnderLoad : public HttpFixture {
  void configure(ServerOptions& o) override { o.workers = 1; }
};

TEST_F(UnderLoad, HealthDoesNotWaitForWork) {
  std::atomic<bool> over{false};
  std::vector<std::thread> clients;
  const std::string body = cat(R"({"prompt":")", std::string(4 * kMiB, 'a'), "\"}");
  for (int i = 0; i < 4; ++i)
    clients.emplace_back([&] {
      while (!over) EXPECT_EQ(post("/tokenize", body).status, 200);
    });
  HealthWatch health(server_->http_port());
  std::this_thread::sleep_for(2s);
  health.expect_prompt();
  over = true;
  for (auto& c : clients) c.join();
}

// Over the limit of connections only health is answered, and those who say nothing are not waited for.
class Full : public HttpFixture {
  void configure(ServerOptions& o) override {
    o.max_connections = 20;
    o.header_timeout = Millis(60'000);
  }
};

TEST_F(Full, HealthIsAnsweredWhoeverHoldsTheConnections) {
  std::vector<std::unique_ptr<RawClient>> held;
  for (int i = 0; i < 20; ++i) {
    held.push_back(std::make_unique<RawClient>(server_->http_port()));
    held.back()->send(RawClient::get("/health"));
    ASSERT_EQ(held.back()->read().status, 200);
  }
  EXPECT_EQ(ask(RawClient::get("/health")).status, 200);
  EXPECT_EQ(ask(RawClient::get("/ready")).status, 200);
  expect_error(post("/v1/completions", R"({"prompt":"ab"})"), 503, "", "max_connections");
  for (int i = 0; i < 30; ++i) held.push_back(std::make_unique<RawClient>(server_->http_port()));
  int status = 0;
  for (int i = 0; i < 500 && status != 200; ++i) {  // the silent ones are closed within a moment
    status = ask(RawClient::get("/health")).status;
    if (status != 200) std::this_thread::sleep_for(20ms);
  }
  EXPECT_EQ(status, 200);
}

}  // namespace
}  // namespace kvasir::server
