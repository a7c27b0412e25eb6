// Networks that compute, on a CPU: the same tokens whether pages are plenty, moved away and back, computed again,
// kept by layer group, or found by another kind of index.
#include "tests/engine/real_case.h"

namespace kvasir::engine::testing {
namespace {

constexpr const char* kLlama =
    "dummy:llama,layers=2,hidden=64,heads=4,kv_heads=2,head_dim=16,ffn=128,type=f32,step_ms=1";
// Five of six layers see 24 tokens, the last one sees all.
constexpr const char* kGemma =
    "dummy:gemma3,layers=6,hidden=64,heads=4,kv_heads=2,head_dim=16,ffn=128,window=24,type=f32,step_ms=1";

TEST(RealModel, PreemptedByMovingOrByComputingAgain) {
  for (const char* model : {kLlama, kGemma}) {
    Case c(model);
    const Ran plenty = c.run(8, 20, 160);
    EXPECT_EQ(plenty.stats.preemptions, 0);
    c.options.kv_memory = plenty.bytes_per_token * 8 * 60;  // 60 pages of 8; five go in, and want 23 each in the end
    c.options.prefix_cache = false;
    const Ran again = c.run(8, 20, 160);
    EXPECT_GT(again.stats.preemptions, 0);
    EXPECT_EQ(again.stats.moved, 0);
    EXPECT_EQ(again.tokens, plenty.tokens) << model;
    for (bool prefix_cache : {false, true}) {
      c.options.prefix_cache = prefix_cache;
      c.options.host_kv_memory = plenty.bytes_per_token * 8 * 200;
      const Ran moved = c.run(8, 20, 160);
      EXPECT_GT(moved.stats.moved, 0);
      EXPECT_EQ(moved.tokens, plenty.tokens) << model << ", prefix cache " << prefix_cache;
    }
  }
}

TEST(RealModel, WhatLeavesTheDeviceIsFoundInTheHost) {
  Case c(kLlama);
  c.options.kv_memory = 256 * 8 * 24;  // 24 pages
  c.options.host_kv_memory = 256 * 8 * 200;
  model::RunnerOptions m;
  m.model = c.model;
  m.threads = 1;
  auto engine = Engine::start(m, c.options);
  ASSERT_TRUE(engine->wait_ready().ok());
  std::vector<std::vector<int32_t>> first;
  for (int round = 0; round < 2; ++round)
    for (int32_t i = 0; i < 6; ++i) {  // six prompts of 12 pages in a pool of 24
      Request r = ask(96, 4, i);
      for (int32_t& t : r.prompt) t = 4 + t % 250;
      Answer a = engine::testing::run(*engine, std::move(r));
      ASSERT_TRUE(a.complete()) << a.failed.message();
      if (round == 0) {
        first.push_back(a.tokens[0]);
      } else {
        EXPECT_EQ(a.tokens[0], first[size_t(i)]);
        EXPECT_GE(a.started->cached_tokens, 80) << i;
      }
    }
}

TEST(RealModel, LayersWithAWindowKeepLessThanTheOthers) {
  Case c(kGemma);
  const Ran apart = c.run(4, 100, 120);
  c.options.host_kv_memory = 1 << 20;  // the second tier knows one pool: every layer then keeps every token
  const Ran together = c.run(4, 100, 120);
  EXPECT_EQ(apart.tokens, together.tokens);
  EXPECT_GT(apart.stats.pages_total, 3 * together.stats.pages_total);  // of the full layer, from the same memory
  c.options.host_kv_memory = 0;
  c.options.prefix_cache = false;
  EXPECT_EQ(c.run(1, 100, 120).tokens[0], apart.tokens[0]);
}

TEST(RealModel, WhicheverWayTheCacheIsIndexed) {
  for (const char* model : {kLlama, kGemma}) {
    Case c(model);
    const Ran pages = c.run(6, 50, 40);
    c.options.kv_index = kvcache::IndexMode::token_table;
    EXPECT_EQ(c.run(6, 50, 40).tokens, pages.tokens) << model;
    c.options.kv_index = kvcache::IndexMode::offset;
    c.options.prefix_cache = false;
    EXPECT_EQ(c.run(6, 50, 40).tokens, pages.tokens) << model;
  }
}

// 16 together; alone, with other threads, in chunks, preempted, and with a prefix found each answer is what it was.
TEST(RealModel, SmolLM2IsTheSameHoweverItRuns) {
  if (const char* why = smollm2_missing()) GTEST_SKIP() << why;
  Case c(smollm2());
  const Ran sixteen = c.run(16, 40, 60);
  EXPECT_EQ(sixteen.stats.preemptions, 0);
  const auto some = [&](int32_t n) {
    return std::vector<std::vector<int32_t>>(sixteen.tokens.begin(), sixteen.tokens.begin() + n);
  };
  EXPECT_EQ(c.run(1, 40, 60).tokens, some(1)) << "alone";
  c.threads = 2;
  EXPECT_EQ(c.run(3, 40, 60).tokens, some(3)) << "two threads";
  c.options.max_tokens_per_step = 24;
  EXPECT_EQ(c.run(16, 40, 60).tokens, sixteen.tokens) << "two threads, in chunks";
  c.threads = 1;
  c.options.max_tokens_per_step = 64;

  c.options.kv_memory = sixteen.bytes_per_token * 8 * 20;  // two go in, and want 13 each in the end
  c.options.prefix_cache = false;
  const Ran again = c.run(3, 40, 60);
  EXPECT_GT(again.stats.preemptions, 0);
  EXPECT_EQ(again.tokens, some(3)) << "computed again";
  c.options.host_kv_memory = sixteen.bytes_per_token * 8 * 100;
  const Ran moved = c.run(3, 40, 60);
  EXPECT_GT(moved.stats.moved, 0);
  EXPECT_EQ(moved.tokens, some(3)) << "moved away and back";
}

TEST(RealModel, SmolLM2IsTheSameWithAPrefixFound) {
  if (const char* why = smollm2_missing()) GTEST_SKIP() << why;
  Case c(smollm2());
  model::RunnerOptions m;
  m.model = c.model;
  m.threads = 1;
  auto engine = Engine::start(m, c.options);
  ASSERT_TRUE(engine->wait_ready().ok());
  std::vector<int32_t> first;
  for (int round = 0; round < 2; ++round) {
    Request r = ask(50, 40);
    for (int32_t& t : r.prompt) t = 4 + t % 250;
    Answer a = engine::testing::run(*engine, std::move(r));
    ASSERT_TRUE(a.complete()) << a.failed.message();
    if (round == 0) first = a.tokens[0];
    EXPECT_EQ(a.tokens[0], first);
    if (round == 1) {
      EXPECT_GE(a.started->cached_tokens, 48);
    }
  }
}

TEST(RealModel, BadOptionsOfTheCacheAreSaid) {
  auto status = [](auto change) {
    Case c(kLlama);
    change(c.options);
    model::RunnerOptions m;
    m.model = c.model;
    m.threads = 1;
    return Engine::start(m, c.options)->wait_ready();
  };
  EXPECT_EQ(status([](EngineOptions& o) { o.host_kv_memory = 10; }).field(), "host_kv_memory");
  EXPECT_EQ(status([](EngineOptions& o) { o.cost_model = "/nowhere.json"; }).field(), "cost_model");
  EXPECT_EQ(status([](EngineOptions& o) { o.record = "/nowhere/at/all"; }).field(), "record");
  EXPECT_EQ(status([](EngineOptions& o) { o.kv_index = kvcache::IndexMode::offset; }).field(), "index_mode");
}

}  // namespace
}  // namespace kvasir::engine::testing
