// What the guard of the gRPC port makes of a connection's bytes, and how long it has callers wait.
#include "server/grpc/frame_scanner.h"

#include "server/grpc/pacer.h"
#include "tests/hostile/hostile.h"
#include "tests/server/http2_client.h"

namespace kvasir::server {
namespace {

using namespace std::chrono_literals;

TEST(FrameScannerTest, ReadsManyStreamsInPartsAndLargeMessagesWhole) {
  rpc::FrameScanner s;
  s.sends();
  s.know();
  auto take = [&](const std::string& bytes) {
    EXPECT_TRUE(s.take(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()));
  };
  take(Http2Client::preface() + Http2Client::frame(Http2Client::kSettings, Http2Client::kAck, 0));
  EXPECT_EQ(s.many_opened(), 0u);
  EXPECT_LE(s.most_at_once(), 8u << 10);
  const std::string call = Http2Client::call(1, "/kvasir.v1.Inference/Generate", "");
  take(call + Http2Client::frame(Http2Client::kData, 0, 1, std::string(16'000, 'x')).substr(0, 100));
  EXPECT_GT(s.most_at_once(), 15'000u);
  take(std::string(16'000 - 91, 'x'));
  std::string many;
  for (int i = 0; i < 60; ++i) many += call;
  take(many);
  EXPECT_EQ(s.many_opened(), 0u);  // as many as users ask at once
  EXPECT_FALSE(s.in_parts());
  take(many);
  EXPECT_EQ(s.many_opened(), 60u);
  EXPECT_TRUE(s.in_parts());
  EXPECT_LE(s.most_at_once(), 2u << 10);
}

// Who has shown a key waits long after those who have not, and for nobody but those who have.
TEST(PacerTest, EachKindHasItsTurns) {
  rpc::Pacer pacer;
  EXPECT_EQ(pacer.turn(32, true).count(), 0);
  EXPECT_GE(pacer.turn(256, true), 900ms);
  EXPECT_EQ(pacer.turn(size_t(rpc::Pacer::kKnownAtOnce), false).count(), 0);
  const auto second = size_t(rpc::Pacer::known_a_second());
  EXPECT_GE(pacer.turn(4 * second, false), 3500ms);
  EXPECT_LE(pacer.turn(1, false), 4100ms);
}

}  // namespace
}  // namespace kvasir::server
