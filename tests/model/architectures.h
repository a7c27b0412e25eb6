// The networks of make_architectures.py: as a folder that transformers would read, and as the GGUF file that
// llama.cpp's converter would write.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/model/drive.h"
#include "tests/model/small_gguf.h"
#include "tests/model/small_network.h"

namespace kvasir::model {

class StoredNetwork {
 public:
  struct Tensor {
    std::vector<int64_t> shape;
    std::vector<float> values;
  };

  explicit StoredNetwork(const nlohmann::json& one) : one_(one) {
    for (const auto& t : one["tensors"]) {
      std::vector<int64_t> shape = t[1];
      int64_t count = 1;
      for (int64_t n : shape) count *= n;
      std::string name = t[0];
      std::vector<float> w = formula(name, count, 0.5);
      if (shape.size() == 1 && is_norm(name))
        for (float& f : w) f = float(double(f) + one["norm_base"].get<double>());
      tensors_[name] = {shape, std::move(w)};
    }
  }

  // With the nth of the configurations that mean the same.
  void write_folder(const Folder& folder, size_t nth = 0) const {
    folder.write("config.json", one_["configs"][nth].dump());
    nlohmann::json header;
    std::string data;
    for (const auto& [name, t] : tensors_) {
      const size_t begin = data.size();
      data.append(reinterpret_cast<const char*>(t.values.data()), t.values.size() * 4);
      header[name] = {{"dtype", "F32"}, {"shape", t.shape}, {"data_offsets", {begin, data.size()}}};
    }
    for (const auto& [name, t] : bytes_) {
      const size_t begin = data.size();
      data += t.second;
      header[name] = {{"dtype", "U8"}, {"shape", t.first}, {"data_offsets", {begin, data.size()}}};
    }
    const std::string text = header.dump();
    const uint64_t n = text.size();
    folder.write("model.safetensors", std::string(reinterpret_cast<const char*>(&n), 8) + text + data);
  }

  // [experts, inputs, outputs] of numbers that MXFP4 has: as they are, or in its blocks.
  void use_mxfp4(const std::string& name, bool blocks) {
    constexpr float kE2m1[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    Tensor& t = tensors_.at(name);
    const int64_t inputs = t.shape[1], outputs = t.shape[2];
    auto& [shape, bytes] = bytes_[name + "_blocks"];
    auto& [scale_shape, scales] = bytes_[name + "_scales"];
    shape = {t.shape[0], outputs, inputs / 32, 16}, scale_shape = {t.shape[0], outputs, inputs / 32};
    const std::vector<float> random = formula(name, int64_t(t.values.size()), 16);
    for (size_t at = 0, e = 0; e < size_t(t.shape[0]); ++e)
      for (int64_t o = 0; o < outputs; ++o)
        for (int64_t i = 0; i < inputs; ++i, ++at) {
          const int q = int(random[at] + 8) & 15, scale = 122 + int(o + i / 32) % 4;
          if (i % 32 == 0) scales.push_back(char(scale));
          if (i % 2 == 0) bytes.push_back(char(q));
          if (i % 2 == 1) bytes.back() = char(uint8_t(bytes.back()) | q << 4);
          const float value = std::ldexp(kE2m1[q % 8], scale - 127);
          t.values[(e * size_t(inputs) + size_t(i)) * size_t(outputs) + size_t(o)] = q < 8 ? value : -value;
        }
    if (blocks)
      tensors_.erase(name);
    else
      bytes_.erase(name + "_blocks"), bytes_.erase(name + "_scales");
  }

  bool has_gguf() const { return one_.contains("gguf"); }
  std::string gguf() const {
    const auto& g = one_["gguf"];
    const std::string arch = g["arch"];
    GgufText out;
    out.put(uint32_t(0x46554747)).put(uint32_t(3)).put(uint64_t(g["tensors"].size())).put(uint64_t(g["kv"].size() + 1));
    out.name("general.architecture").put(uint32_t(8)).name(arch);
    for (const auto& kv : g["kv"]) {
      out.name(arch + "." + kv[0].get<std::string>()).put(kv[1].get<uint32_t>());
      if (kv[1] != 9) {
        put(out, kv[1], kv[2]);
        continue;
      }
      out.put(kv[3].get<uint32_t>()).put(uint64_t(kv[2].size()));
      for (const auto& v : kv[2]) put(out, kv[3], v);
    }
    std::string data;
    for (const auto& t : g["tensors"]) {
      const std::vector<int64_t> shape = t[1];
      out.name(t[0]).put(uint32_t(shape.size()));
      for (size_t i = shape.size(); i-- > 0;) out.put(uint64_t(shape[i]));
      out.put(uint32_t(0)).put(uint64_t(data.size()));
      const std::vector<float> w = made(t);
      data.append(reinterpret_cast<const char*>(w.data()), w.size() * 4);
      data.resize((data.size() + 31) / 32 * 32);
    }
    return out.pad().text + data;
  }

  std::map<std::string, Tensor>& tensors() { return tensors_; }

 private:
  static bool is_norm(const std::string& name) {
    for (const char* last : {"layer_scalar", "router.scale", "per_expert_scale"})
      if (name.ends_with(last)) return true;
    if (!name.ends_with(".weight")) return false;
    const std::string stem = name.substr(0, name.size() - 7), last = stem.substr(stem.rfind('.') + 1);
    return last.find("norm") != std::string::npos || last.find("ln_") != std::string::npos;
  }

  static void put(GgufText& out, int kind, const nlohmann::json& v) {
    switch (kind) {
      case 4: out.put(v.get<uint32_t>()); break;
      case 5: out.put(v.get<int32_t>()); break;
      case 6: out.put(v.get<float>()); break;
      case 7: out.put(uint8_t(v.get<bool>())); break;
      case 8: out.name(v); break;
      default: ADD_FAILURE() << "a key of kind " << kind;
    }
  }

  // A tensor of the GGUF file out of the folder's.
  std::vector<float> made(const nlohmann::json& t) const {
    const std::string how = t[2];
    const std::vector<int64_t> shape = t[1];
    if (how == "values") return t[3];
    if (how == "experts") {
      std::vector<float> all;
      for (const auto& name : t[3]) {
        const std::vector<float>& w = tensors_.at(name).values;
        all.insert(all.end(), w.begin(), w.end());
      }
      return all;
    }
    const Tensor& from = tensors_.at(t[3]);
    if (how == "turned") {  // [experts, inputs, outputs], or biases: some outputs
      const int64_t experts = from.shape[0], outputs = from.shape.back(),
                    inputs = from.shape.size() > 2 ? from.shape[1] : 1;
      std::vector<float> out;
      for (int64_t e = 0; e < experts; ++e)
        for (int64_t o = t[5]; o < outputs; o += t[4].get<int64_t>())
          for (int64_t i = 0; i < inputs; ++i) out.push_back(from.values[size_t((e * inputs + i) * outputs + o)]);
      return out;
    }
    if (how == "head keys" || how == "head values") {  // of each head: some rows, of keys as columns
      const int64_t heads = shape[0], each = from.shape[0] / heads, cols = from.shape[1], first = t[4], count = t[5];
      std::vector<float> out;
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < count * cols; ++i) {
          const int64_t row = how == "head keys" ? i % count : i / cols,
                        col = how == "head keys" ? i / count : i % cols;
          out.push_back(from.values[size_t((h * each + first + row) * cols + col)]);
        }
      return out;
    }
    std::vector<float> w = from.values;
    if (how == "same") return w;
    if (how == "rows" || how == "columns") {  // in another order, or some of them
      const bool rows = how == "rows";
      const int64_t cols = from.shape.back(), count = int64_t(w.size()) / cols;
      std::vector<int64_t> order;
      for (const auto& run : t[4])
        for (int64_t i = 0; i < run[1]; ++i) order.push_back(run[0].get<int64_t>() + i);
      std::vector<float> out;
      for (int64_t r = 0; r < (rows ? std::ssize(order) : count); ++r)
        for (int64_t c = 0; c < (rows ? cols : std::ssize(order)); ++c)
          out.push_back(w[size_t(rows ? order[size_t(r)] * cols + c : r * cols + order[size_t(c)])]);
      return out;
    }
    if (how == "plus one") {
      for (float& f : w) f = float(double(f) + 1);
      return w;
    }
    const int64_t rows = from.shape[0], cols = int64_t(w.size()) / rows;
    auto take = [&](int64_t to, int64_t row) {
      std::copy_n(from.values.begin() + row * cols, cols, w.begin() + to * cols);
    };
    if (how == "neighbours") {
      const int64_t heads = t[4], half = rows / heads / 2;
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < half; ++i)
          for (int64_t part : {0, 1}) take(2 * (h * half + i) + part, 2 * h * half + part * half + i);
      return w;
    }
    const int64_t heads = t[4], kv = t[5], size = rows / (heads + 2 * kv), group = heads / kv + 2;
    int64_t to = 0;
    auto head = [&](int64_t from_head) {
      for (int64_t i = 0; i < size; ++i) take(to++, from_head * size + i);
    };
    for (int64_t g = 0; g < kv; ++g)
      for (int64_t q = 0; q < group - 2; ++q) head(g * group + q);
    for (int64_t part : {2, 1})
      for (int64_t g = 0; g < kv; ++g) head((g + 1) * group - part);
    return w;
  }

  const nlohmann::json& one_;
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, std::pair<std::vector<int64_t>, std::string>> bytes_;  // of U8
};

// Not split over ranks.
inline bool latent_attention(const nlohmann::json& network) { return network["configs"][0].contains("kv_lora_rank"); }

inline const nlohmann::json& stored_networks() {
  static const nlohmann::json networks = fixture("architectures.json");
  return networks;
}

// The greatest difference of a log-probability over the stored rows.
inline double worst(Drive& drive, const nlohmann::json& one) {
  SamplingParams params = Drive::greedy();
  params.logprobs = 256;
  const nlohmann::json& all = stored_networks();
  const auto rows = drive.step({{0, 0, all["tokens"].get<std::vector<int32_t>>(), true}}, params);
  double out = 0;
  for (size_t i = 0; i < all["rows"].size(); ++i) {
    const std::vector<double> want = one["logprobs"][i];
    const Sampled& row = rows[all["rows"][i].get<size_t>()];
    EXPECT_EQ(row.top.size(), want.size());
    for (const TokenLogprob& t : row.top) out = std::max(out, std::fabs(t.logprob - want[size_t(t.token)]));
  }
  return out;
}

}  // namespace kvasir::model
