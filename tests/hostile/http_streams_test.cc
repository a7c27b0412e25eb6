// Bytes on the HTTP port that go on and on, or say two things at once: what the server holds of them is bounded in
// total, whoever sends them.
#include <gmock/gmock.h>
#include <netinet/tcp.h>

#include <future>
#include <latch>

#include "server/memory.h"
#include "server/workers.h"
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

// Nobody is asked for a key there: bytes that nobody wants are not taken either.
TEST_F(HttpStreams, NothingIsReadWhereNothingIsMadeOfIt) {
  const std::string piece(1 << 10, ' ');
  for (const char* path : {"/health", "/ready", "/"}) {
    RawClient whole(server_->http_port()), chunked(server_->http_port());
    whole.send(cat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\nContent-Length: ", 1 << 20, "\r\n\r\n"));
    chunked.send(cat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"));
    for (int i = 0; i < 20; ++i) {
      whole.send(piece);
      chunked.send(cat("400\r\n", piece, "\r\n"));
    }
    EXPECT_EQ(whole.read().status, 413) << path;
    EXPECT_EQ(chunked.read().status, 413) << path;
  }
}

class BodiesInTotal : public HttpStreams {
 protected:
  void configure(ServerOptions& o) override {
    o.max_body = ByteSize{8 * kMiB};
    o.max_held = ByteSize{20 * kMiB};
    o.header_timeout = Millis(60'000);
  }
  // Has sent so much of a body, and waits.
  std::unique_ptr<RawClient> holds(int64_t bytes, const std::string& headers = "") {
    auto client = std::make_unique<RawClient>(server_->http_port());
    client->give_up_sending_after(5s);
    client->send(cat("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ",
                     bytes + 1, "\r\n", headers, "\r\n"));
    client->send(std::string(size_t(bytes), ' '));
    return client;
  }
  // How many were told that there is no room, once they are so many.
  static int refused(const std::vector<std::unique_ptr<RawClient>>& clients, int wanted) {
    int told = 0;
    std::vector<bool> heard(clients.size());
    for (int i = 0; i < 600 && told < wanted; ++i) {
      for (size_t c = 0; c < clients.size(); ++c)
        if (!heard[c] && clients[c]->hears_within(0ms)) {
          heard[c] = true;
          told += clients[c]->read().status == 429;
        }
      if (told < wanted) std::this_thread::sleep_for(100ms);
    }
    return told;
  }
};

// Over the total a large body is refused, a small one never is, and all of it comes back.
TEST_F(BodiesInTotal, AllOfThemTogetherHoldNoMoreThanIsAllowed) {
  HealthWatch health(server_->http_port());
  const int64_t before = resident_bytes();
  std::vector<std::unique_ptr<RawClient>> slow;
  for (int i = 0; i < 20; ++i) slow.push_back(holds(7 * kMiB));
  EXPECT_GE(refused(slow, 18), 18);  // there is room for two
  EXPECT_LT(resident_bytes() - before, 96 * kMiB);
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"ab"})").status, 200);
  slow.clear();
  int status = 0;
  for (int i = 0; i < 200 && status != 200; ++i) {
    status = post("/tokenize", cat(R"({"prompt":"ab"})", std::string(7 * kMiB, ' '))).status;
    if (status != 200) std::this_thread::sleep_for(50ms);
  }
  EXPECT_EQ(status, 200);
  health.expect_prompt();
}

class BodiesOfStrangers : public BodiesInTotal {
 protected:
  void configure(ServerOptions& o) override {
    BodiesInTotal::configure(o);
    o.keys_file = keys_.path();
  }
  OneKey keys_;
};

// Nobody unknown has a body read, nor one whose key may not ask now: they are told by what their header says.
TEST_F(BodiesOfStrangers, AreNotRead) {
  for (const std::string& headers : {std::string(), OneKey::header("kvasir-wrong")}) {
    RawClient client(server_->http_port());
    client.send(cat("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n", headers,
                    "Content-Length: ", 8 * kMiB, "\r\n\r\n"));
    EXPECT_EQ(client.read().status, 401);
    EXPECT_TRUE(client.closed_within(20s));
  }
  const int64_t before = resident_bytes();
  std::vector<std::unique_ptr<RawClient>> many;
  for (int i = 0; i < 100; ++i) many.push_back(holds(2 * kMiB));
  EXPECT_LT(resident_bytes() - before, 32 * kMiB);
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"ab"})", keys_.header()).status, 200);
}

// One tenant leaves the others a quarter.
TEST_F(BodiesOfStrangers, OneTenantLeavesRoomForOthers) {
  const std::string bob = keys_.add({}, "bob");
  std::this_thread::sleep_for(1100ms);  // longer than the keys go unlooked at
  std::vector<std::unique_ptr<RawClient>> ann;
  for (int i = 0; i < 3; ++i) ann.push_back(holds(7 * kMiB, keys_.header()));
  ASSERT_GE(refused(ann, 1), 1);  // or two, where all three come at the same pace
  const std::string body = cat(R"({"prompt":"ab"})", std::string(4 * kMiB, ' '));
  EXPECT_EQ(post("/tokenize", body, OneKey::header(bob)).status, 200);
}

// What stands behind the body is no header: a proxy that filters headers never saw it.
TEST_F(BodiesOfStrangers, TrailersAreNoHeaders) {
  const std::string body = "f\r\n{\"prompt\":\"ab\"}\r\n0\r\n";
  EXPECT_EQ(ask(cat(kChunked, "\r\n", body, keys_.header(), "\r\n")).status, 401);
  EXPECT_EQ(ask(cat(kChunked, keys_.header(), "\r\n", body, "X-Request-Timeout: none\r\nHost: evil\r\n\r\n")).status,
            200);
}

// Whoever is over its limit is told so before its megabytes are looked at, at every endpoint that costs.
TEST(LimitsOfKeys, HoldAtEveryEndpointThatCosts) {
  for (const char* path : {"/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions", "/v1/messages",
                           "/v1/messages/count_tokens", "/v1/responses"}) {
    OneKey keys({.requests_per_minute = 1});
    FakeEngine engine;
    ServerOptions options;
    options.grpc_port = -1;
    options.http_port = 0;
    options.access_log = false;
    options.keys_file = keys.path();
    auto server = Server::start(options, engine);
    ASSERT_TRUE(server.ok()) << server.status().message();
    auto ask = [&](std::string_view body, size_t length) {
      RawClient client((*server)->http_port());
      client.send(cat("POST ", path, " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n",
                      keys.header(), "Content-Length: ", length, "\r\n\r\n", body));
      return client.read().status;
    };
    const std::string junk(1000, '[');
    EXPECT_NE(ask(junk, junk.size()), 200) << path;
    if (std::string_view(path).starts_with("/v1/")) {
      EXPECT_EQ(ask("", 8 * kMiB), 429) << path;  // what it was told cost it its request
      continue;
    }
    const std::string good = std::string_view(path) == "/tokenize" ? R"({"prompt":"ab"})" : R"({"tokens":[97]})";
    EXPECT_EQ(ask(junk, junk.size()), 429) << path;
    EXPECT_EQ(ask(good, good.size()), 429) << path;
    EXPECT_EQ(ask("", 8 * kMiB), 429) << path;
  }
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

TEST(WorkersTest, OwnersTakeTurnsAndSmallInputsDoNotWaitForLargeOnes) {
  Workers workers(1, 100);
  std::promise<void> gate;
  std::shared_future<void> open = gate.get_future().share();
  std::promise<void> large_began;
  ASSERT_TRUE(workers.post(
      [&] {
        large_began.set_value();
        open.wait();
      },
      "ann", Workers::kLarge + 1));
  large_began.get_future().wait();
  std::promise<void> small_done;  // while the large one is under way
  ASSERT_TRUE(workers.post([&] { small_done.set_value(); }, "ann", Workers::kLarge));
  small_done.get_future().wait();

  std::promise<void> held;
  ASSERT_TRUE(workers.post(
      [&] {
        held.set_value();
        open.wait();
      },
      "ann"));
  held.get_future().wait();
  std::string order;
  std::mutex mutex;
  auto note = [&](char c) {
    return [&, c] {
      std::lock_guard lock(mutex);
      order += c;
    };
  };
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(workers.post(note('a'), "ann"));
  ASSERT_TRUE(workers.post(note('b'), "bob"));
  ASSERT_TRUE(workers.post(note('c'), "cyd"));
  gate.set_value();
  workers.stop();
  EXPECT_EQ(order, "abcaa");
  EXPECT_FALSE(workers.post([] {}));
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
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"ab"})").status, 200);  // small: it has its own threads
  over = true;
  for (auto& c : clients) c.join();
}

TEST_F(UnderLoad, MoreMessagesThanTheContextHoldsTokensAreNotRendered) {
  std::string messages;
  for (int i = 0; i < 50'000; ++i) messages += R"({"role":"user","content":""},)";
  messages.pop_back();
  expect_error(post("/v1/chat/completions", cat(R"({"messages":[)", messages, "]}")), 400, "messages", "50000 entries");
}

// Each thread has a heap of its own, and what was freed of many small blocks lies at the ends of these.
TEST_F(HttpStreams, WhatThreadsHaveFreedGoesBack) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "another allocator";
#endif
  const int64_t before = resident_bytes();
  { const std::string large(31 << 20, 'x'); }
  std::vector<std::thread> threads;
  std::latch all(8);
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&] {
      { const std::vector<std::string> blocks(500, std::string(100 << 10, 'x')); }
      all.arrive_and_wait();  // so that no two have the same heap
    });
  for (std::thread& t : threads) t.join();
  EXPECT_LT(resident_bytes() - before, 64 * kMiB);
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
