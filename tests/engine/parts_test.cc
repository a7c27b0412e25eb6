// The small parts by themselves: the channel, the histogram, the size of the cache.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <thread>

#include "engine/channel.h"
#include "engine/grammar_worker.h"
#include "engine/histogram.h"
#include "engine/kv_memory.h"
#include "engine/recording_file.h"
#include "engine/step_cost.h"
#include "engine/waiting_room.h"
#include "tests/scratch.h"

namespace kvasir::engine {
namespace {

Tokens some(int32_t choice, int count, std::string text = "") {
  return {choice, std::vector<TokenOut>(size_t(count)), std::move(text)};
}

TEST(WaitingRoom, ATenantHasNoMoreThanWhatItLeavesToOthers) {
  WaitingRoom room;
  const WaitingRoom::Limits limits{100, 1000, 1};
  const auto flood = [&](const std::string& tenant, int64_t tokens) {
    int in = 0;
    Status refused;
    while ((refused = room.enter(tenant, tokens, limits, 0)).ok()) ++in;
    EXPECT_EQ(refused.code(), Code::resource_exhausted);
    EXPECT_TRUE(refused.retry_after().has_value());
    return in;
  };
  EXPECT_EQ(flood("a", 1), 50);  // half of the requests
  EXPECT_EQ(flood("b", 1), 25);  // half of the rest
  EXPECT_EQ(flood("c", 50), 9);  // of the tokens
  EXPECT_EQ(flood("", 1), 16);   // without keys there is one tenant: all that is left
  EXPECT_EQ(room.all().requests, 100);
  for (int i = 0; i < 50; ++i) room.leave("a", 1);
  EXPECT_EQ(room.all().requests, 50);
  EXPECT_TRUE(room.enter("d", 10000, {100, 20000, 1}, 0).ok());
  EXPECT_TRUE(room.enter("e", 9000, {100, 20000, 1}, 0).ok()) << "the first of a tenant has what is left";
}

TEST(WaitingRoom, OneLongPromptMayComeToAnEmptyQueue) {
  WaitingRoom room;
  EXPECT_TRUE(room.enter("a", 5000, {10, 1000, 1}, 0).ok());
  EXPECT_EQ(room.enter("b", 1, {10, 1000, 1}, 0).code(), Code::resource_exhausted);
}

TEST(Channel, MergesAdjacentTokensOfAChoiceOnly) {
  Channel c(100);
  c.push(some(0, 1, "a"));
  c.push(some(0, 2, "b"));
  c.push(some(1, 1, "x"));
  c.push(some(0, 1, "c"));
  bool drained;
  auto first = std::get<Tokens>(*c.poll(&drained));
  EXPECT_EQ(first.text, "ab");
  EXPECT_EQ(first.tokens.size(), 3u);
  EXPECT_EQ(std::get<Tokens>(*c.poll(&drained)).text, "x");
  EXPECT_EQ(std::get<Tokens>(*c.poll(&drained)).text, "c");
  EXPECT_FALSE(c.poll(&drained));
}

TEST(Channel, SaysOnceThatItIsFullAndOnceThatItHasRoom) {
  Channel c(4);
  EXPECT_FALSE(c.push(some(0, 3)));
  EXPECT_FALSE(c.full());
  EXPECT_TRUE(c.push(some(1, 1)));
  EXPECT_FALSE(c.push(some(1, 1)));
  EXPECT_TRUE(c.full());
  bool drained;
  c.poll(&drained);
  EXPECT_TRUE(drained);
  c.poll(&drained);
  EXPECT_FALSE(drained);
}

TEST(Channel, CallsTheReaderWhenSomethingComesAfterNothing) {
  Channel c(100);
  int calls = 0;
  c.on_ready([&] { ++calls; });
  EXPECT_EQ(calls, 0);
  c.push(some(0, 1));
  c.announce();
  c.push(some(0, 1));
  c.announce();
  EXPECT_EQ(calls, 1);  // it has not read yet
  bool drained;
  c.poll(&drained);
  c.push(some(0, 1));
  c.announce();
  EXPECT_EQ(calls, 2);
  int late = 0;
  c.on_ready([&] { ++late; });  // something waits already
  EXPECT_EQ(late, 1);
  c.on_ready(nullptr);
  c.announce();
}

TEST(Channel, ACallbackMayDetach) {
  Channel c(100);
  int calls = 0;
  c.on_ready([&] {
    ++calls;
    c.detach();
  });
  bool drained;
  for (int i = 0; i < 3; ++i) {
    c.push(some(0, 1));
    c.announce();
    c.poll(&drained);
  }
  EXPECT_EQ(calls, 1);
}

TEST(Channel, AReaderThatSleepsIsWoken) {
  Channel c(100);
  std::thread reader([&] {
    bool drained;
    EXPECT_TRUE(c.wait(&drained));
    EXPECT_TRUE(std::holds_alternative<Failed>(*c.wait(&drained)));
    EXPECT_FALSE(c.wait(&drained));  // over
  });
  for (Event e : {Event(some(0, 1)), Event(Failed{internal_error("x")})}) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    c.push(std::move(e));
    c.announce();
  }
  reader.join();
}

TEST(Histogram, PercentilesAreWithinABucket) {
  Histogram h = time_histogram();
  for (int i = 1; i <= 1000; ++i) h.add(i * 1e-3);
  EXPECT_NEAR(h.percentile(0.5), 0.5, 0.13);
  EXPECT_NEAR(h.percentile(0.99), 0.99, 0.26);
  EXPECT_EQ(h.count, 1000);
  EXPECT_NEAR(h.sum, 500.5, 1e-6);
  h.add(1e6);
  EXPECT_EQ(h.percentile(1), 100);
  EXPECT_EQ(time_histogram().percentile(0.5), 0);
}

TEST(KvMemory, AQuarterOfWhatIsFreeAndAtMostFourGiB) {
  EXPECT_EQ(default_kv_memory(int64_t(8) << 30), int64_t(2) << 30);
  EXPECT_EQ(default_kv_memory(int64_t(512) << 30), int64_t(4) << 30);
  EXPECT_EQ(*kv_pages(1 << 20, 16, 1024), 64);
  EXPECT_FALSE(kv_pages(1 << 10, 16, 1024).ok());
}

TEST(KvMemory, WindowedLayersHaveAPoolOfTheirOwn) {
  model::ModelInfo m;
  m.layers = 6, m.windowed_layers = 5, m.sliding_window = 128;
  m.kv_bytes_per_token = 6 * 1024, m.windowed_kv_bytes = 5 * 1024;
  const KvSteps steps{16, 4, 64};  // 4 windows of 8 + 2 pages, and 4 of a step
  const int64_t memory = int64_t(1000) * 16 * 6 * 1024;
  auto pools = *kv_pools(memory, m, steps, true);
  ASSERT_EQ(pools.size(), 2u);
  EXPECT_EQ(pools[0].window, 0);
  EXPECT_EQ(pools[1].pages, 44);
  EXPECT_EQ(pools[1].window, 128);
  EXPECT_EQ(pools[0].pages, 6000 - 5 * 44);  // all that is left is the full layer's: in bytes nothing is lost
  auto one = *kv_pools(memory, m, steps, false);
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].window, 0);  // the full layer needs what is behind the others' window
  EXPECT_EQ(one[0].pages, 1000);
  auto little = *kv_pools(memory / 100, m, steps, true);  // never less than with one pool
  EXPECT_EQ(little[0].pages, 10);
  EXPECT_EQ(little[1].pages, 10);
  m.windowed_layers = 6;
  EXPECT_EQ((*kv_pools(memory, m, steps, true))[0].window, 128);
  EXPECT_EQ((*kv_pools(memory, m, steps, false))[0].window, 0);
  m.windowed_layers = m.sliding_window = 0;
  EXPECT_EQ((*kv_pools(memory, m, steps, true)).size(), 1u);
}

std::string content(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(RecordingFile, KeepsWhatItIsGivenAndSaysWhenItCannot) {
  const ScratchFolder folder;
  const std::string path = folder.path("recording");
  {
    auto file = RecordingFile::open(path);
    ASSERT_TRUE(file.ok());
    (*file)->write("one\n");
    (*file)->write("two\n");
  }
  EXPECT_EQ(content(path), "one\ntwo\n");
  {
    auto file = RecordingFile::open(path, 8);
    ASSERT_TRUE(file.ok());
    (*file)->write("longer than may ever wait\n");
    (*file)->write("late\n");
  }
  EXPECT_EQ(content(path), "{\"call\":\"lost\"}\n");
  EXPECT_EQ(RecordingFile::open("/nowhere/at/all").status().field(), "record");
}

TEST(CostModel, ComesFromAFileAsConfigsHasThem) {
  scheduler::StepCost cost;
  ASSERT_TRUE(read_cost_model("configs/cost/h200-8b-bf16.json", &cost).ok());
  EXPECT_EQ(cost.token_us, 22.9);
  EXPECT_EQ(read_cost_model("/nowhere.json", &cost).code(), Code::not_found);
}

TEST(Masks, StopsAreForbiddenUnlessNothingElseIsLeft) {
  std::vector<uint32_t> mask{0b1011};
  forbid_stops(mask, {1, 7});
  EXPECT_EQ(mask[0], 0b1001u);
  forbid_stops(mask, {0, 3});
  EXPECT_EQ(mask[0], 0b1001u);
}

}  // namespace
}  // namespace kvasir::engine
