// The seeded networks of make_fixtures.py as a folder of config.json and safetensors.
#pragma once

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvasir::model {

inline std::vector<float> formula(const std::string& name, int64_t count, double scale) {
  uint32_t tag = 0;
  for (char c : name) tag = tag * 31 + uint8_t(c);
  std::vector<float> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    uint32_t x = uint32_t(uint64_t(i) * 2654435761u + tag);
    x = (x ^ (x >> 16)) * 0x45D9F3Bu;
    x ^= x >> 16;
    out[size_t(i)] = float((double(x & 0xffff) / 65536 - 0.5) * scale);
  }
  return out;
}

struct Folder {
  explicit Folder(const std::string& name)
      : path(std::filesystem::temp_directory_path() / ("kvasir-" + name + "-" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path / name, std::ios::binary) << text;
  }
  std::filesystem::path path;
};

inline std::string safetensors(const std::vector<std::pair<std::string, std::vector<int64_t>>>& tensors,
                               double norm_shift) {
  nlohmann::json header;
  std::string data;
  for (auto& [name, shape] : tensors) {
    bool norm = shape.size() == 1;
    std::vector<float> w = formula(name, norm ? shape[0] : shape[0] * shape[1], norm ? 0.5 : 0.25);
    if (norm)
      for (float& f : w) f += float(norm_shift);
    size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(w.data()), w.size() * 4);
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  uint64_t n = text.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + text + data;
}

using Shapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

// `more`: tensors beside the network's.
inline void write_network(const Folder& folder, const nlohmann::json& c, const Shapes& more = {}) {
  bool gemma = c["model_type"] == "gemma3_text";
  int64_t h = c["hidden_size"], f = c["intermediate_size"], d = c["head_dim"], q = c["num_attention_heads"],
          k = c["num_key_value_heads"];
  Shapes t = {{"model.embed_tokens.weight", {c["vocab_size"], h}}, {"model.norm.weight", {h}}};
  t.insert(t.end(), more.begin(), more.end());
  for (int i = 0; i < c["num_hidden_layers"]; ++i) {
    auto add = [&](const char* name, std::vector<int64_t> shape) {
      t.push_back({"model.layers." + std::to_string(i) + "." + name + ".weight", shape});
    };
    add("input_layernorm", {h}), add("post_attention_layernorm", {h});
    add("self_attn.q_proj", {q * d, h}), add("self_attn.k_proj", {k * d, h}), add("self_attn.v_proj", {k * d, h});
    add("self_attn.o_proj", {h, q * d});
    add("mlp.gate_proj", {f, h}), add("mlp.up_proj", {f, h}), add("mlp.down_proj", {h, f});
    if (gemma) {
      add("self_attn.q_norm", {d}), add("self_attn.k_norm", {d});
      add("pre_feedforward_layernorm", {h}), add("post_feedforward_layernorm", {h});
    }
  }
  folder.write("config.json", c.dump());
  folder.write("model.safetensors", safetensors(t, gemma ? 0 : 1));
}

}  // namespace kvasir::model
