// Folders as Mistral publishes them, params.json beside consolidated.safetensors: the networks that transformers
// computed (make_architectures.py) under Mistral's names, heads' rows as they have them.
#include <gmock/gmock.h>

#include <filesystem>
#include <functional>

#include "model/formats/weight_type.h"
#include "model/load.h"
#include "tests/model/architectures.h"
#include "tests/model/drive.h"
#include "tests/text/stored_ids.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
using testing::HasSubstr;

const json& case_named(const std::string& name) {
  for (const json& one : stored_networks()["cases"])
    if (one["name"] == name) return one;
  throw std::runtime_error(name);
}

std::string mistrals(std::string name) {
  const std::pair<const char*, const char*> names[] = {{"model.embed_tokens", "tok_embeddings"},
                                                       {"model.", ""},
                                                       {"lm_head", "output"},
                                                       {"input_layernorm", "attention_norm"},
                                                       {"post_attention_layernorm", "ffn_norm"},
                                                       {"self_attn.q_proj", "attention.wq"},
                                                       {"self_attn.k_proj", "attention.wk"},
                                                       {"self_attn.v_proj", "attention.wv"},
                                                       {"self_attn.o_proj", "attention.wo"},
                                                       {"mlp.gate_proj", "feed_forward.w1"},
                                                       {"mlp.down_proj", "feed_forward.w2"},
                                                       {"mlp.up_proj", "feed_forward.w3"},
                                                       {"block_sparse_moe", "feed_forward"}};
  for (const auto& [theirs, own] : names)
    if (const size_t at = name.find(theirs); at != std::string::npos) name.replace(at, std::string(theirs).size(), own);
  return name;
}

// Where row `to` of q or k comes from: what are halves of a head in transformers are neighbours.
size_t row_before(const std::string& name, size_t to, size_t head) {
  if (name.find("attention.wq") == std::string::npos && name.find("attention.wk") == std::string::npos) return to;
  return to / head * head + to % 2 * (head / 2) + to % head / 2;
}

struct Stored {
  std::string type;
  std::vector<int64_t> shape;
  std::string bytes;
};
using File = std::map<std::string, Stored>;

std::string text_of(const File& file) {
  json header;
  std::string data;
  for (const auto& [name, t] : file) {
    header[name] = {
        {"dtype", t.type}, {"shape", t.shape}, {"data_offsets", {data.size(), data.size() + t.bytes.size()}}};
    data += t.bytes;
  }
  const std::string text = header.dump();
  const uint64_t n = text.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + text + data;
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
std::vector<T> own_rows(const std::string& name, const std::vector<T>& values, size_t rows, size_t head) {
  const size_t cols = values.size() / rows;
  std::vector<T> out;
  for (size_t r = 0; r < rows; ++r) {
    const auto from = values.begin() + std::ptrdiff_t(row_before(name, r, head) * cols);
    out.insert(out.end(), from, from + std::ptrdiff_t(cols));
  }
  return out;
}

File file_of(StoredNetwork& network, size_t head = 16) {
  File out;
  for (const auto& [theirs, t] : network.tensors()) {
    const std::string name = mistrals(theirs);
    out[name] = {"F32", t.shape, bytes_of(own_rows(name, t.values, size_t(t.shape[0]), head))};
  }
  return out;
}

json params() {
  return {{"dim", 64},       {"n_layers", 4},     {"head_dim", 16},    {"hidden_dim", 96},     {"n_heads", 4},
          {"n_kv_heads", 2}, {"norm_eps", 1e-06}, {"vocab_size", 256}, {"rope_theta", 10000.0}};
}

void write(const Folder& folder, const json& params, const File& file) {
  folder.write("params.json", params.dump());
  folder.write("consolidated.safetensors", text_of(file));
}

double difference(const json& one, const json& params) {
  StoredNetwork network(one);
  Folder folder("mistral");
  write(folder, params, file_of(network));
  Drive drive(folder.path.string(), 2, true, 64);
  return worst(drive, one);
}

TEST(MistralFolder, IsAsTransformersHasIt) {
  EXPECT_LT(difference(case_named("mistral"), params()), 1e-3);
  json windows = params();
  windows["sliding_window"] = 8;
  EXPECT_LT(difference(case_named("mistral with windows"), windows), 1e-3);
  json by_turns = params();
  by_turns["sliding_window"] = {8, 8};  // a list of what is repeated
  EXPECT_LT(difference(case_named("mistral with windows"), by_turns), 1e-3);
  json ministral = params();
  ministral.update(
      {{"norm_eps", 1e-05},
       {"tied_embeddings", false},
       {"max_position_embeddings", 128},
       {"yarn",
        {{"factor", 4}, {"original_max_position_embeddings", 16}, {"beta", 32}, {"alpha", 1}, {"apply_scale", false}}},
       {"llama_4_scaling", {{"beta", .3}, {"original_max_position_embeddings", 16}}},
       {"vision_encoder", {{"hidden_size", 32}}}});
  EXPECT_LT(difference(case_named("ministral3"), ministral), 1e-3);
  json mixtral = params();
  mixtral.erase("rope_theta");
  mixtral.update({{"norm_eps", 1e-05}, {"moe", {{"num_experts", 4}, {"num_experts_per_tok", 2}}}});
  EXPECT_LT(difference(case_named("mixtral"), mixtral), 1e-3);
}

TEST(MistralFolder, ShardsAndOtherSensesBeside) {
  const json& one = case_named("mistral");
  StoredNetwork network(one);
  File all = file_of(network), first, second;
  for (const auto& [name, t] : all) (name.find("layers.1") == 0 ? second : first)[name] = t;
  first["vision_encoder.ln_pre.weight"] = {"F32", {2}, std::string(8, '\0')};
  Folder folder("mistral");
  folder.write("params.json", params().dump());
  json map;
  for (const auto& [name, t] : first) map[name] = "consolidated-00001-of-00002.safetensors";
  for (const auto& [name, t] : second) map[name] = "consolidated-00002-of-00002.safetensors";
  folder.write("consolidated.safetensors.index.json", json({{"weight_map", map}}).dump());
  folder.write("consolidated-00001-of-00002.safetensors", text_of(first));
  folder.write("consolidated-00002-of-00002.safetensors", text_of(second));
  Drive drive(folder.path.string(), 2, true, 64);
  EXPECT_LT(worst(drive, one), 1e-3);
  auto files = open_model(folder.path.string());
  ASSERT_TRUE(files.ok()) << files.status().message();
  for (const auto& [name, t] : all) EXPECT_EQ(std::ranges::count(files->weights->unread(), name), 1);
  EXPECT_EQ(std::ranges::count(files->weights->unread(), "vision_encoder.ln_pre.weight"), 0);
}

// Weights of E4M3 with a scale each are the numbers that they stand for.
TEST(MistralFolder, ScaledBytes) {
  const json& one = case_named("mistral");
  StoredNetwork network(one);
  std::map<std::string, std::vector<uint8_t>> bytes;
  constexpr float kScale = 0.0625f;
  for (auto& [theirs, t] : network.tensors()) {
    if (theirs.find("_proj") == std::string::npos) continue;
    std::vector<uint8_t> eight;
    for (const float f : formula(theirs, int64_t(t.values.size()), 1024)) {
      const int n = int(f + 512);
      eight.push_back(uint8_t((n & 0x87) | (5 + n / 8 % 4) << 3));
    }
    dequantize(WeightType::f8_e4m3, eight.data(), int64_t(eight.size()), t.values.data());
    for (float& f : t.values) f *= kScale;
    bytes[mistrals(theirs)] = eight;
  }
  Folder plain("mistral"), scaled("mistral");
  File file = file_of(network);
  write(plain, params(), file);
  for (const auto& [name, eight] : bytes) {
    Stored& t = file[name];
    t.type = "F8_E4M3", t.bytes = bytes_of(own_rows(name, eight, size_t(t.shape[0]), 16));
    const std::string stem = name.substr(0, name.size() - 6);
    file[stem + "qscale_weight"] = {"F32", {}, bytes_of(std::vector<float>{kScale})};
    file[stem + "qscale_act"] = {"F32", {}, bytes_of(std::vector<float>{.5f})};
  }
  json quantized = params();
  quantized["quantization"] = {{"qformat_weight", "fp8_e4m3"}, {"qscheme_act", "TENSOR"}};
  write(scaled, quantized, file);
  Drive a(plain.path.string(), 2, true, 64), b(scaled.path.string(), 2, true, 64);
  const auto tokens = stored_networks()["tokens"].get<std::vector<int32_t>>();
  const Sampled left = a.step({{0, 0, tokens}})[0], right = b.step({{0, 0, tokens}})[0];
  EXPECT_EQ(left.token, right.token);
  EXPECT_NEAR(left.logprob, right.logprob, 1e-5);
}

std::string chat(const Folder& folder) {
  RunnerOptions options;
  options.model = folder.path.string();
  const auto text = load_text(options);
  EXPECT_TRUE(text.ok()) << text.status().message();
  if (!text.ok() || !text->tokenizer || !text->chat_template) return "";
  const auto said = text->chat_template->render(
      R"([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])", "", true);
  EXPECT_TRUE(said.ok()) << said.status().message();
  return said.ok() ? *said : "";
}

// Its chats are those of its tokenizer's version, where the folder has no template.
TEST(MistralFolder, ChatsByTheVersionOfItsTokenizer) {
  Folder folder("mistral");
  StoredNetwork network(case_named("mistral"));
  write(folder, params(), file_of(network));
  EXPECT_EQ(chat(folder), "");
  const json small = text::stored("mistral"), chats = text::stored("mistral_chats");
  folder.write("tokenizer.model", text::from_base64(small["spm"]["file"]));
  EXPECT_EQ(chat(folder), "<s>[INST] S\n\nU [/INST]");
  folder.write("tokenizer.model", text::from_base64(chats["spm"]));
  EXPECT_EQ(chat(folder), "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]");  // by the tokens it has
  folder.write("tokenizer.model.v2", text::from_base64(chats["spm"]));
  folder.write("tokenizer.model.v3", text::from_base64(chats["spm"]));
  EXPECT_EQ(chat(folder), "<s>[INST]S\n\nU[/INST]");
  json tekken = json::parse(small["tekken"]["file"].get<std::string>());
  folder.write("tekken.json", tekken.dump());  // of version 11
  EXPECT_EQ(chat(folder), "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]");
  tekken["config"]["version"] = "v99";
  folder.write("tekken.json", tekken.dump());
  EXPECT_EQ(chat(folder), "");
  folder.write("tokenizer_config.json", R"({"chat_template": "{{ messages[1].content }}", "eos_token": "</s>"})");
  EXPECT_EQ(chat(folder), "U");
}

TEST(MistralFolder, WhatItSays) {
  auto read = [](const json& p) { return config_from_mistral(p.dump(), "params.json"); };
  json p = params();
  auto c = read(p);
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(c->architecture, "mistral");
  EXPECT_EQ(c->context, 128000);
  p["max_seq_len"] = 4096;
  EXPECT_EQ(read(p)->context, 4096);
  p["max_position_embeddings"] = 8192;
  EXPECT_EQ(read(p)->context, 8192);
  p.erase("rope_theta");
  EXPECT_EQ(read(p)->rope.base, 1e6);
  p["sliding_window"] = 4096;
  EXPECT_EQ(read(p)->rope.base, 1e4);
  p["sliding_window"] = {nullptr, 32, 32, 32};
  c = read(p);
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_FALSE(c->windowed(0));
  EXPECT_TRUE(c->windowed(1));
  EXPECT_EQ(c->window, 32);
}

TEST(MistralFolder, WhatIsNotServedIsRefusedByName) {
  const struct {
    const char* pointer;
    json value;
    const char* says;
  } wrong[] = {{"/sliding_window", {8, nullptr, 8}, "sliding_window must be a number, or a list"},
               {"/sliding_window", {8, 4}, "sliding_window must be of one size"},
               {"/yarn", 3, "yarn must be an object"},
               {"/yarn", {{"gamma", 1}}, "yarn has the key gamma"},
               {"/llama_4_scaling", {{"beta", .1}}, "llama_4_scaling.original_max_position_embeddings must be"},
               {"/moe",
                {{"num_experts", 4}, {"num_experts_per_tok", 2}, {"num_shared_experts", 1}},
                "moe has the key num_shared_experts"},
               {"/quantization", {{"qformat_weight", "nvfp4"}}, "qformat_weight \"nvfp4\""},
               {"/causal", false, "causal is false"},
               {"/kv_lora_rank", 64, "kv_lora_rank"},
               {"/dim", "x", "hidden_size must be a whole number"},
               {"/n_heads", nullptr, "num_attention_heads is missing"}};
  for (const auto& w : wrong) {
    json p = params();
    p[json::json_pointer(w.pointer)] = w.value;
    EXPECT_THAT(config_from_mistral(p.dump(), "params.json").status().message(), HasSubstr(w.says)) << w.says;
  }
  EXPECT_THAT(config_from_mistral("[", "params.json").status().message(), HasSubstr("is not a JSON object"));
  Folder folder("mistral");
  folder.write("params.json", params().dump());
  EXPECT_THAT(open_model(folder.path.string()).status().message(), HasSubstr("params.json"));
}

}  // namespace
}  // namespace kvasir::model
