// StreamingLLM served: text goes on without end in the memory of a window.
#include "tests/engine/real_case.h"

namespace kvasir::engine::testing {
namespace {

constexpr const char* kLlama =
    "dummy:llama,layers=2,hidden=64,heads=4,kv_heads=2,head_dim=16,ffn=128,type=f32,context=128";
// Five of six layers have a window of their own, of 24.
constexpr const char* kGemma =
    "dummy:gemma3,layers=6,hidden=64,heads=4,kv_heads=2,head_dim=16,ffn=128,window=24,type=f32,context=128";

Case streaming(const char* model) {
  Case c(model);
  c.window = 48, c.sinks = 4;
  return c;
}

TEST(Streaming, GoesOnPastTheContextInTheMemoryOfAWindow) {
  for (const char* model : {kLlama, kGemma}) {
    Case c = streaming(model);
    const Ran plenty = c.run(3, 20, 600);
    ASSERT_EQ(plenty.tokens.size(), 3u);
    for (const auto& tokens : plenty.tokens) EXPECT_EQ(tokens.size(), 600u);
    // 620 tokens each in 96 pages of 8: what is behind the window is given back.
    c.options.max_running = 3, c.options.max_tokens_per_step = 32;
    c.options.prefix_cache = false;
    c.options.kv_memory = plenty.bytes_per_token * 8 * 40;
    const Ran few = c.run(3, 20, 600);
    EXPECT_EQ(few.stats.pages_total, 40);
    EXPECT_EQ(few.stats.preemptions, 0);
    EXPECT_EQ(few.tokens, plenty.tokens) << model;
    EXPECT_EQ(c.run(1, 20, 600).tokens[0], plenty.tokens[0]) << model << ", alone";
    c.options.kv_index = kvcache::IndexMode::token_table;
    EXPECT_EQ(c.run(3, 20, 600).tokens, plenty.tokens) << model << ", token table";
    c.options.kv_index = kvcache::IndexMode::page_table;
    c.threads = 2;
    EXPECT_EQ(c.run(2, 20, 600).tokens, std::vector(plenty.tokens.begin(), plenty.tokens.begin() + 2)) << model;
  }
}

// Prompts longer than the window, read in chunks, and prefixes found again.
TEST(Streaming, TakesPromptsLongerThanTheContext) {
  Case c = streaming(kLlama);
  c.options.max_tokens_per_step = 32;
  c.options.max_running = 4;
  const Ran first = c.run(2, 300, 50);
  ASSERT_EQ(first.tokens.size(), 2u);
  for (const auto& tokens : first.tokens) EXPECT_EQ(tokens.size(), 50u);
}

// The same in int8: the sinks' pages keep their scales.
TEST(Streaming, TakesEveryTypeOfCache) {
  for (const char* type : {"int8", "fp8", "int4"}) {
    Case c = streaming(kLlama);
    c.kv.dtype = type;
    if (std::string(type) != "fp8") c.kv.group = 8;
    const Ran a = c.run(2, 20, 300), b = c.run(1, 20, 300);
    ASSERT_EQ(a.tokens.size(), 2u);
    EXPECT_EQ(a.tokens[0].size(), 300u);
    EXPECT_EQ(a.tokens[0], b.tokens[0]) << type;
  }
}

TEST(Streaming, WithoutMaxTokensItEndsWhereTheContextWould) {
  model::RunnerOptions m;
  m.model = kLlama, m.threads = 1, m.attention_window = 48, m.attention_sinks = 4;
  auto engine = Engine::start(m, Case(kLlama).options);
  ASSERT_TRUE(engine->wait_ready().ok());
  Request r = ask(20, 0);
  for (int32_t& t : r.prompt) t = 4 + t % 250;
  r.max_tokens.reset();
  const Answer a = testing::run(*engine, std::move(r));
  ASSERT_TRUE(a.complete()) << a.failed.message();
  EXPECT_EQ(a.tokens[0].size(), 108u);
}

TEST(Streaming, WhatCannotBeIsRefused) {
  auto refused = [](int32_t window, int32_t sinks, auto change) {
    Case c(kLlama);
    change(c.options);
    model::RunnerOptions m;
    m.model = c.model, m.threads = 1, m.attention_window = window, m.attention_sinks = sinks;
    return Engine::start(m, c.options)->wait_ready().field();
  };
  auto nothing = [](EngineOptions&) {};
  EXPECT_EQ(refused(0, 4, nothing), "attention_sinks");
  EXPECT_EQ(refused(8, 8, nothing), "attention_sinks");
  EXPECT_EQ(refused(256, 4, nothing), "attention_window");
  EXPECT_EQ(refused(48, 4, [](EngineOptions& o) { o.host_kv_memory = 1 << 20; }), "attention_window");
  EXPECT_EQ(refused(48, 4,
                    [](EngineOptions& o) {
                      o.kv_index = kvcache::IndexMode::offset;
                      o.prefix_cache = false;
                    }),
            "attention_window");
}

}  // namespace
}  // namespace kvasir::engine::testing
