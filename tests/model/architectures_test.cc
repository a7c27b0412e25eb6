// Every architecture, as transformers computes it: from a folder and from a GGUF file, whichever way a request travels,
// and with what each does not know refused by its name.
#include "tests/model/architectures.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cmath>
#include <set>

#include "model/arch/registry.h"
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

const json& all() { return stored_networks(); }

double worst(const std::string& model, const json& one) {
  Drive drive(model, 2, true, 64);
  return model::worst(drive, one);
}

TEST(Architectures, AFolderIsAsTransformersHasIt) {
  for (const json& one : all()["cases"]) {
    for (size_t i = 0; i < one["configs"].size(); ++i) {
      SCOPED_TRACE(one["name"].get<std::string>() + ", configuration " + std::to_string(i));
      Folder folder("architecture");
      StoredNetwork(one).write_folder(folder, i);
      EXPECT_LT(worst(folder.path.string(), one), 1e-3);
    }
  }
}

TEST(Architectures, AGgufFileIsAsTransformersHasIt) {
  for (const json& one : all()["cases"]) {
    const StoredNetwork network(one);
    if (!network.has_gguf()) continue;
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("architecture");
    folder.write("m.gguf", network.gguf());
    EXPECT_LT(worst(folder.path.string(), one), 1e-3);
  }
}

// Older ones have a head's keys and values as one weight, and no word of the cache's row.
TEST(Architectures, AnOlderGgufFileOfLatentAttentionIsTheSame) {
  for (json one : all()["cases"]) {
    if (one["name"] != "deepseek_v2") continue;
    json& g = one["gguf"];
    json tensors = json::array();
    for (const json& t : g["tensors"]) {
      const std::string name = t[0];
      if (name.ends_with("attn_v_b.weight")) continue;
      if (!name.ends_with("attn_k_b.weight")) {
        tensors.push_back(t);
        continue;
      }
      const int64_t heads = t[1][0], rank = t[1][1];
      tensors.push_back(
          {name.substr(0, name.find("attn_k_b")) + "attn_kv_b.weight", {heads * (16 + 24), rank}, "same", t[3]});
    }
    g["tensors"] = tensors;
    json kv = json::array();
    for (json k : g["kv"]) {
      const std::string key = k[0];
      if (key.ends_with("_mla")) continue;
      if (key == "attention.key_length" || key == "attention.value_length") k[2] = 24;
      if (key == "attention.head_count_kv") k[2] = 4;
      kv.push_back(k);
    }
    g["kv"] = kv;
    Folder folder("architecture");
    folder.write("m.gguf", StoredNetwork(one).gguf());
    EXPECT_LT(worst(folder.path.string(), one), 1e-3);
  }
}

struct Answer {
  Ids tokens;
  std::vector<float> logprobs;
  bool operator==(const Answer&) const = default;
};

// Greedy; the prompt in chunks, then decodes beside the prompt of another sequence, where there is one.
Answer answer(Drive& drive, const Ids& prompt, size_t chunk, const Ids& beside) {
  Answer out;
  Sampled s;
  for (size_t i = 0; i < prompt.size(); i += chunk)
    s = drive.step(
        {{0, int64_t(i),
          Ids(prompt.begin() + int64_t(i), prompt.begin() + int64_t(std::min(prompt.size(), i + chunk)))}})[0];
  for (int64_t at = int64_t(prompt.size()); out.tokens.size() < 8; ++at) {
    out.tokens.push_back(s.token), out.logprobs.push_back(s.logprob);
    std::vector<Piece> pieces{{0, at, {s.token}}};
    if (!beside.empty()) pieces.push_back({1, 0, beside});
    s = drive.step(pieces)[0];
  }
  return out;
}

TEST(Architectures, AloneChunkedAndBatchedAreEqualToTheBit) {
  const Ids tokens = all()["tokens"], prompt(tokens.begin(), tokens.begin() + 30);
  for (const json& one : all()["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("architecture");
    StoredNetwork(one).write_folder(folder);
    Drive two(folder.path.string(), 2, false, 64, 2), single(folder.path.string(), 1, false, 64, 2);
    const Answer expected = answer(two, prompt, 1000, {});
    EXPECT_EQ(answer(two, prompt, 7, {}), expected);
    EXPECT_EQ(answer(two, prompt, 1000, Ids(tokens.begin() + 3, tokens.end())), expected);
    EXPECT_EQ(answer(single, prompt, 16, {}), expected);
  }
}

TEST(Architectures, APrefixHitChangesNothing) {
  const Ids tokens = all()["tokens"], prompt(tokens.begin(), tokens.begin() + 30);
  constexpr int64_t kShared = Drive::kPage;
  for (const json& one : all()["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("architecture");
    StoredNetwork(one).write_folder(folder);
    Drive drive(folder.path.string(), 2, false, 64, 2);
    if (drive.runner->info().state_bytes > 0) continue;  // its states are not shared by prefix
    const Sampled whole = drive.step({{0, 0, prompt}})[0];
    drive.share(1, 0, 1);
    const Sampled hit = drive.step({{1, kShared, Ids(prompt.begin() + kShared, prompt.end())}})[0];
    EXPECT_EQ(hit.token, whole.token);
    EXPECT_EQ(hit.logprob, whole.logprob);
  }
}

TEST(Architectures, EachHasANetworkHere) {
  std::set<std::string> seen;
  for (const json& one : all()["cases"])
    for (const json& as : one["configs"]) {
      auto config = config_from_json(as.dump(), "config.json");
      ASSERT_TRUE(config.ok()) << config.status().message();
      seen.insert(config->architecture);
    }
  const json encoders = fixture("embeddings.json")["encoders"];
  for (const json& one : encoders) seen.insert(one["configs"][0]["model_type"].get<std::string>());
  const json pairs = fixture("t5.json")["cases"];
  for (const json& one : pairs) seen.insert(one["configs"][0]["model_type"].get<std::string>());
  for (const Architecture* a : architectures()) EXPECT_TRUE(seen.count(std::string(a->name))) << a->name;
}

// As the files of BERT on the hub have it.
TEST(Architectures, PositionsOfAnEncoderAreAbsoluteOrRefused) {
  json config = fixture("embeddings.json")["encoders"][0]["configs"][0];
  config["position_embedding_type"] = "absolute";
  EXPECT_TRUE(config_from_json(config.dump(), "config.json").ok());
  config["position_embedding_type"] = "relative_key";
  EXPECT_THAT(config_from_json(config.dump(), "config.json").status().message(),
              testing::HasSubstr("position_embedding_type is \"relative_key\""));
}

json config_of(const std::string& name) {
  for (const json& one : all()["cases"])
    if (one["name"] == name) return one["configs"][0];
  ADD_FAILURE() << name;
  return {};
}

// Why a network with this configuration is not loaded.
std::string refusal(const std::string& name, const json& config) {
  for (const json& one : all()["cases"]) {
    if (one["name"] != name) continue;
    Folder folder("refused");
    StoredNetwork(one).write_folder(folder);
    folder.write("config.json", config.dump());
    RunnerOptions options;
    options.model = folder.path.string();
    options.max_kvlen = 64;
    return load_runner(options).status().message();
  }
  return "";
}

TEST(Architectures, AKeyThatChangesNumbersIsReadOrRefusedByName) {
  const struct {
    const char* network;
    const char* key;
    json value;
    const char* says;
  } wrong[] = {{"llama", "attn_logit_softcapping", 50.0, "attn_logit_softcapping is 50"},
               {"llama", "position_embedding_type", "alibi", "position_embedding_type"},
               {"llama", "quantization_config", {{"quant_method", "unheard of"}}, "unheard of"},
               {"llama", "quantization_config", {{"quant_method", "gptq"}, {"bits", 3}}, "has bits 3; of gptq 4 and 8"},
               {"llama", "quantization_config", {{"quant_method", "awq"}, {"version", "gemv"}}, "version 'gemv'"},
               {"llama", "num_local_experts", 8, "num_local_experts is 8"},
               {"llama", "layer_types", json::array({"linear_attention", "x", "x", "x"}), "linear_attention"},
               {"llama", "layer_types", json::array({"full_attention"}), "layer_types"},
               {"llama", "rope_parameters", {{"rope_type", "dynamic"}, {"factor", 2.0}}, "dynamic"},
               {"llama", "rope_parameters", 7, "rope_scaling must be an object"},
               {"llama", "hidden_act", "mish", "mish"},
               {"llama", "attention_bias", "yes", "attention_bias must be true or false"},
               {"qwen2", "use_sliding_window", 3, "use_sliding_window"},
               {"gemma2", "final_logit_softcapping", -3.0, "softcap of logits is -3"},
               {"gemma2", "use_bidirectional_attention", true, "use_bidirectional_attention"},
               {"gemma4", "use_bidirectional_attention", "all", "use_bidirectional_attention is 'all'"},
               {"gemma4", "per_layer_config", {{"9", {{"head_dim", 32}}}}, "per_layer_config"},
               {"gemma4", "per_layer_config", {{"1", {{"head_dim", 32}}}}, "caches of different shapes"},
               {"gemma4", "num_kv_shared_layers", 4, "layer 2 shares a cache that no layer of its kind has"},
               {"gemma4 of per-layer inputs", "vocab_size_per_layer_input", 128, "vocab_size_per_layer_input is 128"},
               {"gemma4 with experts", "top_k_experts", nullptr, "top_k_experts is missing"},
               {"granite", "residual_multiplier", 0.0, "residual multiplier is 0"},
               {"granite", "logits_scaling", 0.0, "logit multiplier is inf"},
               {"olmo2", "clip_qkv", 8.0, "clip_qkv is 8"},
               {"phi", "qk_layernorm", true, "qk_layernorm is true"},
               {"phi3 long", "rope_parameters", {{"rope_type", "longrope"}, {"long_factor", {1, 2}}}, "long_factor"},
               {"smollm3", "no_rope_layers", json::array({1}), "no_rope_layers"},
               {"bloom", "apply_residual_connection_post_layernorm", true, "apply_residual_connection_post_layernorm"},
               {"qwen3_moe", "num_experts_per_tok", 9, "experts a token is 9"},
               {"qwen3_moe", "decoder_sparse_step", 0, "decoder_sparse_step must be at least 1"},
               {"qwen3_moe", "mlp_only_layers", {"x"}, "mlp_only_layers must be a list of layers"},
               {"qwen3_moe", "moe_intermediate_size", 40, "feed-forward size is 40; it must be a multiple of 16"},
               {"mixtral", "num_local_experts", 0, "num_experts must be at least 1"},
               {"deepseek_v2", "topk_method", "noaux_tc", "topk_method must be greedy or group_limited_greedy"},
               {"deepseek_v2", "norm_topk_prob", true, "norm_topk_prob is true"},
               {"deepseek_v2", "kv_lora_rank", 0, "kv_lora_rank must be at least 1"},
               {"deepseek_v2", "kv_lora_rank", 600, "kv_lora_rank is 600"},
               {"deepseek_v3", "scoring_func", "softmax", "scoring_func is \"softmax\""},
               {"deepseek_v3", "topk_method", "greedy", "topk_method is \"greedy\""},
               {"deepseek_v3", "moe_layer_freq", 2, "moe_layer_freq is 2"},
               {"deepseek_v3", "partial_rotary_factor", 0.5, "partial_rotary_factor must be 1"},
               {"deepseek_v3", "v_head_dim", 0, "v_head_dim is 0"},
               {"glm4_moe_lite", "mlp_layer_types", {"dense"}, "mlp_layer_types must be one kind a layer"},
               {"glm4_moe_lite", "mlp_layer_types", {"dense", "thin", "sparse", "sparse"}, "dense or sparse"},
               {"mpt", "no_bias", false, "no_bias is false"},
               {"mpt", "attn_config", {{"clip_qkv", 6.0}}, "clip_qkv is 6"},
               {"mpt", "attn_config", {{"alibi", false}}, "alibi is false"},
               {"mpt", "attn_config", 3, "attn_config must be an object"}};
  for (const auto& w : wrong) {
    json config = config_of(w.network);
    config[w.key] = w.value;
    EXPECT_THAT(refusal(w.network, config), testing::HasSubstr(w.says)) << w.network << " " << w.key << " " << w.value;
  }
}

TEST(Architectures, ExpertsInMxfp4AreTheNumbersTheyStandFor) {
  const json& all_cases = all()["cases"];
  const auto one =
      std::find_if(all_cases.begin(), all_cases.end(), [](const json& c) { return c["name"] == "gpt_oss"; });
  ASSERT_NE(one, all_cases.end());
  std::vector<std::vector<float>> logprobs;
  for (bool blocks : {false, true}) {
    StoredNetwork network(*one);
    for (int layer = 0; layer < 4; ++layer)
      for (const char* name : {"gate_up_proj", "down_proj"})
        network.use_mxfp4("model.layers." + std::to_string(layer) + ".mlp.experts." + name, blocks);
    Folder folder("mxfp4");
    network.write_folder(folder);
    json config = (*one)["configs"][0];
    if (blocks) config["quantization_config"] = {{"quant_method", "mxfp4"}, {"modules_to_not_convert", {"lm_head"}}};
    folder.write("config.json", config.dump());
    Drive drive(folder.path.string(), 2, true, 64);
    SamplingParams params = Drive::greedy();
    params.logprobs = 256;
    auto& row = logprobs.emplace_back(256);
    const auto last = drive.step({{0, 0, all()["tokens"]}}, params);
    for (const TokenLogprob& t : last[0].top) row[size_t(t.token)] = t.logprob;
  }
  for (size_t i = 0; i < 256; ++i) EXPECT_NEAR(logprobs[0][i], logprobs[1][i], 1e-4) << i;
}

TEST(Architectures, BlocksOfMxfp4ThatDoNotFitAreRefused) {
  const json& all_cases = all()["cases"];
  const auto one =
      std::find_if(all_cases.begin(), all_cases.end(), [](const json& c) { return c["name"] == "gpt_oss"; });
  ASSERT_NE(one, all_cases.end());
  for (const auto& [key, value, says] : {std::tuple{"hidden_size", 32, ""},
                                         {"intermediate_size", 48, "in blocks of 16"},
                                         {"num_local_experts", 5, ""}}) {
    StoredNetwork network(*one);
    for (const char* name : {"gate_up_proj", "down_proj"})
      network.use_mxfp4(std::string("model.layers.0.mlp.experts.") + name, true);
    Folder folder("mxfp4");
    network.write_folder(folder);
    json config = (*one)["configs"][0];
    config[key] = value;
    folder.write("config.json", config.dump());
    RunnerOptions options;
    options.model = folder.path.string();
    const Status status = load_runner(options).status();
    EXPECT_FALSE(status.ok()) << key;
    EXPECT_THAT(status.message(), testing::HasSubstr(says));
  }
}

TEST(Architectures, AnExpertThatIsMissingIsNamed) {
  const std::string missing = "model.layers.2.mlp.experts.5.up_proj.weight";
  for (json one : all()["cases"]) {
    if (one["name"] != "qwen3_moe") continue;
    auto& tensors = one["tensors"];
    for (auto it = tensors.begin(); it != tensors.end(); ++it)
      if ((*it)[0] == missing) it = tensors.erase(it) - 1;
    Folder folder("refused");
    StoredNetwork(one).write_folder(folder);
    RunnerOptions options;
    options.model = folder.path.string();
    EXPECT_THAT(load_runner(options).status().message(), testing::HasSubstr(missing));
  }
}

TEST(Architectures, AKeyThatSaysWhatIsSoAnywayIsFine) {
  json config = config_of("llama");
  config.update({{"attn_logit_softcapping", nullptr},
                 {"position_embedding_type", "rope"},
                 {"num_local_experts", 0},
                 {"clip_qkv", nullptr},
                 {"a_key_of_tomorrow", 3},
                 {"torch_dtype", "bfloat16"}});
  EXPECT_TRUE(config_from_json(config.dump(), "config.json").ok());
}

TEST(Architectures, AMetadataKeyThatChangesNumbersIsReadOrRefusedByName) {
  const struct {
    const char* network;
    json kv;
  } wrong[] = {{"qwen3", {"expert_count", 4, 8, 4}},
               {"qwen3_moe", {"expert_gating_func", 4, 9, 4}},
               {"qwen3", {"attention.clamp_kqv", 6, 8.0, 6}},
               {"qwen3", {"rope.scaling.type", 8, "unheard of", 8}},
               {"qwen3", {"attn_logit_softcapping", 6, 30.0, 6}},
               {"qwen3", {"ssm.state_size", 4, 16, 4}}};
  for (const auto& w : wrong) {
    for (json one : all()["cases"]) {
      if (one["name"] != w.network) continue;
      one["gguf"]["kv"].push_back(w.kv);
      const std::string text = StoredNetwork(one).gguf();
      auto file = Gguf::parse("m.gguf", {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
      ASSERT_TRUE(file.ok()) << file.status().message();
      auto config = config_from_gguf(**file);
      ASSERT_FALSE(config.ok()) << w.kv;
      const std::string key = w.kv[0];
      EXPECT_THAT(config.status().message(), testing::HasSubstr(key == "rope.scaling.type" ? "unheard of" : key));
    }
  }
}

TEST(Architectures, ATensorThatIsMissingIsNamed) {
  for (json one : all()["cases"]) {
    if (one["name"] != "gemma2" && one["name"] != "qwen2") continue;
    const std::string gone = one["name"] == "gemma2" ? "model.layers.2.pre_feedforward_layernorm.weight"
                                                     : "model.layers.1.self_attn.k_proj.bias";
    json& tensors = one["tensors"];
    for (size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i][0] == gone) tensors.erase(i--);
    Folder folder("missing");
    StoredNetwork(one).write_folder(folder);
    RunnerOptions options;
    options.model = folder.path.string();
    options.max_kvlen = 64;
    EXPECT_THAT(load_runner(options).status().message(), testing::HasSubstr(gone));
  }
}

}  // namespace
}  // namespace kvasir::model
