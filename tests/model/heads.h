// Folders of heads that draft and of their models: those of make_heads.py, and one that is right by construction.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/model/drive.h"
#include "tests/model/small_network.h"

namespace kvasir::model {

struct TensorValues {
  std::vector<int64_t> shape;
  std::vector<float> values;
};
using TensorMap = std::map<std::string, TensorValues>;

// By the formula of make_architectures.py.
inline TensorMap tensors_of(const nlohmann::json& described) {
  TensorMap out;
  for (const auto& t : described["tensors"]) {
    const std::string name = t[0];
    TensorValues v{t[1], {}};
    int64_t count = 1;
    for (int64_t n : v.shape) count *= n;
    v.values = formula(name, count, 0.5);
    const std::string stem = name.substr(0, name.rfind('.')), last = stem.substr(stem.rfind('.') + 1);
    if (v.shape.size() == 1 && name.ends_with(".weight") && last.find("norm") != std::string::npos)
      for (float& f : v.values) f += 1;
    out.emplace(name, std::move(v));
  }
  return out;
}

inline void write_folder(const Folder& folder, const nlohmann::json& config, const TensorMap& tensors,
                         const std::vector<int64_t>& d2t = {}) {
  folder.write("config.json", config.dump());
  nlohmann::json header;
  std::string data;
  auto put = [&](const std::string& name, const char* type, const std::vector<int64_t>& shape, const void* bytes,
                 size_t size) {
    const size_t begin = data.size();
    data.append(static_cast<const char*>(bytes), size);
    header[name] = {{"dtype", type}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
  };
  if (!d2t.empty()) put("d2t", "I64", {int64_t(d2t.size())}, d2t.data(), d2t.size() * 8);
  for (const auto& [name, t] : tensors) put(name, "F32", t.shape, t.values.data(), t.values.size() * 4);
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t n = text.size();
  folder.write("model.safetensors", std::string(reinterpret_cast<const char*>(&n), 8) + text + data);
}

// A case of make_heads.py: its model, and its head unless that lies in the model's files.
struct StoredHead {
  explicit StoredHead(const nlohmann::json& one) : one(one), model("head-model"), head("head-head") {
    write_folder(model, one["model"]["configs"][0], tensors_of(one["model"]));
    if (own()) write_folder(head, one["head"]["configs"][0], tensors_of(one["head"]), one["d2t"]);
  }
  bool own() const { return one.contains("head"); }
  std::string folder() const { return own() ? head.path.string() : ""; }
  const nlohmann::json& one;
  Folder model, head;
};

// A model whose next token is nearly a function of the last one, far from repeating itself, and a head that knows it:
// its attention sees its own row alone and hands the token's embedding on, whatever states it is given.
struct AgreeingHead {
  static constexpr int64_t kVocab = 256, kHidden = 64;
  static int64_t next(int64_t token) { return (5 * token + 3) % kVocab; }

  // `drawn`: tokens that the head may draw, three of four where there are fewer than all.
  explicit AgreeingHead(int64_t drawn = kVocab) : model("agreeing-model"), head("agreeing-head") {
    write_folder(model, model_config(), model_tensors());
    std::vector<int64_t> d2t;
    for (int64_t i = 0; drawn < kVocab && i < drawn; ++i) d2t.push_back(i / 3);
    write_folder(head, head_config(drawn), head_tensors(drawn, d2t), d2t);
  }

  static nlohmann::json model_config() {
    return {{"model_type", "llama"},  {"hidden_size", kHidden},      {"intermediate_size", 96},
            {"num_hidden_layers", 4}, {"num_attention_heads", 4},    {"num_key_value_heads", 2},
            {"vocab_size", kVocab},   {"rms_norm_eps", 1e-5},        {"max_position_embeddings", 512},
            {"rope_theta", 10000.0},  {"tie_word_embeddings", false}};
  }
  static nlohmann::json head_config(int64_t drawn) {
    nlohmann::json c = model_config();
    c["architectures"] = {"LlamaForCausalLMEagle3"};
    c["num_hidden_layers"] = 1, c["num_key_value_heads"] = 4, c["draft_vocab_size"] = drawn;
    c["norm_before_residual"] = true;
    return c;
  }
  static TensorValues random(const std::string& name, std::vector<int64_t> shape, float scale = 1) {
    TensorValues out{shape, formula(name, shape.size() > 1 ? shape[0] * shape[1] : shape[0], 0.5)};
    for (float& f : out.values) f *= scale;
    return out;
  }
  static TensorValues ones(float value = 1) { return {{kHidden}, std::vector<float>(kHidden, value)}; }
  static TensorValues embedding() {
    TensorValues out = random("embedding", {kVocab, kHidden});
    for (int64_t t = 0; t < kVocab; ++t) out.values[size_t(t * kHidden)] = 1.5f;
    return out;
  }
  // Row next(t) is t's embedding, but for what all have in common.
  static TensorValues output() {
    const TensorValues e = embedding();
    TensorValues out = e;
    for (int64_t t = 0; t < kVocab; ++t) {
      std::copy_n(e.values.begin() + t * kHidden, kHidden, out.values.begin() + next(t) * kHidden);
      out.values[size_t(next(t) * kHidden)] = 0;
    }
    return out;
  }
  static TensorMap model_tensors() {
    TensorMap out{
        {"model.embed_tokens.weight", embedding()}, {"model.norm.weight", ones()}, {"lm_head.weight", output()}};
    for (int i = 0; i < 4; ++i) {
      const std::string at = "model.layers." + std::to_string(i) + ".";
      auto add = [&](const char* name, int64_t rows, int64_t cols, float scale) {
        out[at + name] = random(at + name, {rows, cols}, scale);
      };
      out[at + "input_layernorm.weight"] = out[at + "post_attention_layernorm.weight"] = ones();
      add("self_attn.q_proj.weight", 64, kHidden, 1), add("self_attn.k_proj.weight", 32, kHidden, 1);
      add("self_attn.v_proj.weight", 32, kHidden, 1), add("self_attn.o_proj.weight", kHidden, 64, .01f);
      add("mlp.gate_proj.weight", 96, kHidden, 1), add("mlp.up_proj.weight", 96, kHidden, 1);
      add("mlp.down_proj.weight", kHidden, 96, .01f);
    }
    return out;
  }
  static TensorMap head_tensors(int64_t drawn, const std::vector<int64_t>& d2t) {
    TensorMap out;
    auto zeros = [](int64_t rows, int64_t cols) {
      return TensorValues{{rows, cols}, std::vector<float>(size_t(rows * cols))};
    };
    out["fc.weight"] = random("fc.weight", {kHidden, 3 * kHidden});
    out["midlayer.hidden_norm.weight"] = ones(.01f);
    out["midlayer.input_layernorm.weight"] = out["midlayer.post_attention_layernorm.weight"] = ones();
    out["norm.weight"] = ones();
    TensorValues constant = zeros(kHidden, 2 * kHidden), same = constant, back = zeros(kHidden, kHidden);
    for (int64_t i = 0; i < kHidden; ++i) {
      constant.values[size_t(2 * i * kHidden)] = 1.5f;
      same.values[size_t(2 * i * kHidden + i)] = back.values[size_t(i * kHidden + i)] = 1;
    }
    out["midlayer.self_attn.q_proj.weight"] = out["midlayer.self_attn.k_proj.weight"] = constant;
    out["midlayer.self_attn.v_proj.weight"] = same;
    out["midlayer.self_attn.o_proj.weight"] = back;
    out["midlayer.mlp.gate_proj.weight"] = random("gate", {96, kHidden});
    out["midlayer.mlp.up_proj.weight"] = random("up", {96, kHidden});
    out["midlayer.mlp.down_proj.weight"] = zeros(kHidden, 96);
    const TensorValues all = output();
    TensorValues some = zeros(drawn, kHidden);
    for (int64_t i = 0; i < drawn; ++i)
      std::copy_n(all.values.begin() + (i + (d2t.empty() ? 0 : d2t[size_t(i)])) * kHidden, kHidden,
                  some.values.begin() + i * kHidden);
    out["lm_head.weight"] = std::move(some);
    return out;
  }

  Folder model, head;
};

// Tokens of one sequence from position `begin`, each row's logits drawn from. Where they leave their states and read
// those that they are given: places, one after another from these on.
struct Places {
  int32_t kept = -1, given = -1;
  int64_t given_cols = 0;
};
inline std::vector<Sampled> pass(Runner& runner, const std::vector<int32_t>& tokens, int64_t begin,
                                 const Places& places) {
  SamplingParams params = Drive::greedy();
  params.logprobs = 256;
  Batch b;
  b.tokens = tokens;
  const auto count = int64_t(tokens.size()), end = begin + count;
  std::vector<SampleRow> rows(tokens.size());
  for (int32_t i = 0; i < count; ++i) {
    b.positions.push_back(int32_t(begin) + i);
    b.logit_rows.push_back(i);
    rows[size_t(i)].params = &params;
    rows[size_t(i)].position = begin + i + 1;
    if (places.kept >= 0) b.kept_at.push_back(places.kept + i);
    if (places.given >= 0) b.given_at.push_back(places.given + i);
  }
  b.given_cols = places.given_cols;
  b.seqstarts = {0, count}, b.kvstarts = {0, end}, b.start_pos = {begin};
  b.max_seqlen = count, b.max_kvlen = end, b.decoding_batches = count == 1;
  b.max_pages = (end + 15) / 16;
  for (int64_t p = 0; p < b.max_pages; ++p) b.cachestarts.push_back((7 - p) * 16);  // 8 pages, backwards
  const Status launched = runner.launch(b, rows);
  EXPECT_TRUE(launched.ok()) << launched.message();
  auto waited = runner.wait();
  EXPECT_TRUE(waited.ok()) << waited.status().message();
  return waited.ok() ? std::move(*waited) : std::vector<Sampled>();
}

// The greatest difference of a row's log-probabilities from those that are stored, of a head's own tokens.
inline double worst_of(const Sampled& row, const std::vector<double>& want, const std::vector<int64_t>& d2t) {
  EXPECT_EQ(row.top.size(), want.size());
  double worst = 0;
  for (const TokenLogprob& t : row.top) {
    auto own = size_t(t.token);
    for (size_t k = 0; k < d2t.size(); ++k)
      if (int64_t(k) + d2t[k] == t.token) own = k;
    worst = std::max(worst, std::fabs(t.logprob - want[own]));
  }
  return worst;
}

}  // namespace kvasir::model
