// Cache events in vLLM's form, and the addresses they may be published at. tests/fleet/kv_events.py reads them from a
// live server with the libraries that routers use.
#include "server/kv_zmq/kv_publisher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvasir::server {
namespace {

using engine::CacheEvent;
using testing::HasSubstr;

std::string hex(const std::string& bytes) {
  std::string out;
  for (unsigned char c : bytes) {
    out += "0123456789abcdef"[c >> 4];
    out += "0123456789abcdef"[c & 15];
  }
  return out;
}

TEST(KvPublisher, RemovedAndClearedAreTheseBytes) {
  const std::string removed = kv_event_batch({.kind = CacheEvent::Kind::removed, .hash = 0x1122334455667788}, 16, 1.0);
  EXPECT_EQ(hex(removed),
            "93cb3ff0000000000000"  // [1.0,
            "9183"                  // [{
            "a474797065"
            "ac426c6f636b52656d6f766564"  // type: BlockRemoved
            "ac626c6f636b5f686173686573"
            "91cf1122334455667788"  // block_hashes: [...]
            "a66d656469756d"
            "a3475055"  // medium: GPU
            "00");      // }], 0]
  EXPECT_EQ(hex(kv_event_batch({.kind = CacheEvent::Kind::cleared}, 16, 0)),
            "93cb00000000000000009181a474797065b0416c6c426c6f636b73436c656172656400");
}

TEST(KvPublisher, NumbersTakeAsFewBytesAsTheyNeed) {
  auto stored = [](std::vector<int32_t> tokens, uint64_t hash, uint64_t parent) {
    return hex(kv_event_batch(
        {.kind = CacheEvent::Kind::stored, .hash = hash, .parent = parent, .tokens = std::move(tokens)}, 256, 0));
  };
  const std::string some = stored({0, 127, 128, 255, 256, 65535, 65536}, 1, 0);
  EXPECT_THAT(some, HasSubstr("a9746f6b656e5f696473"
                              "97"
                              "00"
                              "7f"
                              "cc80"
                              "ccff"
                              "cd0100"
                              "cdffff"
                              "ce00010000"));
  EXPECT_THAT(some, HasSubstr("b1706172656e745f626c6f636b5f68617368"
                              "c0"));  // no parent
  EXPECT_THAT(some, HasSubstr("aa626c6f636b5f73697a65"
                              "cd0100"));
  EXPECT_THAT(stored({1}, UINT64_MAX, 5), HasSubstr("b1706172656e745f626c6f636b5f68617368"
                                                    "05"));
  EXPECT_THAT(stored(std::vector<int32_t>(256, 1), 1, 0), HasSubstr("dc0100"
                                                                    "0101"));
}

TEST(KvPublisher, AddressesAreJudgedWithTheirName) {
  for (const char* good :
       {"tcp://*:5557", "tcp://127.0.0.1:1", "tcp://router.example.org:65535", "tcp://[::]:5557", "ipc:///run/kv"})
    EXPECT_TRUE(check_zmq_address(good).ok()) << good;
  for (const char* bad :
       {"", "5557", "tcp://*", "tcp://:5557", "tcp://*:0", "tcp://*:65536", "tcp://*:x", "udp://*:5557", "ipc://"})
    EXPECT_THAT(check_zmq_address(bad).message(), HasSubstr("tcp://*:PORT")) << bad;
  auto judged = [](std::vector<const char*> words) {
    KvPublisherOptions given;
    Options options("test", "");
    given.define(options);
    words.insert(words.begin(), "test");
    testing::internal::CaptureStderr();
    options.parse(int(words.size()), const_cast<char**>(words.data()));
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(judged({"--kv-events-replay", "tcp://*:5558"}), HasSubstr("kv_events_replay needs kv_events"));
  EXPECT_THAT(judged({"--kv-events", "*:5557"}), HasSubstr("kv_events is '*:5557'"));
}

}  // namespace
}  // namespace kvasir::server
