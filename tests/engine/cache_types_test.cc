// Every type of cache, served on a CPU: the same tokens whichever way a request travels.
#include "tests/engine/real_case.h"

namespace kvasir::engine::testing {
namespace {

constexpr const char* kLlama =
    "dummy:llama,layers=2,hidden=128,heads=4,kv_heads=2,head_dim=64,ffn=128,type=f32,step_ms=1";
// Two of three layers see 24 tokens, the last one sees all.
constexpr const char* kGemma =
    "dummy:gemma3,layers=6,hidden=128,heads=4,kv_heads=2,head_dim=64,ffn=128,window=24,type=f32,step_ms=1";
// Likewise, and the last one's heads are twice as long.
constexpr const char* kGemma4 =
    "dummy:gemma4,layers=6,hidden=128,heads=4,kv_heads=2,head_dim=64,ffn=128,window=24,type=f32,step_ms=1";

// Keys and values are one row of 576 for all heads.
constexpr const char* kLatent =
    "dummy:deepseek_v3,layers=2,hidden=64,heads=2,head_dim=128,ffn=64,experts=4,experts_used=2,expert_ffn=32,type=f32,"
    "step_ms=1";

kvcache::FormWish wish(std::string dtype, int32_t group = -1, std::string scale = "auto", std::string layout = "auto") {
  kvcache::FormWish w;
  w.dtype = std::move(dtype), w.group = group, w.scale_dtype = std::move(scale), w.layout = std::move(layout);
  if (w.dtype == "int8" && group == 0) w.k_scale = 0.04, w.v_scale = 0.03;
  return w;
}

class CacheType : public ::testing::TestWithParam<kvcache::FormWish> {
 protected:
  // What threads do, and whose memory it is, is the same for every group; the kernels' own test has every layout.
  void SetUp() override {
    const kvcache::FormWish& w = GetParam();
    const bool one_of_its_type = w.layout == "auto" && (w.group < 0 || w.group == (w.dtype == "int8" ? 64 : 32));
    if (kSanitized && !one_of_its_type) GTEST_SKIP() << "its bits are checked without a sanitizer";
  }
};

TEST_P(CacheType, TheSameTokensWhicheverWay) {
  for (const char* model : {kLlama, kGemma, kGemma4, kLatent}) {
    SCOPED_TRACE(model);
    if (model == kLatent && GetParam().group > 0 && GetParam().group != 64) continue;  // its rows take long
    Case c(model);
    c.kv = GetParam();
    expect_same_whichever_way(c, 24);
  }
}

// What another request wrote, whole pages and a part of one that is copied; and choices that fork from a prompt.
TEST_P(CacheType, TheSameTokensFromPagesOfOthers) {
  Case c(kLlama);
  model::RunnerOptions m;
  m.model = c.model, m.threads = 1, m.kv = GetParam();
  auto engine = Engine::start(m, c.options);
  ASSERT_TRUE(engine->wait_ready().ok());
  auto request = [](int32_t n) {
    Request r = ask(51, 30);
    for (int32_t& t : r.prompt) t = 4 + t % 250;
    r.n = n;
    return r;
  };
  const Answer cold = testing::run(*engine, request(1)), warm = testing::run(*engine, request(1));
  ASSERT_TRUE(cold.complete() && warm.complete());
  EXPECT_EQ(cold.started->cached_tokens, 0);
  EXPECT_EQ(warm.started->cached_tokens, 50);
  EXPECT_EQ(warm.tokens, cold.tokens);
  ASSERT_TRUE(engine->flush_prefix_cache().ok());
  const Answer forked = testing::run(*engine, request(3));
  ASSERT_TRUE(forked.complete());
  for (const auto& tokens : forked.tokens) EXPECT_EQ(tokens, cold.tokens[0]);
  expect_all_pages_back(*engine);
}

std::string name_of(const ::testing::TestParamInfo<kvcache::FormWish>& info) {
  const kvcache::FormWish& w = info.param;
  std::string name = w.dtype;
  if (w.group >= 0) name += cat("_", w.group);
  if (w.scale_dtype != "auto") name += "_" + w.scale_dtype;
  return w.layout == "auto" ? name : name + "_in_" + w.layout;
}

INSTANTIATE_TEST_SUITE_P(All, CacheType,
                         ::testing::Values(wish("float32"), wish("bfloat16"), wish("fp8"), wish("int8", 0),
                                           wish("int8", 8), wish("int8", 16), wish("int8", 32, "float32"),
                                           wish("int8", 64), wish("int4", 8), wish("int4", 32),
                                           wish("int4", 64, "float32"), wish("int8", 1, "float32"), wish("int8", 4),
                                           wish("int4", 2), wish("int8", 8, "auto", "0"), wish("int4", 32, "auto", "1"),
                                           wish("float16", -1, "auto", "2"), wish("int8", 64, "auto", "lht2d"),
                                           wish("fp8", -1, "auto", "2lhtd")),
                         name_of);

// What a page holds changes no bit of what is computed: prefixes of others, forks, and pages that move, too.
TEST(PageSizes, EachGivesTheSameTokens) {
  for (const char* model : {kLlama, kGemma}) {
    Case c(model);
    const Ran eight = c.run(8, 40, 60);
    for (int32_t page : {1, 3, 7, 12, 24, 100, 300}) {
      SCOPED_TRACE(cat(model, " in pages of ", page));
      c.options.page_size = page;
      c.options.max_tokens_per_step = std::max(64, page + 16);
      EXPECT_EQ(c.run(8, 40, 60).tokens, eight.tokens);
      EXPECT_EQ(c.run(1, 40, 60).tokens[0], eight.tokens[0]) << "alone";
    }
    c.options.page_size = 12, c.options.max_tokens_per_step = 64;
    expect_same_with_few_pages(c, eight, 15);
  }
}

// Whole pages of another request's prompt, and choices that fork within a page.
TEST(PageSizes, PrefixesAreSharedInPagesOfNoPowerOfTwo) {
  for (int32_t page : {3, 24}) {
    Case c(kLlama);
    c.options.page_size = page;
    model::RunnerOptions m;
    m.model = c.model, m.threads = 1;
    auto engine = Engine::start(m, c.options);
    ASSERT_TRUE(engine->wait_ready().ok());
    Request r = ask(51, 30);
    for (int32_t& t : r.prompt) t = 4 + t % 250;
    const Answer cold = testing::run(*engine, r), warm = testing::run(*engine, r);
    ASSERT_TRUE(cold.complete() && warm.complete());
    EXPECT_EQ(cold.started->cached_tokens, 0);
    EXPECT_EQ(warm.started->cached_tokens, 50);
    EXPECT_EQ(warm.tokens, cold.tokens);
    r.n = 3;
    const Answer forked = testing::run(*engine, r);
    ASSERT_TRUE(forked.complete());
    for (const auto& tokens : forked.tokens) EXPECT_EQ(tokens, cold.tokens[0]);
    expect_all_pages_back(*engine);
  }
}

// Where elements lie changes no bit of what is computed.
TEST(CacheLayout, EachGivesTheSameTokens) {
  for (const char* type : {"float16", "int4"}) {
    Case c(kGemma);
    c.kv = wish(type);
    const Ran as_it_is = c.run(3, 40, 30);
    for (const std::string& layout : kvcache::kLayoutNames) {
      c.kv.layout = layout;
      EXPECT_EQ(c.run(3, 40, 30).tokens, as_it_is.tokens) << type << " in " << layout;
    }
  }
}

// Memory of a token beside a float16 cache's; the pool has so many more pages of it.
TEST(CacheType, TakesTheMemoryThatItsBitsTake) {
  auto ran = [](kvcache::FormWish w) {
    Case c(kLlama);
    c.kv = std::move(w);
    return c.run(1, 8, 2);
  };
  const Ran half = ran(wish("float16")), int8 = ran(wish("int8", 64)), int4 = ran(wish("int4", 32));
  EXPECT_EQ(half.bytes_per_token, 2 * 2 * 2 * 64 * 2);
  EXPECT_LE(int8.bytes_per_token * 100, half.bytes_per_token * 53);
  EXPECT_LE(int4.bytes_per_token * 100, half.bytes_per_token * 29);
  EXPECT_GE(int8.stats.pages_total * 53, half.stats.pages_total * 100);
  EXPECT_GE(int4.stats.pages_total * 29, half.stats.pages_total * 100);
}

TEST(CacheType, WhatCannotBeIsRefusedWithWhatCan) {
  auto refused = [](kvcache::FormWish w) {
    model::RunnerOptions m;
    m.model = kLlama, m.threads = 1, m.kv = std::move(w);
    return Engine::start(m, Case(kLlama).options)->wait_ready();
  };
  auto says = [](const Status& s, const char* field, const char* what) {
    EXPECT_EQ(s.field(), field) << s.message();
    EXPECT_NE(s.message().find(what), std::string::npos) << s.message();
  };
  says(refused(wish("int8", 128)), "kv_group", "must be 1, 2, 4, 8, 16, 32 or 64, or 0");
  says(refused(wish("int4", 0)), "kv_group", "8, 16, 32 or 64");
  says(refused(wish("float16", 64)), "kv_group", "only int8 and int4");
  says(refused(wish("fp8", -1, "float32")), "kv_scale_dtype", "for int8 and int4");
  says(refused(wish("int32")), "kv_dtype", "fp8, int8 or int4");
  says(refused(wish("fp8", -1, "auto", "4")), "kv_layout", "lht2d");
  kvcache::FormWish none = wish("int8", 0);
  none.v_scale = 0;
  says(refused(none), "kv_group", "kv_k_scale and kv_v_scale");
  kvcache::FormWish scaled = wish("int4");
  scaled.k_scale = 1;
  says(refused(scaled), "kv_k_scale", "fp8");
}

// Queries are rounded wherever they are read, so that prompts, chunks and decodes agree.
TEST(Fp8Attention, TheSameTokensWhicheverWay) {
  for (const char* model : {kLlama, kGemma, kGemma4}) {
    SCOPED_TRACE(model);
    Case c(model);
    c.attention_dtype = "fp8";
    const Ran eight = c.run(8, 40, 60);
    ASSERT_EQ(eight.tokens.size(), 8u);
    EXPECT_EQ(eight.stats.attention_type, "fp8");
    EXPECT_EQ(eight.stats.kv_type.substr(0, 3), "fp8") << "auto takes the cache that it needs";
    EXPECT_EQ(c.run(1, 40, 60).tokens[0], eight.tokens[0]) << "alone";
    c.threads = 2;
    c.options.max_tokens_per_step = 24;
    EXPECT_EQ(c.run(8, 40, 60).tokens, eight.tokens) << "two threads, in chunks";
    c.threads = 1;
    c.options.max_tokens_per_step = 64;
    c.options.prefix_cache = false;
    expect_same_with_few_pages(c, eight, 24);
  }
}

TEST(Fp8Attention, WhatCannotBeIsRefused) {
  auto refused = [](const char* model, const char* dtype, const char* cache) {
    model::RunnerOptions m;
    m.model = model, m.threads = 1, m.attention_dtype = dtype, m.kv.dtype = cache;
    return Engine::start(m, Case(model).options)->wait_ready();
  };
  for (const char* cache : {"int8", "float16", "int4"}) {
    const Status s = refused(kLlama, "fp8", cache);
    EXPECT_EQ(s.field(), "attention_dtype");
    EXPECT_NE(s.message().find(cat("kv_dtype is ", cache)), std::string::npos) << s.message();
  }
  EXPECT_EQ(refused(kLlama, "bf16", "auto").field(), "attention_dtype") << "a CPU has float32";
  EXPECT_EQ(refused(kLlama, "fp4", "auto").field(), "attention_dtype");
  EXPECT_TRUE(refused(kLlama, "fp8", "fp8").ok());
}

}  // namespace
}  // namespace kvasir::engine::testing
