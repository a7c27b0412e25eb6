// Calls on the gRPC port that are opened and left: of strangers, of those who never say what they want, of those who
// never read what they are told. What they hold is bounded in total, health is heard meanwhile, and all of it comes
// back.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <future>
#include <new>

#include "health.grpc.pb.h"
#include "kvasir.grpc.pb.h"
#include "tests/hostile/hostile.h"
#include "tests/hostile/tls_client.h"
#include "tests/server/grpc_fixture.h"
#include "tests/server/http2_client.h"
#include "tests/server/tls_files.h"

namespace {
std::atomic<size_t> largest_block{SIZE_MAX};  // that can be had
}

[[gnu::noinline]] void* operator new(size_t bytes) {
  void* block = bytes > largest_block ? nullptr : std::malloc(bytes);
  if (!block) throw std::bad_alloc();
  return block;
}
[[gnu::noinline]] void operator delete(void* block) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete(void* block, size_t) noexcept { std::free(block); }

namespace kvasir::server {
namespace {

using namespace std::chrono_literals;
namespace pb = kvasir::v1;

constexpr int64_t kMiB = 1 << 20;
constexpr const char* kReflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
constexpr const char* kWatch = "/grpc.health.v1.Health/Watch";
constexpr const char* kCheck = "/grpc.health.v1.Health/Check";
constexpr const char* kGenerate = "/kvasir.v1.Inference/Generate";
constexpr const char* kListModels = "/kvasir.v1.Inference/ListModels";

// Asks grpc.health.v1, a few times on each connection, over and over.
class RpcHealthWatch : public Promptness {
 public:
  using Credentials = std::shared_ptr<grpc::ChannelCredentials>;
  explicit RpcHealthWatch(int port, Credentials how = grpc::InsecureChannelCredentials())
      : Promptness([asker = std::make_shared<Asker>(port, std::move(how))] { return asker->ask(); }) {}

 private:
  class Asker {
   public:
    Asker(int port, Credentials how) : port_(port), how_(std::move(how)) {}
    bool ask() {
      if (asked_++ % kOfAConnection == 0) connect();
      grpc::ClientContext call;
      call.set_deadline(std::chrono::system_clock::now() + 60s);
      grpc::health::v1::HealthCheckResponse out;
      const grpc::Status status = stub_->Check(&call, {}, &out);
      EXPECT_TRUE(status.ok()) << status.error_message();
      return status.ok();
    }

   private:
    static constexpr int kOfAConnection = 8;
    void connect() {
      grpc::ChannelArguments own;
      own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      stub_ = grpc::health::v1::Health::NewStub(grpc::CreateCustomChannel(cat("127.0.0.1:", port_), how_, own));
    }
    const int port_;
    const Credentials how_;
    int asked_ = 0;
    std::unique_ptr<grpc::health::v1::Health::Stub> stub_;
  };
};

class Streams : public GrpcFixture {
 protected:
  static ServerOptions options() {
    ServerOptions o;
    o.max_calls = 1000;
    return o;
  }
  explicit Streams(ServerOptions o = options()) : GrpcFixture(std::move(o)) {}

  std::unique_ptr<Http2Client> connect(int receive_buffer = 0) {
    auto client = std::make_unique<Http2Client>(server_->grpc_port(), receive_buffer);
    client->give_up_sending_after(2s);
    client->send(Http2Client::preface());
    EXPECT_TRUE(client->hears_within(60s));
    client->send(Http2Client::frame(Http2Client::kSettings, Http2Client::kAck, 0));
    return client;
  }
  static std::string opened(uint32_t stream, const char* path, const std::string& more = "") {
    return Http2Client::frame(Http2Client::kHeaders, Http2Client::kEndHeaders, stream,
                              Http2Client::call_headers(path) + more);
  }
  static std::string said(uint32_t stream, const std::string& message) {
    return Http2Client::frame(Http2Client::kData, 0, stream, Http2Client::message(message));
  }
  // So many connections with a thousand streams each, and what the process holds for them.
  int64_t held_by(int connections, const std::function<std::string(uint32_t)>& stream, bool reads) {
    const int64_t before = resident_bytes();
    std::vector<std::unique_ptr<Http2Client>> all;
    for (int i = 0; i < connections; ++i) {
      all.push_back(connect(reads ? 0 : 4096));
      all.back()->give_up_sending_after(100ms);  // what is not read by then is not read soon
      for (uint32_t s = 0; s < 1000; s += 50) {
        std::string bytes;
        for (uint32_t k = 0; k < 50; ++k) bytes += stream(2 * (s + k) + 1);
        if (!all.back()->send(bytes)) break;
        if (reads) all.back()->discard();
      }
    }
    std::this_thread::sleep_for(300ms);  // health is asked for
    const int64_t most = resident_bytes() - before;
    all.clear();
    return most;
  }
  void expect_served() {
    auto stub = pb::Inference::NewStub(channel_);
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + 60s);
    pb::GenerateRequest r;
    r.set_prompt("hello");
    auto reader = stub->Generate(&call, r);
    std::string text;
    for (const auto& e : read_all<pb::GenerateResponse>(*reader)) text += e.delta().text();
    grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(text, "hello");
  }
};

// 20,000 of each kind; unbounded, a stream takes some 20 KiB.
TEST_F(Streams, OfThoseWhoNeedNoKeyAreFew) {
  RpcHealthWatch health(server_->grpc_port());
  const std::string list_services = "\x3a\x01*";
  for (bool reads : {true, false}) {
    EXPECT_LT(held_by(
                  20, [](uint32_t s) { return opened(s, kReflection); }, reads),
              120 * kMiB)
        << reads;
    EXPECT_LT(held_by(
                  20, [&](uint32_t s) { return opened(s, kReflection) + said(s, list_services); }, reads),
              120 * kMiB)
        << reads;
    EXPECT_LT(held_by(
                  20, [](uint32_t s) { return opened(s, kWatch) + said(s, ""); }, reads),
              120 * kMiB)
        << reads;
  }
  health.expect_prompt();
  expect_served();
}

// Whoever has thousands loses one for each that comes; who has one keeps it.
TEST_F(Streams, OfOneConnectionPushOutNobodyElses) {
  auto stub = grpc::health::v1::Health::NewStub(channel_);
  grpc::ClientContext call;
  auto watch = stub->Watch(&call, {});
  grpc::health::v1::HealthCheckResponse said;
  ASSERT_TRUE(watch->Read(&said));
  EXPECT_EQ(said.status(), grpc::health::v1::HealthCheckResponse::SERVING);
  std::vector<std::unique_ptr<Http2Client>> flood;
  for (int i = 0; i < 5; ++i) {
    auto& client = flood.emplace_back(connect());
    const size_t before = client->wait_bytes(18);
    for (uint32_t s = 0; s < 200; ++s) client->send(opened(2 * s + 1, kWatch) + this->said(2 * s + 1, ""));
    EXPECT_GE(client->wait_bytes(before + 200 * 20), before + 200 * 20);  // they have come in
  }
  engine_.set_state(engine::State::stuck);
  ASSERT_TRUE(watch->Read(&said));
  EXPECT_EQ(said.status(), grpc::health::v1::HealthCheckResponse::NOT_SERVING);
  call.TryCancel();
  engine_.set_state(engine::State::serving);
}

TEST_F(Streams, ThatSayNothingGiveWayToThoseThatDo) {
  RpcHealthWatch health(server_->grpc_port());
  auto silent = connect();
  for (uint32_t s = 0; s < 990; ++s) silent->send(opened(2 * s + 1, kGenerate));
  auto more = connect();
  for (uint32_t s = 0; s < 500; ++s) more->send(opened(2 * s + 1, kGenerate));
  expect_served();
  health.expect_prompt();
}

class ImpatientStreams : public Streams {
 protected:
  static ServerOptions impatient() {
    ServerOptions o = options();
    o.header_timeout = Millis(1500);
    return o;
  }
  ImpatientStreams() : Streams(impatient()) {}
};

TEST_F(ImpatientStreams, ACallThatSaysNothingEnds) {
  auto client = connect();
  const size_t before = client->wait_bytes(18);
  client->send(opened(1, kGenerate) + opened(3, kReflection) + opened(5, kWatch));
  EXPECT_GT(client->wait_bytes(before + 200), before + 100);  // trailers: what was wrong
  auto stub = pb::Inference::NewStub(channel_);
  grpc::ClientContext call;
  pb::GenerateRequest request;
  request.set_prompt("x");
  request.set_cache_salt("hang");
  auto reader = stub->Generate(&call, request);  // this one said what it wants
  ASSERT_TRUE(engine_.wait_open(1));
  std::this_thread::sleep_for(3s);
  EXPECT_EQ(engine_.open(), 1);
  call.TryCancel();
  EXPECT_TRUE(all_gone());
}

TEST_F(Streams, MemoryThatCannotBeHadEndsTheCallAndNothingElse) {
  auto stub = pb::Inference::NewStub(channel_);
  pb::TokenizeRequest large;
  large.set_text(std::string(4 * kMiB, 'x'));
  pb::TokenizeResponse out;
  grpc::ClientContext call;
  largest_block = 2 * kMiB;
  grpc::Status status = stub->Tokenize(&call, large, &out);
  largest_block = SIZE_MAX;
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), ::testing::HasSubstr("memory"));
  expect_served();
}

class StrangeStreams : public Streams {
 protected:
  StrangeStreams() { options_.keys_file = keys_.path(); }
  OneKey keys_;
};

// Nothing of a stranger's message is read, and what it is told it is told at once.
TEST_F(StrangeStreams, AreRefusedByTheirHeader) {
  RpcHealthWatch health(server_->grpc_port());
  auto client = connect();
  const size_t before = client->wait_bytes(18);
  client->send(opened(1, kGenerate) + opened(3, "/kvasir.v1.Inference/Nothing"));
  EXPECT_GT(client->wait_bytes(before + 150), before + 100);
  for (bool reads : {true, false})
    EXPECT_LT(held_by(
                  20, [](uint32_t s) { return opened(s, kGenerate); }, reads),
              120 * kMiB)
        << reads;
  // Each sends as much of a message as it is let, or more.
  for (size_t bytes : {4000, 16000}) {
    const std::string large = std::string(1, '\0') + Http2Client::big_endian(8 << 20, 4) + std::string(bytes, 'x');
    auto half = [&](uint32_t s) { return opened(s, kGenerate) + Http2Client::frame(Http2Client::kData, 0, s, large); };
    EXPECT_LT(held_by(20, half, true), 200 * kMiB) << bytes;
  }
  health.expect_prompt();
}

// Somebody with a key opens thousands of calls, over and over, and says nothing in them.
TEST_F(StrangeStreams, OfSomebodyWithAKeyTakeTurnsToo) {
  RpcHealthWatch health(server_->grpc_port());
  const std::string key = Http2Client::header("authorization", "Bearer " + keys_.key);
  for (bool reads : {true, false})
    EXPECT_LT(held_by(
                  20, [&](uint32_t s) { return opened(s, kGenerate, key); }, reads),
              120 * kMiB)
        << reads;
  health.expect_prompt();
}

TEST_F(StrangeStreams, AKeyOverItsLimitIsToldBeforeItsMessageIsRead) {
  const std::string key = keys_.add({.requests_per_minute = 1}, "bob");
  std::this_thread::sleep_for(1100ms);  // longer than the keys go unlooked at
  auto stub = pb::Inference::NewStub(channel_);
  auto tokenize = [&](size_t bytes) {
    grpc::ClientContext call;
    call.AddMetadata("authorization", "Bearer " + key);
    pb::TokenizeRequest in;
    in.set_text(std::string(bytes, 'x'));
    pb::TokenizeResponse out;
    return stub->Tokenize(&call, in, &out).error_code();
  };
  EXPECT_EQ(tokenize(10), grpc::OK);
  EXPECT_EQ(tokenize(10), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(tokenize(4 << 20), grpc::RESOURCE_EXHAUSTED);
}

// Headers of calls as small as they get: what the first of a connection said, the others refer to.
class SmallCalls {
 public:
  explicit SmallCalls(std::string path, uint32_t first = 1) : path_(std::move(path)), first_(first), stream_(first) {}
  std::string next(bool whole) {
    std::string headers = "\x83\x87";  // POST, https
    if (stream_ == first_)
      headers += said('\x44', path_) + said('\x41', "localhost") + said('\x5f', "application/grpc") +
                 said('\x40', "te") + said('\0', "trailers").substr(1);
    else
      headers += "\xc1\xc0\xbf\xbe";
    std::string out = Http2Client::frame(Http2Client::kHeaders, Http2Client::kEndHeaders, stream_, headers);
    out +=
        Http2Client::frame(Http2Client::kData, whole ? Http2Client::kEndStream : 0, stream_, Http2Client::message(""));
    stream_ += 2;
    return out;
  }

 private:
  static std::string said(char how, std::string_view text) {
    return std::string(1, how) + char(text.size()) + std::string(text);
  }
  const std::string path_;
  const uint32_t first_;
  uint32_t stream_;
};

// How many streams the server has ended, by the frames it sent.
class Ended {
 public:
  void add(std::string_view bytes) {
    rest_ += bytes;
    size_t at = 0;
    for (size_t size; rest_.size() - at >= 9; at += 9 + size) {
      auto byte = [&](size_t i) { return static_cast<unsigned char>(rest_[at + i]); };
      size = size_t(byte(0)) << 16 | size_t(byte(1)) << 8 | byte(2);
      if (rest_.size() - at < 9 + size) break;
      count_ += byte(3) == Http2Client::kHeaders && (byte(4) & Http2Client::kEndStream);
    }
    rest_.erase(0, at);
  }
  int count() const { return count_; }

 private:
  std::string rest_;
  int count_ = 0;
};

class StreamsOverTls : public Streams {
 protected:
  StreamsOverTls() {
    files_.make("server");
    options_.tls_cert = files_.path("server.pem");
    options_.tls_key = files_.path("server.key");
    options_.keys_file = keys_.path();
    std::this_thread::sleep_for(1100ms);  // the files have been there for a while
  }
  std::unique_ptr<TlsClient> connect_tls(bool retries_hello = true) {
    auto client = std::make_unique<TlsClient>(files_.path("server.pem"));
    if (!retries_hello) client->only(TLS1_2_VERSION, nullptr);
    EXPECT_TRUE(client->connect(server_->grpc_port()));
    client->give_up_sending_after(2s);
    client->send(Http2Client::preface());
    EXPECT_FALSE(client->hear(60s).empty());
    client->send(Http2Client::frame(Http2Client::kSettings, Http2Client::kAck, 0));
    return client;
  }
  // Sends many calls at once; how long it took until all of them were answered, and whether no more of them were at any
  // moment than strangers may have.
  std::pair<Milliseconds, bool> answered(TlsClient& client, SmallCalls calls, int n) {
    std::string bytes;
    for (int i = 0; i < n; ++i) bytes += calls.next(true);
    Ended ended;
    bool few = true;
    const auto began = std::chrono::steady_clock::now();
    const auto since = [&] { return Milliseconds(std::chrono::steady_clock::now() - began); };
    EXPECT_TRUE(client.send(bytes));
    while (ended.count() < n && since() < 60s) {
      ended.add(client.hear(100ms));
      few &= ended.count() <= 32 + kOfOnePart + 128 * since().count() / 1000;
    }
    EXPECT_EQ(ended.count(), n);
    return {since(), few};
  }

  static constexpr int kOfOnePart = 16;  // a quarter of a KiB is read at a time
  TlsFiles files_;
  OneKey keys_;
};

// All come in one record, which is deciphered whole.
TEST_F(StreamsOverTls, WithoutAKeyAreReadAsInTheClear) {
  for (bool retries_hello : {true, false}) {
    auto client = connect_tls(retries_hello);
    EXPECT_TRUE(answered(*client, SmallCalls(kCheck), 400).second);
  }
}

TEST_F(StreamsOverTls, OfAConnectionThatShowedAKeyAreReadAtOnce) {
  const Milliseconds slow((400 - 32 - kOfOnePart) * 1000 / 128);
  Milliseconds least = slow;
  for (int tries = 0; tries < 10 && least >= slow; ++tries) {
    auto client = connect_tls();
    const std::string call =
        Http2Client::call_headers(kListModels) + Http2Client::header("authorization", "Bearer " + keys_.key);
    client->send(Http2Client::frame(Http2Client::kHeaders, Http2Client::kEndHeaders, 1, call) +
                 Http2Client::frame(Http2Client::kData, Http2Client::kEndStream, 1, Http2Client::message("")));
    for (Ended first; first.count() == 0;) first.add(client->hear(60s));
    SmallCalls calls(kCheck, 3);
    least = std::min(least, answered(*client, calls, 400).first);
  }
  EXPECT_LT(least, slow);
}

TEST_F(StreamsOverTls, OfThoseWhoNeedNoKeyAreFew) {
  RpcHealthWatch health(server_->grpc_port(), grpc::SslCredentials({files_.read("server.pem"), "", ""}));
  const int64_t before = resident_bytes();
  for (const char* path : {kWatch, kReflection, kGenerate}) {
    std::vector<std::unique_ptr<TlsClient>> all;
    for (int i = 0; i < 20; ++i) {
      auto& client = all.emplace_back(connect_tls());
      SmallCalls calls(path);
      std::string bytes;
      for (int s = 0; s < 1000; ++s) bytes += calls.next(false);
      client->send(bytes);
    }
    EXPECT_LT(resident_bytes() - before, 120 * kMiB) << path;
  }
  health.expect_prompt();
}

class MessagesInTotal : public Streams {
 protected:
  static ServerOptions small() {
    ServerOptions o = options();
    o.max_held = ByteSize{64 * kMiB};
    return o;
  }
  MessagesInTotal() : Streams(small()) {}
};

// Of many clients that each send most of a large message, and stop.
TEST_F(MessagesInTotal, AreBounded) {
  RpcHealthWatch health(server_->grpc_port());
  const int64_t before = resident_bytes();
  std::vector<std::unique_ptr<Http2Client>> all;
  const std::string frame = Http2Client::frame(Http2Client::kData, 0, 1, std::string(16000, 'x'));
  for (int i = 0; i < 60; ++i) {
    auto& client = all.emplace_back(connect());
    client->give_up_sending_after(300ms);
    client->send(opened(1, kGenerate) + Http2Client::frame(Http2Client::kData, 0, 1,
                                                           std::string(1, '\0') + Http2Client::big_endian(8 << 20, 4)));
    for (int k = 0; k < 450 && client->send(frame); ++k) {
    }
  }
  EXPECT_LT(resident_bytes() - before, 256 * kMiB);
  health.expect_prompt();
  all.clear();
  for (int i = 0; i < 100; ++i) {
    auto stub = pb::Inference::NewStub(channel_);
    grpc::ClientContext call;
    pb::ListModelsResponse out;
    if (stub->ListModels(&call, {}, &out).ok()) break;
    std::this_thread::sleep_for(50ms);
  }
  expect_served();
  EXPECT_TRUE(shrinks_to(before + 128 * kMiB, false));
  EXPECT_TRUE(shrinks_to(before + 64 * kMiB));
}

// Two bytes each on the wire, a hundred in memory: four million empty messages in one of 8 MiB.
TEST_F(Streams, AMessageOfTooManyPartsIsNotUnpacked) {
  const int64_t before = resident_bytes();
  for (auto [path, field] :
       {std::pair("/ppl.llm.proto.LLMService/Generation", '\x0a'), std::pair("/kvasir.v1.Inference/Cancel", '\x0a')}) {
    std::string parts;
    for (int i = 0; i < 4'000'000; ++i) parts += {field, '\0'};
    grpc::GenericStub stub(channel_);
    grpc::ClientContext call;
    grpc::Slice slice(parts);
    grpc::ByteBuffer request(&slice, 1), response;
    std::promise<grpc::Status> done;
    stub.UnaryCall(&call, path, {}, &request, &response, [&](grpc::Status s) { done.set_value(s); });
    EXPECT_EQ(done.get_future().get().error_code(), grpc::INVALID_ARGUMENT) << path;
  }
  EXPECT_LT(resident_bytes() - before, 128 * kMiB);
}

}  // namespace
}  // namespace kvasir::server
