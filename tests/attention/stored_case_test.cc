// Stored cases: through files and back, and what `kvasir op` refuses.
#include "attention/rope.h"
#include "tests/attention/broken_cases.h"

namespace kvasir::attention {
namespace {
using namespace testing;

TEST(StoredCase, RandomCasesComeBackTheSame) {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Case c = random_case(seed);
    // No revision of the operators pairs these; the code can, a stored case cannot say it.
    const kvcache::IndexMode mode = c.attributes.index_mode;
    if (mode == (c.revision == 1 ? kvcache::IndexMode::page_table : kvcache::IndexMode::token_table)) continue;
    Result<Case> back = parse_case(format_case(c));
    ASSERT_TRUE(back.ok()) << back.status().to_string() << "\n" << describe(c);
    Outcome x = run_on("cpu", c), y = run_on("cpu", *back);
    ASSERT_TRUE(y.status.ok()) << y.status.to_string();
    EXPECT_EQ(format_output(x.after, x.out), format_output(y.after, y.out)) << describe(c);
  }
}

// What an output is written as: its own type, int8 only where the cache's bytes are what is asked for.
TEST(StoredCase, OutputsAreWrittenInTheirType) {
  for (auto [type, descr] : {std::pair{DType::f32, "<f4"}, {DType::f16, "<f2"}, {DType::bf16, "<u2"}}) {
    Case c = sound_case();
    c.attributes.io = type == DType::f32 ? DType::f32 : c.attributes.io;
    c.attributes.out = type;
    Result<Case> back = parse_case(format_case(c));
    ASSERT_TRUE(back.ok()) << back.status().to_string();
    EXPECT_EQ(back->attributes.out, type);
    Outcome o = run_on("cpu", *back);
    ASSERT_TRUE(o.status.ok()) << o.status.to_string();
    CaseFiles files = format_output(o.after, o.out);
    const NpyArray t = parse_npy("", files["attn_output.npy"].data(), files["attn_output.npy"].size()).value();
    EXPECT_EQ(t.descr, descr);
    EXPECT_EQ(t.shape, (std::vector<int64_t>{13, 4, 32}));
    EXPECT_EQ(compare_with_reference(*back, o.after, o.out), "");
  }
  CaseShape s = small();
  s.sequences = {{3, 2}};
  s.layout = 0;
  s.attributes.return_lse = false;
  s.attributes.io = s.attributes.out = DType::i8;
  s.cache.dtype = DType::i8, s.cache.quant = kvcache::QuantKind::per_tensor;
  Case c = make_case(s);
  c.op = Op::key_value_cache;
  CaseFiles files = format_case(c);
  edit(files, nullptr, "io_dtype", "int8");  // said, where it was only seen by current_key before
  for (const CaseFiles& said : {files, format_case(c)}) {
    Result<Case> back = parse_case(said);
    ASSERT_TRUE(back.ok()) << back.status().to_string();
    Outcome o = run_on("cpu", *back);
    ASSERT_TRUE(o.status.ok()) << o.status.to_string();
    CaseFiles out = format_output(o.after, o.out);
    EXPECT_EQ(parse_npy("", out["key.npy"].data(), out["key.npy"].size()).value().descr, "|i1");
    EXPECT_EQ(o.out.key, run_on("reference", c).out.key);
  }
}

TEST(StoredCase, MultiHeadAttentionAloneTakesPackedKeys) {
  CaseShape s = small();
  s.sequences = {{0, 4}, {0, 7}};
  s.layout = 0;
  s.attributes.index_mode = kvcache::IndexMode::offset;
  Case c = make_case(s);
  CaseFiles files = format_case(c);
  json root = json::parse(files["case.json"].begin(), files["case.json"].end());
  root["op"] = "dynamic_batching.MultiHeadAttention";
  const std::string text = root.dump();
  files["case.json"].assign(text.begin(), text.end());
  for (const char* gone : {"cache.npy", "cachestarts.npy", "start_pos.npy"}) files.erase(gone);
  Result<Case> alone = parse_case(files);
  ASSERT_TRUE(alone.ok()) << alone.status().to_string();
  Outcome x = run_on("cpu", c), y = run_on("cpu", *alone);
  ASSERT_TRUE(y.status.ok()) << y.status.to_string();
  EXPECT_TRUE(same_bytes(x.out, y.out));
  EXPECT_EQ(format_output(y.after, y.out).count("cache.npy"), 0u);
}

TEST(StoredCase, WhatIsLeftOutHasTheContractsDefaults) {
  CaseShape s = small(2, 2, 64);
  s.attributes.index_mode = kvcache::IndexMode::offset;
  s.sequences = {{3, 2}};
  s.layout = 0;
  CaseFiles files = format_case(make_case(s));
  const std::string text = R"({"op": "dynamic_batching.MultiHeadCacheAttention", "revision": 2, "io_dtype": "float32",
                              "attributes": {"num_heads": 2, "head_dim": 64, "is_causal": true}})";
  files["case.json"].assign(text.begin(), text.end());
  const Case c = parse_case(files).value();
  const Attributes& a = c.attributes;
  EXPECT_EQ(a.num_kv_heads, 2) << "0 means num_heads";
  EXPECT_EQ(a.page_size, 128);
  EXPECT_EQ(c.view.quant_group, 8);
  EXPECT_EQ(c.layout + c.layer, 0);
  EXPECT_EQ(c.view.layers, 1);
  EXPECT_EQ(c.num_repeat, 1);
  EXPECT_EQ(a.index_mode, kvcache::IndexMode::offset);
  EXPECT_EQ(c.view.dtype, DType::f32) << "cache_dtype is io_dtype";
  EXPECT_EQ(c.view.quant, kvcache::QuantKind::none);
  EXPECT_EQ(a.q_scaling, 1.0f);
  EXPECT_EQ(a.softcap, 0.0f);
  EXPECT_EQ(a.window + a.sinks + a.cyclic_capacity, 0);
  EXPECT_EQ(a.rope.style, RopeStyle::none);
  EXPECT_TRUE(a.append && a.is_causal);
  EXPECT_FALSE(a.is_alibi || a.packed_qkv || a.return_lse || a.streaming_positions);
}

TEST(StoredCase, RevisionAndModePickTheIndex) {
  using kvcache::IndexMode;
  const struct {
    int revision, mode;
    IndexMode is;
  } pairs[] = {{2, 0, IndexMode::offset},
               {2, 1, IndexMode::page_table},
               {1, 0, IndexMode::offset},
               {1, 1, IndexMode::token_table}};
  for (const auto& p : pairs) {
    CaseShape s = small();
    s.sequences = {{20, 1}, {7, 3}};
    s.revision = p.revision, s.layout = 2;
    s.attributes.index_mode = p.is;
    CaseFiles files = format_case(make_case(s));
    EXPECT_EQ(json::parse(files["case.json"])["attributes"]["cache_mode"], p.mode);
    EXPECT_EQ(parse_case(files).value().attributes.index_mode, p.is) << p.revision << "/" << p.mode;
  }
}

TEST(StoredCase, AnEmptyMaskMeansNone) {
  const Case c = sound_case();
  CaseFiles files = format_case(c);
  files["attn_mask.npy"] = format_npy({"<f4", {0}, {}});
  Result<Case> back = parse_case(files);
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_TRUE(same_bytes(run_on("cpu", c).out, run_on("cpu", *back).out));
}

TEST(StoredCase, RopeByRuleIsTheLibrarys) {
  const struct {
    const char* json;
    RopeConfig config;
  } rules[] = {
      {R"({"style": "gptj", "rotary_dim": 8, "base": 500})", {RopeStyle::gptj, 8, 500.0}},
      {R"({"rotary_dim": 8, "scaling": {"type": "linear", "factor": 4}})",
       [] {
         RopeConfig r{RopeStyle::neox, 8};
         r.scaling = RopeScaling::linear, r.factor = 4;
         return r;
       }()},
      {R"({"rotary_dim": 8, "scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 2,
          "original_max_position_embeddings": 64}})",
       [] {
         RopeConfig r{RopeStyle::neox, 8};
         r.scaling = RopeScaling::llama3, r.factor = 8, r.low_freq_factor = 1, r.high_freq_factor = 2;
         r.original_context = 64;
         return r;
       }()},
      {R"({"rotary_dim": 8, "scaling": {"type": "yarn", "factor": 8, "beta_fast": 16, "beta_slow": 2,
          "original_max_position_embeddings": 64, "attention_factor": 1.25}})",
       [] {
         RopeConfig r{RopeStyle::neox, 8};
         r.scaling = RopeScaling::yarn, r.factor = 8, r.beta_fast = 16, r.beta_slow = 2;
         r.original_context = 64, r.attention_factor = 1.25;
         return r;
       }()},
      {R"({"rotary_dim": 4, "scaling": {"type": "longrope", "original_max_position_embeddings": 64,
          "max_position_embeddings": 256, "short_factor": [1, 2], "long_factor": [3, 4]}})",
       [] {
         RopeConfig r{RopeStyle::neox, 4};
         r.scaling = RopeScaling::longrope, r.original_context = 64, r.configured_context = 256;
         r.short_factor = {1, 2}, r.long_factor = {3, 4};
         return r;
       }()},
  };
  for (const auto& rule : rules) {
    CaseFiles files = format_case(sound_case());
    edit(files, "attributes", "rope", json::parse(rule.json));
    Result<Case> c = parse_case(files);
    ASSERT_TRUE(c.ok()) << c.status().to_string();
    const Rope want = rope_frequencies(rule.config).value(), &got = c->attributes.rope;
    EXPECT_EQ(got.style, want.style) << rule.json;
    EXPECT_EQ(got.rotary_dim, want.rotary_dim) << rule.json;
    EXPECT_EQ(got.inv_freq, want.inv_freq) << rule.json;
    EXPECT_EQ(got.magnitude, want.magnitude) << rule.json;
  }
}

TEST(OpRefuses, EachBrokenCaseByNameAndWritesNothing) {
  static_assert(std::size(kRefusals) >= 30);
  const Case c = sound_case();
  Scratch folder;
  for (const Refusal& r : kRefusals) {
    CaseFiles files = format_case(c);
    r.breaks(files);
    folder.put(files);
    Status status = run_folder(folder.in(), **find_backend("cpu"), {}, folder.out());
    EXPECT_EQ(status.code(), Code::invalid_argument) << r.says;
    EXPECT_NE(status.message().find(r.says), std::string::npos) << status.message() << "\n  wanted: " << r.says;
    EXPECT_FALSE(std::filesystem::exists(folder.out())) << "nothing may be written: " << r.says;
  }
  folder.put(format_case(c));
  Status good = run_folder(folder.in(), **find_backend("cpu"), {}, folder.out());
  EXPECT_TRUE(good.ok()) << good.to_string();
  EXPECT_EQ(read_folder(folder.out())->size(), 3u) << "attn_output, lse, cache";
}

}  // namespace
}  // namespace kvasir::attention
