#include "model/formats/dummy.h"

#include <chrono>
#include <set>

#include "model/arch/registry.h"
#include "model/formats/dummy_shapes.h"
#include "model/load.h"
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

TEST(Dummy, SameSeedSameTokensAndAnotherSeedOthers) {
  auto run = [](const std::string& spec) {
    Drive drive(spec, 2, false, 256);
    std::vector<int32_t> tokens{72, 101, 108, 108, 111};
    Sampled s = drive.step({{0, 0, tokens}})[0];
    return s.logprob;
  };
  EXPECT_EQ(run("dummy:llama"), run("dummy:llama"));
  EXPECT_NE(run("dummy:llama"), run("dummy:llama,seed=1"));
}

TEST(Dummy, EveryTypeRuns) {
  for (const char* type : {"f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "mxfp4"}) {
    Drive drive(std::string("dummy:llama,layers=1,hidden=256,type=") + type, 1, false, 64);
    const Sampled s = drive.step({{0, 0, {1, 2, 3}}})[0];
    EXPECT_FALSE(s.bad_logits) << type;
    EXPECT_LT(s.logprob, -0.01) << type << ": nothing but noise, and no row of zeros";
    EXPECT_GT(s.logprob, -6.2) << type;
  }
  Drive mixed("dummy:gpt_oss,layers=2,hidden=256,window=8,type=bf16,expert_type=mxfp4", 1, false, 64);
  EXPECT_FALSE(mixed.step({{0, 0, {1, 2, 3}}})[0].bad_logits);
  EXPECT_EQ(mixed.runner->info().quantization, "BF16");
  EXPECT_FALSE(config_from_dummy("llama,expert_type=q8_0").ok());
  EXPECT_FALSE(config_from_dummy("gpt_oss,hidden=128,expert_type=q4_k").ok());
}

TEST(Dummy, EveryArchitectureRuns) {
  for (const Architecture* a : architectures()) {
    SCOPED_TRACE(a->name);
    const bool pair = a->name == "t5" || a->name == "mt5";
    const std::string shape = std::string(a->name) + ",layers=4,hidden=128,type=f32";
    Drive drive("dummy:" + shape + (pair ? "" : ",window=8"), 1, false, 64);
    if (drive.runner->info().encoder) continue;
    EXPECT_FALSE(drive.step({{.seq = 0, .begin = 0, .tokens = {1, 2, 3}, .source = pair ? 2 : 0}})[0].bad_logits);
    if (pair) EXPECT_FALSE(config_from_dummy(shape + ",window=8").ok());
  }
}

TEST(Dummy, EncodersGiveHiddenStates) {
  for (const char* name : {"bert", "xlm-roberta", "roberta"}) {
    Drive drive(std::string("dummy:") + name + ",layers=4,hidden=128,type=f32", 1, false, 64);
    std::vector<float> sum(128, 0.0f);
    Batch b;
    b.tokens = {1, 2, 3}, b.positions = {0, 1, 2};
    b.seqstarts = {0, 3}, b.kvstarts = {0, 3}, b.start_pos = {0}, b.cachestarts = {drive.page(0, 0) * Drive::kPage};
    b.max_pages = 1, b.max_seqlen = b.max_kvlen = 3;
    b.logit_rows = {0, 1, 2};
    b.pools = {{3, sum.data()}};
    ASSERT_TRUE(drive.runner->launch(b, {}).ok()) << name;
    ASSERT_TRUE(drive.runner->wait().ok());
    EXPECT_TRUE(finish_embedding(sum, 3, 0, true));
    EXPECT_NE(sum[0], 0) << name;
  }
}

TEST(Dummy, AKnownModelsShapeIsItsOwnAndMayBeChanged) {
  auto config = config_from_dummy("llama-3.1-8b,type=bf16,layers=2,context=4096");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->architecture, "llama");
  EXPECT_EQ(config->name, "llama-3.1-8b");
  EXPECT_EQ(config->hidden, 4096);
  EXPECT_EQ(config->vocab, 128256);
  EXPECT_EQ(config->layers, 2);
  EXPECT_EQ(config->context, 4096);
  EXPECT_EQ(config->quantization, "BF16");
  EXPECT_EQ(config->rope.base, 500000);
  for (const DummyShape& s : dummy_shapes()) {
    auto whole = config_from_dummy(std::string(s.name) + ",type=bf16");
    EXPECT_TRUE(whole.ok()) << s.name << ": " << whole.status().message();
  }
}

TEST(Dummy, AStepTakesAtLeastItsTime) {
  Drive drive("dummy:llama,step_ms=30", 1, false, 64);
  auto begin = std::chrono::steady_clock::now();
  drive.step({{0, 0, {1}}});
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(30));
}

TEST(Dummy, WhatItDoesNotKnowIsRefusedByName) {
  for (auto [spec, word] : {std::pair<const char*, const char*>{"llama,layers=x", "layers"},
                            {"llama,depth=3", "depth"},
                            {"llama,vocab=100", "260"},
                            {"nothing", "llama"},
                            {"llama,hidden=100,head_dim=10,heads=10", "multiple"},
                            {"llama,step_ms=-1", "step time"},
                            {"llama,heads=3,kv_heads=2", "multiple"}}) {
    auto config = config_from_dummy(spec);
    ASSERT_FALSE(config.ok()) << spec;
    EXPECT_NE(config.status().message().find(word), std::string::npos) << config.status().message();
  }
}

TEST(Dummy, TheVocabularyHasEveryByteOnce) {
  auto assets = load_text_assets("dummy:llama,vocab=1000");
  ASSERT_TRUE(assets.ok());
  const text::GgufVocab& v = *assets->vocab;
  EXPECT_EQ(v.tokens.size(), 1000u);
  EXPECT_EQ(std::set<std::string>(v.tokens.begin(), v.tokens.end()).size(), 1000u);
  EXPECT_EQ(v.tokens[size_t(v.eos)], "<|eos|>");
  EXPECT_EQ(v.types[size_t(v.eos)], 3);
  EXPECT_FALSE(v.chat_template.empty());
}

TEST(Dummy, TextComesAndGoes) {
  RunnerOptions o;
  o.model = "dummy:llama,vocab=1000";
  auto text = load_text(o);
  ASSERT_TRUE(text.ok()) << text.status().to_string();
  auto ids = text->tokenizer->encode("h\xc3\xa9 <|eos|>", false, true);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(ids->size(), 5u);
  EXPECT_EQ(ids->back(), 257);
  EXPECT_EQ(*text->tokenizer->decode(std::vector<int32_t>{104, 500}, true), "h w500");
  EXPECT_EQ(*text->chat_template->render(R"([{"role":"user","content":"x"}])", "", true),
            "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n");
}

}  // namespace
}  // namespace kvasir::model
