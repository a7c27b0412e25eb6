// Clients that mean harm at the level of the wire: the server stays, its memory stays, and others are served meanwhile.
#include <gmock/gmock.h>

#include <fstream>

#include "kvasir.grpc.pb.h"
#include "server/grpc/frame_scanner.h"
#include "tests/server/grpc_fixture.h"
#include "tests/server/http2_client.h"
#include "tests/server/http_fixture.h"

namespace kvasir::server {
namespace {

using namespace std::chrono_literals;
namespace pb = kvasir::v1;

constexpr const char* kGenerate = "/kvasir.v1.Inference/Generate";

int64_t resident_bytes() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

class Flood : public GrpcFixture {
 protected:
  static ServerOptions impatient() {
    ServerOptions o;
    o.header_timeout = Millis(5000);
    o.max_connections = 40;
    return o;
  }
  explicit Flood(ServerOptions o = impatient()) : GrpcFixture(std::move(o)) {}

  static std::string prompt(const char* text, const char* salt = "") {
    pb::GenerateRequest r;
    r.set_prompt(text);
    r.set_cache_salt(salt);
    return r.SerializeAsString();
  }
  // Somebody else's whole request, on a connection of its own. Patient: it may be turned away and come back.
  void expect_served(bool patient = false) {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    auto channel =
        grpc::CreateCustomChannel(cat("127.0.0.1:", server_->grpc_port()), grpc::InsecureChannelCredentials(), own);
    auto stub = pb::Inference::NewStub(channel);
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + 60s);
    call.set_wait_for_ready(patient);
    pb::GenerateRequest r;
    r.set_prompt("hello");
    auto reader = stub->Generate(&call, r);
    std::string text;
    for (const auto& e : read_all<pb::GenerateResponse>(*reader)) text += e.delta().text();
    grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(text, "hello");
  }
  // Sends piece(0), piece(1) ... until `count` or until the server has had enough; others are served in between.
  template <class Piece>
  bool flood(Http2Client& client, int count, Piece piece) {
    for (int i = 0; i < count; ++i) {
      if (!client.send(piece(i))) return false;
      if (i % (count / 4) == count / 8) expect_served();
    }
    return true;
  }
};

TEST_F(Flood, RapidResetsCancelWhatTheyBegan) {
  Http2Client client(server_->grpc_port());
  ASSERT_TRUE(client.send(Http2Client::preface()));
  std::string request = prompt("x", "hang");
  uint32_t stream = 1;
  flood(client, 40, [&](int) {
    std::string bytes;
    for (int i = 0; i < 250; ++i, stream += 2)
      bytes += Http2Client::call(stream, kGenerate, request) + Http2Client::reset(stream);
    client.discard();
    return bytes;
  });
  expect_served();
  client.close();
  EXPECT_TRUE(all_gone());
}

// Whether or not it acknowledges how many it may open, and when it does so before it was told.
TEST_F(Flood, MoreStreamsThanAllowedAreNotServed) {
  const std::string acknowledgement = Http2Client::frame(Http2Client::kSettings, Http2Client::kAck, 0);
  for (std::string acknowledges : {"once told", "never", "before it is told"}) {
    Http2Client client(server_->grpc_port());
    client.send(Http2Client::preface() + (acknowledges == "before it is told" ? acknowledgement : ""));
    ASSERT_TRUE(client.hears_within(10s));  // the server's settings
    if (acknowledges == "once told") client.send(acknowledgement);
    std::string request = prompt("x", "hang");
    int most = 0;
    for (uint32_t i = 0; i < 4000; ++i) {
      if (!client.send(Http2Client::call(2 * i + 1, kGenerate, request))) break;
      most = std::max(most, engine_.open());
    }
    expect_served();
    EXPECT_LE(std::max(most, engine_.open()), 1025) << acknowledges;
    client.close();
    EXPECT_TRUE(all_gone()) << acknowledges;
  }
}

// Over TLS the frames are seen only after they were deciphered.
TEST(FrameScannerTest, EndsWhatGoesOnForEverAndNothingElse) {
  using rpc::FrameScanner;
  auto take = [](FrameScanner& s, const std::string& bytes, size_t piece) {
    for (size_t at = 0; at < bytes.size(); at += piece)
      if (!s.take(reinterpret_cast<const unsigned char*>(bytes.data()) + at, std::min(piece, bytes.size() - at)))
        return false;
    return true;
  };
  const std::string headers = Http2Client::call_headers(kGenerate), large(60'000, 'x');
  std::string good = Http2Client::preface() + Http2Client::frame(Http2Client::kSettings, Http2Client::kAck, 0);
  for (uint32_t i = 0; i < 5000; ++i)
    good += Http2Client::frame(Http2Client::kHeaders, Http2Client::kEndHeaders, 2 * i + 1, headers) +
            Http2Client::frame(Http2Client::kData, 1, 2 * i + 1, headers);
  good += Http2Client::frame(Http2Client::kHeaders, 0, 20001, large.substr(0, 16000)) +
          Http2Client::frame(Http2Client::kContinuation, Http2Client::kEndHeaders, 20001, large.substr(0, 16000));
  for (size_t piece : {size_t(1), size_t(7), size_t(8192), good.size()}) {
    FrameScanner early;  // nothing was sent that could be acknowledged
    EXPECT_FALSE(take(early, good, piece)) << piece;
    FrameScanner s;
    s.sends();
    EXPECT_TRUE(take(s, good, piece)) << piece;
    std::string endless = Http2Client::frame(Http2Client::kHeaders, 0, 20003, headers);
    for (int i = 0; i < 9; ++i)
      endless += Http2Client::frame(Http2Client::kContinuation, 0, 20003, large.substr(0, 9000));
    EXPECT_FALSE(take(s, endless, piece)) << piece;
  }
  FrameScanner resets;
  resets.sends();
  EXPECT_TRUE(take(resets, good, good.size()));
  std::string flood;
  for (uint32_t i = 0; i < 3000; ++i) flood += Http2Client::reset(2 * i + 1);
  EXPECT_FALSE(take(resets, flood, flood.size()));
  FrameScanner other;
  EXPECT_TRUE(take(other, "GET / HTTP/1.1\r\n\r\n" + std::string(200'000, '\x09'), 1000));
}

// What a channel that is kept open does every half a minute is no flood.
TEST_F(Flood, AFewPingsOfAnIdleClientAreAnswered) {
  Http2Client client(server_->grpc_port());
  ASSERT_TRUE(client.send(Http2Client::preface()));
  size_t before = client.wait_bytes(9 + 9);  // its settings, and that ours are acknowledged
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(client.send(Http2Client::frame(Http2Client::kPing, 0, 0, "12345678")));
  EXPECT_GE(client.wait_bytes(before + 3 * 17), before + 3 * 17);
  EXPECT_FALSE(client.closed_within(300ms));
  expect_served();
}

TEST_F(Flood, PingsEndTheConnection) {
  Http2Client client(server_->grpc_port());
  ASSERT_TRUE(client.send(Http2Client::preface()));
  flood(client, 40, [&](int) {
    std::string bytes;
    for (int i = 0; i < 50; ++i) bytes += Http2Client::frame(Http2Client::kPing, 0, 0, "12345678");
    client.discard();
    return bytes;
  });
  EXPECT_TRUE(client.closed_within(10s));
  expect_served();
}

TEST_F(Flood, SettingsWhoseAnswersNobodyReads) {
  int64_t before = resident_bytes();
  Http2Client client(server_->grpc_port());
  ASSERT_TRUE(client.send(Http2Client::preface()));
  client.give_up_sending_after(200ms);  // a server that stops reading is a good answer
  std::string bytes;
  for (int i = 0; i < 2000; ++i) bytes += Http2Client::frame(Http2Client::kSettings, 0, 0);
  flood(client, 400, [&](int) { return bytes; });
  expect_served();
  EXPECT_LT(resident_bytes() - before, 64 << 20);
}

TEST_F(Flood, HeadersThatNeverEnd) {
  int64_t before = resident_bytes();
  Http2Client client(server_->grpc_port());
  ASSERT_TRUE(client.send(Http2Client::preface()));
  client.give_up_sending_after(200ms);
  client.send(Http2Client::frame(Http2Client::kHeaders, 0, 1, Http2Client::call_headers(kGenerate)));
  std::string filler = Http2Client::header("x-filler", std::string(8000, 'x'));
  std::string bytes;
  for (int i = 0; i < 16; ++i) bytes += Http2Client::frame(Http2Client::kContinuation, 0, 1, filler);
  flood(client, 800, [&](int) {  // 100 MB
    client.discard();
    return bytes;
  });
  expect_served();
  EXPECT_LT(resident_bytes() - before, 64 << 20);
}

class Impatient : public Flood {
 protected:
  static ServerOptions at_once() {
    ServerOptions o;
    o.header_timeout = Millis(300);
    return o;
  }
  Impatient() : Flood(at_once()) {}
};

TEST_F(Impatient, ThoseWhoDoNotSayTheirFirstWordsAreClosed) {
  Http2Client silent(server_->grpc_port()), half(server_->grpc_port()), http1(server_->grpc_port());
  half.send("PRI * HTTP/2.0\r\n\r\nS");
  http1.send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(silent.closed_within(10s));
  EXPECT_TRUE(half.closed_within(10s));
  EXPECT_TRUE(http1.closed_within(10s));
}

TEST_F(Flood, AMessageThatNeverComesHoldsUpNobody) {
  std::vector<std::unique_ptr<Http2Client>> slow;
  for (int i = 0; i < 20; ++i) {
    auto& c = slow.emplace_back(std::make_unique<Http2Client>(server_->grpc_port()));
    c->send(
        Http2Client::preface() +
        Http2Client::frame(Http2Client::kHeaders, Http2Client::kEndHeaders, 1, Http2Client::call_headers(kGenerate)) +
        Http2Client::frame(Http2Client::kData, 0, 1, Http2Client::message(prompt("hello")).substr(0, 6)));
  }
  expect_served();
  EXPECT_TRUE(all_gone());
}

TEST_F(Flood, FramesThatAreNone) {
  for (std::string bytes :
       {std::string(65536, '\xff'), Http2Client::frame(Http2Client::kData, 0, 1, "no stream"),
        Http2Client::frame(Http2Client::kHeaders, Http2Client::kEndHeaders, 2, "\x82"),
        Http2Client::frame(Http2Client::kHeaders, Http2Client::kEndHeaders, 1, "\xff\xff\xff\xff\x7f"),
        Http2Client::frame(Http2Client::kReset, 0, 0, "1"), std::string("\xff\xff\xff\x00\x00", 5)}) {
    Http2Client client(server_->grpc_port());
    client.send(Http2Client::preface() + bytes);
    expect_served();
  }
}

TEST_F(Flood, ConnectionsOverTheLimitAreClosedAndRoomComesBack) {
  std::vector<std::unique_ptr<Http2Client>> held;
  for (int i = 0; i < 40; ++i) {
    held.push_back(std::make_unique<Http2Client>(server_->grpc_port()));
    held.back()->send(Http2Client::preface());
  }
  for (auto& c : held) ASSERT_GT(c->wait_bytes(9), 0u);  // its settings: each is served
  Http2Client extra(server_->grpc_port());
  EXPECT_TRUE(extra.closed_within(10s));
  held.clear();
  expect_served(true);  // the server hears one by one that they have gone
}

class HttpFlood : public HttpFixture {
  void configure(ServerOptions& o) override {
    o.max_connections = 20;
    o.header_timeout = Millis(60'000);
  }
};

TEST_F(HttpFlood, ConnectionsOverTheLimitAreClosedAndRoomComesBack) {
  std::vector<std::unique_ptr<RawClient>> held;
  for (int i = 0; i < 20; ++i) {
    held.push_back(std::make_unique<RawClient>(server_->http_port()));
    held.back()->send(RawClient::get("/health"));
    ASSERT_EQ(held.back()->read().status, 200);
  }
  RawClient extra(server_->http_port());
  EXPECT_TRUE(extra.closed_within(10s));
  held.clear();
  int status = 0;
  for (int i = 0; i < 500 && status != 200; ++i) {
    RawClient again(server_->http_port());
    again.send(RawClient::get("/health"));
    status = again.read().status;
    if (status != 200) std::this_thread::sleep_for(10ms);
  }
  EXPECT_EQ(status, 200);
}

TEST_F(HttpFlood, SlowHeadersHoldUpNobody) {
  std::vector<std::unique_ptr<RawClient>> slow;
  for (int i = 0; i < 15; ++i) {
    slow.push_back(std::make_unique<RawClient>(server_->http_port()));
    slow.back()->send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\nX: ");
  }
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"ab"})").status, 200);
}

}  // namespace
}  // namespace kvasir::server
