// Calls on the gRPC port that are opened and left: of strangers, of those who never say what they want, of those who
// never read what they are told. What they hold is bounded in total, health is heard meanwhile, and all of it comes
// back.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <future>
#include <iostream>
#include <new>

#include "health.grpc.pb.h"
#include "kvasir.grpc.pb.h"
#include "tests/hostile/hostile.h"
#include "tests/server/grpc_fixture.h"
#include "tests/server/http2_client.h"

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
// gRPC's few threads serve health too: so long it waits beside twenty connections that have a thousand calls refused
// each.
constexpr double kBesideStrangersMs = 500;
constexpr const char* kReflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
constexpr const char* kWatch = "/grpc.health.v1.Health/Watch";
constexpr const char* kGenerate = "/kvasir.v1.Inference/Generate";

// Asks grpc.health.v1 over a channel of its own, over and over.
class RpcHealthWatch {
 public:
  explicit RpcHealthWatch(int port) : thread_([this, port] { ask(port); }) {}
  ~RpcHealthWatch() { stop(); }
  // Each was answered; where nothing else runs, within the bound.
  void expect_answered(double quiet_ms = 50) {
    stop();
    ASSERT_FALSE(times_.empty());
    std::sort(times_.begin(), times_.end());
    const double p99 = times_[(times_.size() * 99) / 100];
    std::cout << "grpc.health answered " << times_.size() << " times, p99 " << p99 << " ms, at most " << times_.back()
              << " ms\n";
    if (std::getenv("KVASIR_QUIET")) {
      EXPECT_LE(p99, quiet_ms) << times_.size() << " were asked";
    }
    EXPECT_EQ(wrong_, "");
  }

 private:
  void ask(int port) {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    auto stub = grpc::health::v1::Health::NewStub(
        grpc::CreateCustomChannel(cat("127.0.0.1:", port), grpc::InsecureChannelCredentials(), own));
    do {
      grpc::ClientContext call;
      call.set_deadline(std::chrono::system_clock::now() + 60s);
      grpc::health::v1::HealthCheckResponse out;
      auto began = std::chrono::steady_clock::now();
      grpc::Status status = stub->Check(&call, {}, &out);
      times_.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count());
      if (!status.ok()) wrong_ = status.error_message();
      std::this_thread::sleep_for(5ms);
    } while (!stopped_);
  }
  void stop() {
    stopped_ = true;
    if (thread_.joinable()) thread_.join();
  }

  std::atomic<bool> stopped_{false};
  std::vector<double> times_;
  std::string wrong_;
  std::thread thread_;
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
      for (uint32_t s = 0; s < 1000; s += 50) {
        std::string bytes;
        for (uint32_t k = 0; k < 50; ++k) bytes += stream(2 * (s + k) + 1);
        if (!all.back()->send(bytes)) break;
        if (reads) all.back()->discard();
      }
    }
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
  health.expect_answered();
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
  health.expect_answered();
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
  health.expect_answered(kBesideStrangersMs);
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
  health.expect_answered();
  all.clear();
  for (int i = 0; i < 100; ++i) {
    auto stub = pb::Inference::NewStub(channel_);
    grpc::ClientContext call;
    pb::ListModelsResponse out;
    if (stub->ListModels(&call, {}, &out).ok()) break;
    std::this_thread::sleep_for(50ms);
  }
  expect_served();
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
