// The adapters of make_adapters.py: as PEFT's folder, and as the GGUF file that llama.cpp's converter would write.
#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/model/architectures.h"

namespace kvasir::model {

struct StoredTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

// A safetensors file of float32.
inline std::string safetensors_of(const std::vector<StoredTensor>& tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const StoredTensor& t : tensors) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(t.values.data()), t.values.size() * 4);
    header[t.name] = {{"dtype", "F32"}, {"shape", t.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t n = text.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + text + data;
}

class StoredAdapter {
 public:
  explicit StoredAdapter(const nlohmann::json& one) : config(one["config"]) {
    for (const auto& t : one["tensors"]) {
      StoredTensor made{t[0], t[1], {}};
      int64_t count = 1;
      for (int64_t n : made.shape) count *= n;
      made.values = formula(made.name, count, t[2]);
      for (float& f : made.values) f = float(double(f) + t[3].get<double>());
      tensors.push_back(std::move(made));
    }
  }

  // PEFT's folder, at `path`; what it is called.
  std::string write(const std::filesystem::path& path) const {
    std::filesystem::create_directories(path);
    std::ofstream(path / "adapter_config.json") << config.dump();
    std::ofstream(path / "adapter_model.safetensors", std::ios::binary) << safetensors_of(tensors);
    return path.string();
  }

  // llama.cpp's file, of Llama's names; q's and k's rows turned, as those of its models.
  std::string gguf(int64_t heads, int64_t kv_heads) const {
    const std::pair<const char*, const char*> names[] = {
        {"self_attn.q_proj", "attn_q"},      {"self_attn.k_proj", "attn_k"}, {"self_attn.v_proj", "attn_v"},
        {"self_attn.o_proj", "attn_output"}, {"mlp.gate_proj", "ffn_gate"},  {"mlp.up_proj", "ffn_up"},
        {"mlp.down_proj", "ffn_down"}};
    GgufText out;
    out.put(uint32_t(0x46554747)).put(uint32_t(3)).put(uint64_t(tensors.size())).put(uint64_t(4));
    out.name("general.architecture").put(uint32_t(8)).name("llama");
    out.name("general.type").put(uint32_t(8)).name("adapter");
    out.name("adapter.type").put(uint32_t(8)).name("lora");
    out.name("adapter.lora.alpha").put(uint32_t(6)).put(config["lora_alpha"].get<float>());
    std::string data;
    for (const StoredTensor& t : tensors) {
      std::string name = t.name.substr(std::string("base_model.model.model.layers.").size());
      const std::string layer = name.substr(0, name.find('.'));
      const bool a = name.ends_with("lora_A.weight");
      const std::string module = name.substr(layer.size() + 1, name.rfind(".lora_") - layer.size() - 1);
      std::string ours;
      for (const auto& [theirs, gguf_name] : names)
        if (module == theirs) ours = gguf_name;
      const int64_t turned = a || (ours != "attn_q" && ours != "attn_k") ? 0 : ours == "attn_q" ? heads : kv_heads;
      out.name("blk." + layer + "." + ours + (a ? ".weight.lora_a" : ".weight.lora_b")).put(uint32_t(2));
      out.put(uint64_t(t.shape[1])).put(uint64_t(t.shape[0])).put(uint32_t(0)).put(uint64_t(data.size()));
      std::vector<float> w = t.values;
      const int64_t rows = t.shape[0], cols = t.shape[1], half = turned > 0 ? rows / turned / 2 : 0;
      for (int64_t h = 0; h < turned; ++h)
        for (int64_t i = 0; i < half; ++i)
          for (int64_t part : {0, 1})
            std::copy_n(t.values.begin() + (2 * h * half + part * half + i) * cols, cols,
                        w.begin() + (2 * (h * half + i) + part) * cols);
      data.append(reinterpret_cast<const char*>(w.data()), w.size() * 4);
      data.resize((data.size() + 31) / 32 * 32);
    }
    return out.pad().text + data;
  }

  nlohmann::json config;
  std::vector<StoredTensor> tensors;
};

}  // namespace kvasir::model
