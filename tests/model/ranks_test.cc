// A network over several ranks is the network: every architecture beside the stored log-probabilities, real weights and
// quantized ones beside one rank, whichever way a request travels; and what cannot be split is refused by its name.
#include "model/ranks.h"

#include <gmock/gmock.h>

#include <cmath>
#include <set>
#include <thread>

#include "model/cpu/link.h"
#include "model/device.h"
#include "model/load.h"
#include "model/pooling.h"
#include "tests/model/architectures.h"
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using Ids = std::vector<int32_t>;

const json& all() { return stored_networks(); }

RunnerOptions ranks_of(const std::string& model, int32_t ranks, bool precise = false) {
  RunnerOptions o;
  o.model = model, o.ranks = ranks, o.precise = precise, o.threads = 2, o.device = "cpu";
  return o;
}

std::string refusal(const std::string& model, int32_t ranks) {
  auto runner = load_runner(ranks_of(model, ranks));
  return runner.ok() ? "" : runner.status().message();
}

// Families that are not split, by what their refusal says.
const std::map<std::string, std::string>& whole_families() {
  static const std::map<std::string, std::string> out = {
      {"gemma4_text", "layers differ in their sizes"},
      {"deepseek_v2", "latent attention"},
      {"deepseek_v3", "latent attention"},
      {"glm4_moe_lite", "latent attention"},
      {"qwen3_next", "linear attention"},
      {"qwen3_5_text", "linear attention"},
      {"qwen3_5_moe_text", "linear attention"},
  };
  return out;
}

std::string family(const json& one) { return one["configs"][0]["model_type"]; }

double worst(const std::string& model, int32_t ranks, const json& one) {
  Drive drive(ranks_of(model, ranks, true), 64, 1, 2048);
  return model::worst(drive, one);
}

TEST(Ranks, EveryArchitectureIsAsTransformersHasIt) {
  for (const json& one : all()["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("ranks");
    StoredNetwork(one).write_folder(folder);
    if (auto it = whole_families().find(family(one)); it != whole_families().end()) {
      EXPECT_THAT(refusal(folder.path.string(), 2), HasSubstr(it->second));
      continue;
    }
    EXPECT_LT(worst(folder.path.string(), 2, one), 1e-3);
  }
}

TEST(Ranks, FourAndThreeOfThemAreTheSameNetwork) {
  std::set<std::string> seen;
  for (const json& one : all()["cases"]) {
    if (whole_families().count(family(one)) || !seen.insert(family(one)).second) continue;
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("ranks");
    StoredNetwork(one).write_folder(folder);
    for (int32_t ranks : {3, 4}) EXPECT_LT(worst(folder.path.string(), ranks, one), 1e-3) << ranks;
  }
}

TEST(Ranks, AGgufFileIsAsTransformersHasIt) {
  for (const json& one : all()["cases"]) {
    const StoredNetwork network(one);
    if (!network.has_gguf() || whole_families().count(family(one))) continue;
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("ranks");
    folder.write("m.gguf", network.gguf());
    EXPECT_LT(worst(folder.path.string(), 2, one), 1e-3);
  }
}

TEST(Device, NamesGpus) {
  auto gpus = [](std::string_view word) { return parse_device(word).value().gpus; };
  EXPECT_EQ(gpus("auto"), std::vector<int>());
  EXPECT_EQ(gpus("cuda"), std::vector<int>());
  EXPECT_EQ(gpus("cuda:1"), std::vector<int>{1});
  EXPECT_EQ(gpus("cuda:3,0"), (std::vector<int>{3, 0}));
  EXPECT_EQ(parse_device("cpu").value().kind, DeviceChoice::Kind::cpu);
  for (const char* bad : {"gpu", "cuda:", "cuda:x", "cuda:0,", "cuda:-1", "cuda:0 1", "cuda:1,1", "cuda,1"}) {
    SCOPED_TRACE(bad);
    const auto choice = parse_device(bad);
    ASSERT_FALSE(choice.ok());
    EXPECT_EQ(choice.status().field(), "device");
    EXPECT_THAT(choice.status().message(), HasSubstr(std::string("device is ") + bad));
  }
}

struct Answer {
  Ids tokens;
  std::vector<float> logprobs;
  bool operator==(const Answer&) const = default;
};

Answer answer(Drive& drive, const Ids& prompt, size_t chunk, const Ids& beside, size_t length = 8) {
  Answer out;
  Sampled s;
  for (size_t i = 0; i < prompt.size(); i += chunk)
    s = drive.step(
        {{0, int64_t(i),
          Ids(prompt.begin() + int64_t(i), prompt.begin() + int64_t(std::min(prompt.size(), i + chunk)))}})[0];
  for (int64_t at = int64_t(prompt.size()); out.tokens.size() < length; ++at) {
    out.tokens.push_back(s.token), out.logprobs.push_back(s.logprob);
    std::vector<Piece> pieces{{0, at, {s.token}}};
    if (!beside.empty()) pieces.push_back({1, 0, beside});
    s = drive.step(pieces)[0];
  }
  return out;
}

TEST(Ranks, AloneChunkedAndBatchedAreEqualToTheBit) {
  const Ids tokens = all()["tokens"], prompt(tokens.begin(), tokens.begin() + 30);
  for (const char* name : {"llama", "gemma3", "falcon grouped", "bloom", "gpt_oss", "qwen2_moe"})
    for (const json& one : all()["cases"]) {
      if (one["name"] != name) continue;
      SCOPED_TRACE(name);
      Folder folder("ranks");
      StoredNetwork(one).write_folder(folder);
      Drive drive(ranks_of(folder.path.string(), 2), 64, 2, 2048);
      const Answer expected = answer(drive, prompt, 1000, {});
      EXPECT_EQ(answer(drive, prompt, 7, {}), expected);
      EXPECT_EQ(answer(drive, prompt, 1000, Ids(tokens.begin() + 3, tokens.end())), expected);
      drive.share(1, 0, 1);
      const Sampled whole = drive.step({{0, 0, prompt}})[0];
      const Sampled hit = drive.step({{1, Drive::kPage, Ids(prompt.begin() + Drive::kPage, prompt.end())}})[0];
      EXPECT_EQ(hit.token, whole.token);
      EXPECT_EQ(hit.logprob, whole.logprob);
    }
}

// 9 heads of 64 in 3 groups: 2 ranks have 3 and 6 of them, 4 ranks share one key/value head between two.
const Ids kPrompt = {504, 3575, 282, 4649, 314, 260, 1343, 30, 378, 3575, 282, 3582, 314};

TEST(Ranks, SmolLm2GivesTheSameTokens) {
  if (smollm2().empty()) GTEST_SKIP() << "no model; ./test fetches it";
  Answer expected;
  for (int32_t ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(ranks);
    Drive drive(ranks_of(smollm2(), ranks, true), 256, 2, 512);
    const Answer got = answer(drive, kPrompt, 1000, {}, 32);
    if (ranks == 1) expected = got;
    EXPECT_EQ(got.tokens, expected.tokens);
    for (size_t i = 0; i < got.logprobs.size(); ++i) EXPECT_NEAR(got.logprobs[i], expected.logprobs[i], 1e-3) << i;
    const ModelInfo& info = drive.runner->info();
    if (ranks == 1) continue;
    int32_t heads = 0;
    int64_t bytes = 0;
    for (const RankInfo& r : info.ranks) heads += r.heads, bytes += r.weight_bytes;
    EXPECT_EQ(int32_t(info.ranks.size()), ranks);
    EXPECT_EQ(heads, 9);
    EXPECT_EQ(bytes, info.weight_bytes);
  }
}

// Products of integers round a rank's part of a row by that part: the same choice wherever it is not a near tie, and
// the same bits whichever way a request travels.
TEST(Ranks, SmolLm2InIntegersChoosesTheSameButForNearTies) {
  if (smollm2().empty()) GTEST_SKIP() << "no model; ./test fetches it";
  Ids text = kPrompt;
  std::vector<Sampled> expected;
  for (int32_t ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    Drive drive(ranks_of(smollm2(), ranks), 256, 2, 512);
    if (ranks == 1) {
      const Answer more = answer(drive, kPrompt, 1000, {}, 120);
      text.insert(text.end(), more.tokens.begin(), more.tokens.end());
    }
    const auto rows = drive.step({{0, 0, text, true}});
    if (ranks == 1) expected = rows;
    int clear = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (expected[i].top[0].logprob - expected[i].top[1].logprob < 0.1) continue;
      EXPECT_EQ(rows[i].token, expected[i].token) << i;
      ++clear;
    }
    EXPECT_GT(clear, 100);
    const Answer whole = answer(drive, kPrompt, 1000, {}, 16);
    EXPECT_EQ(answer(drive, kPrompt, 5, kPrompt, 16), whole);
  }
}

TEST(Ranks, QuantizedWeightsAndCachesAndWindows) {
  for (const char* type : {"q8_0", "q4_0", "q4_1", "q4_k", "bf16"})
    for (const char* kv : {"auto", "int8", "fp8"}) {
      const std::string model =
          std::string("dummy:llama,hidden=512,heads=8,kv_heads=4,head_dim=64,ffn=1024,window=24,type=") + type;
      SCOPED_TRACE(model + " " + kv);
      Ids prompt;
      for (int32_t i = 0; i < 60; ++i) prompt.push_back(5 + i * 7 % 400);
      Answer one, two;
      for (Answer* to : {&one, &two}) {
        RunnerOptions o = ranks_of(model, to == &one ? 1 : 2);
        o.kv.dtype = kv;
        Drive drive(o, 128, 2, 256);
        *to = answer(drive, prompt, 16, {}, 4);
      }
      ASSERT_EQ(one.logprobs.size(), two.logprobs.size());
      // Until a near tie is decided otherwise, which a dummy's even logits have.
      for (size_t i = 0; i < one.tokens.size() && one.tokens[i] == two.tokens[i]; ++i)
        EXPECT_NEAR(one.logprobs[i], two.logprobs[i], 0.05) << i;
      EXPECT_NEAR(one.logprobs[0], two.logprobs[0], 0.05);
    }
}

TEST(Ranks, EmbeddingsAreThoseOfOne) {
  const std::string model = "dummy:llama,hidden=256,heads=4,kv_heads=2,type=f32";
  std::vector<float> sums[2];
  for (int32_t ranks : {1, 2}) {
    Drive drive(ranks_of(model, ranks, true), 64, 1, 64);
    std::vector<float>& sum = sums[ranks - 1];
    sum.assign(256, 0.0f);
    Batch b;
    for (int32_t i = 0; i < 9; ++i) b.tokens.push_back(20 + i), b.positions.push_back(i), b.logit_rows.push_back(i);
    b.seqstarts = b.kvstarts = {0, 9};
    b.start_pos = {0};
    b.cachestarts = {0};
    b.max_pages = 1, b.max_seqlen = b.max_kvlen = 9;
    b.pools = {{9, sum.data()}};
    ASSERT_TRUE(drive.runner->launch(b, {}).ok());
    ASSERT_TRUE(drive.runner->wait().ok());
  }
  double most = 0;
  for (size_t i = 0; i < 256; ++i) {
    EXPECT_NEAR(sums[0][i], sums[1][i], 1e-3) << i;
    most = std::max(most, std::fabs(double(sums[0][i])));
  }
  EXPECT_GT(most, 0.1);
}

TEST(Ranks, WhatCannotBeSplitIsRefusedByItsName) {
  EXPECT_THAT(refusal("dummy:llama,hidden=256,heads=4,kv_heads=2", 5), HasSubstr("the model has 4 heads"));
  EXPECT_THAT(refusal("dummy:llama,hidden=256,heads=8,kv_heads=8,ffn=512,type=q4_k", 3),
              HasSubstr("2 blocks of columns in its MLPs"));
  // 6 queries a head of 64: one key/value head is 384 columns of the output's weights, one block and a half.
  EXPECT_THAT(refusal("dummy:llama,hidden=768,heads=12,kv_heads=2,head_dim=64,ffn=1024,type=q4_k", 2),
              HasSubstr("attn_output.weight is Q4_K, in blocks of 256 columns"));
  EXPECT_EQ(refusal("dummy:llama,hidden=768,heads=12,kv_heads=2,head_dim=64,ffn=1024,type=q8_0", 2), "");
  EXPECT_THAT(refusal("dummy:bert,hidden=64,heads=4", 2), HasSubstr("encoders"));
}

TEST(Ranks, SharesAreWholeAndInOrder) {
  ModelConfig c;
  c.heads = 9, c.kv_heads = 3, c.ffn = 1536, c.vocab = 49152, c.head_dim = 64;
  auto files = open_model("dummy:llama,type=f32");
  ASSERT_TRUE(files.ok());
  for (int32_t ranks = 1; ranks <= 9; ++ranks) {
    auto parts = split_over_ranks(c, *files->weights, ranks);
    ASSERT_TRUE(parts.ok()) << parts.status().message();
    if (ranks == 1) continue;
    int64_t heads = 0, ffn = 0, vocab = 0;
    for (const ModelConfig& p : *parts) {
      EXPECT_EQ(p.part.heads.first, heads);
      EXPECT_EQ(p.part.ffn.first, ffn);
      EXPECT_EQ(p.part.vocab.first, vocab);
      heads += p.heads, ffn += p.ffn, vocab += p.vocab;
      EXPECT_EQ(p.heads % p.kv_heads, 0);
      // Each query beside its own key.
      for (int64_t h = 0; h < p.heads; ++h)
        EXPECT_EQ((p.part.heads.first + h) / 3, p.part.kv_heads.first + h / (p.heads / p.kv_heads));
    }
    EXPECT_EQ(heads, 9);
    EXPECT_EQ(ffn, 1536);
    EXPECT_EQ(vocab, 49152);
  }
  EXPECT_THAT(split_over_ranks(c, *files->weights, 10).status().message(), HasSubstr("the model has 9 heads"));
}

// A rank that fails between two barriers, while another still reads what it published at the first.
TEST(Ranks, WhatALostRankPublishedStaysReadable) {
  cpu::Link link(2);
  const float first[] = {1, 2}, second[] = {3, 4};
  for (const float* values : {first, second}) {
    std::thread other([&] { EXPECT_TRUE(link.meet(1, values + 1).ok()); });
    EXPECT_TRUE(link.meet(0, values).ok());
    other.join();
  }
  link.lose(1, internal_error("no memory"));
  EXPECT_EQ(link.published_by(0), second);
  EXPECT_EQ(link.published_by(1), second + 1);
  EXPECT_THAT(link.meet(0, first).message(), HasSubstr("rank 1 of 2 is lost"));
}

TEST(Ranks, ALostRankEndsTheStepAndAllThatFollow) {
  Drive drive(ranks_of("dummy:llama,lost_rank=1,lost_step=2", 2), 64, 1, 64);
  Batch b;
  b.tokens = {5}, b.positions = {0}, b.logit_rows = {0};
  b.seqstarts = b.kvstarts = {0, 1};
  b.start_pos = {0};
  b.cachestarts = {0};
  b.max_pages = b.max_seqlen = b.max_kvlen = 1;
  const SamplingParams params = Drive::greedy();
  std::vector<SampleRow> rows(1);
  rows[0].params = &params;
  ASSERT_TRUE(drive.runner->launch(b, rows).ok());
  ASSERT_TRUE(drive.runner->wait().ok());
  EXPECT_TRUE(drive.runner->lost().ok());
  b.step = 2;
  for (int i = 0; i < 3; ++i) {
    const Status s = drive.runner->launch(b, rows);
    EXPECT_THAT(s.message(), HasSubstr("rank 1 of 2 is lost"));
    EXPECT_THAT(s.message(), HasSubstr("lost_step=2"));
    b.step = 0;  // it would go on now, and nobody asks it
  }
  EXPECT_EQ(drive.runner->lost().code(), Code::unavailable);
}

TEST(Ranks, AGpuThatHangsIsNotACpu) {
  EXPECT_THAT(refusal("dummy:llama,hung_rank=1,lost_step=2", 2), HasSubstr("hung_rank is one of several GPUs"));
}

}  // namespace
}  // namespace kvasir::model
