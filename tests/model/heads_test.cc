// Heads that draft, against plain torch: the model's hidden states, the head's logits, and what it goes on with.
#include "tests/model/heads.h"

#include <gmock/gmock.h>

#include <cmath>

#include "model/head.h"
#include "tests/model/architectures.h"

namespace kvasir::model {
namespace {

RunnerOptions precisely(const std::string& model) {
  RunnerOptions o;
  o.model = model, o.device = "cpu", o.threads = 1, o.precise = true;
  o.max_batch = 4, o.max_tokens = 64;
  return o;
}

// Everything there is of one case against what is stored.
void expect_as_stored(const nlohmann::json& one, const nlohmann::json& all, const std::string& model,
                      const std::string& folder) {
  auto runner = load_runner(precisely(model));
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  ASSERT_TRUE((*runner)->allocate_cache(8).ok());
  auto head = (*runner)->load_head(precisely(folder), 64);
  ASSERT_TRUE(head.ok()) << head.status().message();
  ASSERT_TRUE(*head) << "its files carry none";
  ASSERT_TRUE((*head)->allocate_cache(8).ok());
  EXPECT_EQ((*head)->info().vocab_size, (*runner)->info().vocab_size);

  std::vector<int32_t> tokens = all["tokens"];
  ASSERT_LE(tokens.size(), 64u);
  pass(**runner, tokens, 0, {.kept = 0});
  const std::vector<int32_t> behind(tokens.begin() + 1, tokens.end());
  const int64_t width = (*head)->info().given, hidden = (*head)->info().kept;
  const std::vector<Sampled> whole = pass(**head, behind, 0, {.given = 0, .given_cols = width});
  ASSERT_EQ(whole.size(), behind.size());
  const std::vector<int32_t> draft = one["draft"];
  double worst = 0;
  for (size_t i = 0; i < all["rows"].size(); ++i)
    worst = std::max(worst, worst_of(whole[all["rows"][i].get<size_t>()], one["logprobs"][i], one["d2t"]));
  EXPECT_LT(worst, 1e-3);

  // The same in chunks; then what follows, each row with the state of the one before, whose place it takes.
  constexpr int32_t cut = 17;
  const std::vector<int32_t> begin(behind.begin(), behind.begin() + cut), rest(behind.begin() + cut, behind.end());
  pass(**head, begin, 0, {.given = 0, .given_cols = width});
  std::vector<Sampled> last = pass(**head, rest, int64_t(cut), {.kept = cut, .given = cut, .given_cols = width});
  EXPECT_EQ(last.back().logprob, whole.back().logprob) << "chunks give other bits";
  const auto state = int32_t(behind.size()) - 1;
  int64_t position = int64_t(behind.size());
  for (size_t i = 0; i < draft.size(); ++i, ++position) {
    ASSERT_EQ(last.back().token, draft[i]) << "token " << i << " of the draft";
    last = pass(**head, {draft[i]}, position, {.kept = state, .given = state, .given_cols = hidden});
  }
}

TEST(Heads, AsPlainTorchComputesThem) {
  const nlohmann::json all = fixture("heads.json");
  for (const auto& one : all["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const StoredHead stored(one);
    EXPECT_EQ(is_eagle3(stored.folder()), stored.own());
    EXPECT_FALSE(is_eagle3(stored.model.path.string()));
    expect_as_stored(one, all, stored.model.path.string(), stored.folder());
  }
}

// As llama.cpp's converter names them.
TEST(Heads, TheNextLayerOfAGgufFile) {
  const nlohmann::json all = fixture("heads.json");
  for (const auto& one : all["cases"]) {
    if (one.contains("head")) continue;
    nlohmann::json both = one["model"];
    for (const auto& n : stored_networks()["cases"])
      if (n["name"] == one["model"]["configs"][0]["model_type"]) both["gguf"] = n["gguf"];
    ASSERT_TRUE(both.contains("gguf"));
    const int layers = one["model"]["configs"][0]["num_hidden_layers"];
    bool said = false;
    for (auto& kv : both["gguf"]["kv"]) {
      if (kv[0] == "block_count") kv[2] = layers + 1;
      if (kv[0] == "nextn_predict_layers") kv[2] = 1, said = true;
    }
    if (!said) both["gguf"]["kv"].push_back({"nextn_predict_layers", 4, 1, 4});
    const std::string last = "blk." + std::to_string(layers - 1) + ".", added = "blk." + std::to_string(layers) + ".";
    const std::string hf_last = "model.layers." + std::to_string(layers - 1) + ".",
                      hf_added = "model.layers." + std::to_string(layers) + ".";
    nlohmann::json more = nlohmann::json::array();
    for (nlohmann::json t : both["gguf"]["tensors"]) {  // the last layer's, of the one behind it
      std::string name = t[0];
      if (!name.starts_with(last)) continue;
      t[0] = added + name.substr(last.size());
      auto rename = [&](nlohmann::json& from) {
        const std::string n = from;
        ASSERT_TRUE(n.starts_with(hf_last)) << n;
        from = hf_added + n.substr(hf_last.size());
      };
      if (t[3].is_array() && t[2] == "experts")
        for (auto& from : t[3]) rename(from);
      else
        rename(t[3]);
      more.push_back(t);
    }
    for (const auto& t : one["model"]["tensors"])
      for (const auto& [hf, ours] : std::map<std::string, std::string>{{"enorm", "enorm"},
                                                                       {"hnorm", "hnorm"},
                                                                       {"eh_proj", "eh_proj"},
                                                                       {"embed_tokens", "embed_tokens"},
                                                                       {"shared_head.norm", "shared_head_norm"},
                                                                       {"shared_head.head", "shared_head_head"}})
        if (t[0] == hf_added + hf + ".weight")
          more.push_back({added + "nextn." + ours + ".weight", t[1], "same", t[0]});
    for (const auto& t : more) both["gguf"]["tensors"].push_back(t);
    const Folder folder("head-gguf");
    folder.write("m.gguf", StoredNetwork(both).gguf());
    expect_as_stored(one, all, (folder.path / "m.gguf").string(), "");
  }
}

// What the model computes is the same whether or not a head reads it, and without one nothing is handed over.
TEST(Heads, AModelIsTheSameWithAHead) {
  const AgreeingHead agreeing;
  auto alone = load_runner(precisely(agreeing.model.path.string())),
       with = load_runner(precisely(agreeing.model.path.string()));
  ASSERT_TRUE(alone.ok() && with.ok());
  auto head = (*with)->load_head(precisely(agreeing.head.path.string()), 64);
  ASSERT_TRUE(head.ok()) << head.status().message();
  ASSERT_TRUE((*alone)->allocate_cache(8).ok() && (*with)->allocate_cache(8).ok());
  EXPECT_EQ((*head)->info().given, 3 * AgreeingHead::kHidden);
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 40; ++i) tokens.push_back(3 + i * 7 % 250);
  const auto a = pass(**alone, tokens, 0, {}), b = pass(**with, tokens, 0, {.kept = 0});
  for (size_t i = 0; i < tokens.size(); ++i) {
    EXPECT_EQ(a[i].token, b[i].token);
    EXPECT_EQ(a[i].logprob, b[i].logprob);
    EXPECT_EQ(a[i].token, AgreeingHead::next(tokens[i])) << "the model is not what the test is written for";
  }
}

Status refused(const nlohmann::json& config, const TensorMap& tensors, const std::vector<int64_t>& d2t = {},
               const std::string& model = "", int32_t ranks = 1) {
  const AgreeingHead agreeing;
  const Folder folder("refused-head");
  write_folder(folder, config, tensors, d2t);
  RunnerOptions o = precisely(model.empty() ? agreeing.model.path.string() : model);
  o.ranks = ranks;
  auto runner = load_runner(o);
  EXPECT_TRUE(runner.ok()) << runner.status().message();
  auto head = (*runner)->load_head(precisely(folder.path.string()), 64);
  EXPECT_FALSE(head.ok());
  return head.status();
}

TEST(Heads, WhatIsNoHeadForTheModelIsRefusedByName) {
  using ::testing::HasSubstr;
  const nlohmann::json good = AgreeingHead::head_config(256), fewer = AgreeingHead::head_config(192);
  const TensorMap tensors = AgreeingHead::head_tensors(256, {});
  auto with = [](nlohmann::json c, const char* key, const nlohmann::json& value) {
    c[key] = value;
    return c;
  };
  auto without = [&](const char* name) {
    TensorMap out = tensors;
    out.erase(name);
    return out;
  };
  auto expect = [](const Status& s, const char* text) { EXPECT_THAT(s.message(), HasSubstr(text)); };
  expect(refused(with(good, "hidden_size", 32), tensors), "hidden_size is 32, the model's is 64");
  expect(refused(with(good, "target_hidden_size", 128), tensors), "target_hidden_size is 128, the model's is 64");
  expect(refused(with(good, "vocab_size", 300), tensors), "vocab_size is 300, the model's is 256");
  expect(refused(with(good, "draft_vocab_size", 500), tensors), "draft_vocab_size is 500; it must be from 1 to");
  expect(refused(with(good, "num_hidden_layers", 2), tensors), "heads of one layer are supported");
  expect(refused(with(good, "model_type", "deepseek_v3"), tensors), "model_type is 'deepseek_v3'");
  expect(refused(with(good, "norm_before_fc", true), tensors), "norm_before_fc is true, which is not supported");
  expect(refused(with(good, "eagle_config", {{"use_aux_hidden_state", false}}), tensors), "use_aux_hidden_state false");
  expect(refused(with(good, "eagle_aux_hidden_state_layer_ids", {1, 2}), tensors), "must be three layers");
  expect(refused(with(good, "eagle_aux_hidden_state_layer_ids", {1, 2, 5}), tensors),
         "enters layer 5; the model has 4");
  expect(refused(good, without("fc.weight")), "the tensor fc.weight is missing");
  expect(refused(good, without("midlayer.hidden_norm.weight")), "hidden_norm.weight is missing");
  expect(refused(good, without("midlayer.self_attn.q_proj.weight")), "q_proj.weight is missing");
  TensorMap narrow = tensors;
  narrow["fc.weight"] = AgreeingHead::random("fc.weight", {64, 64});
  expect(refused(good, narrow), "tensor fc.weight is 64 x 64; config.json wants 64 x 192");
  const TensorMap some = AgreeingHead::head_tensors(192, std::vector<int64_t>(192));
  expect(refused(fewer, some), "the tensor d2t is missing");
  expect(refused(fewer, some, std::vector<int64_t>(100)), "d2t must be 192 numbers of I64");
  expect(refused(fewer, some, std::vector<int64_t>(192, 100)), "d2t says that token 156 is one 100 on");
  expect(refused(good, tensors, {}, "", 2), "ranks is 2; a head drafts for a model that is not split: --ranks 1");
  expect(refused(with(with(good, "vocab_size", 260), "draft_vocab_size", 260), tensors, {},
                 "dummy:t5,layers=2,hidden=64,heads=4,head_dim=16,ffn=64,vocab=260,type=f32"),
         "hand over no hidden states");
}

}  // namespace
}  // namespace kvasir::model
