// The seeded networks of make_outside.py as GGUF files, whole or split.
#pragma once

#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "model/formats/weight_type.h"
#include "tests/model/small_network.h"

namespace kvasir::model {

// The type numbers of a file are WeightType's own.
inline WeightType weight_type(const std::string& name) {
  for (uint32_t i = 0; i < 64; ++i)
    if (const TypeInfo* info = type_info(WeightType(i)); info && info->name == name) return WeightType(i);
  ADD_FAILURE() << name;
  return WeightType::f32;
}

inline std::string tensor_bytes(const nlohmann::json& tensor, const nlohmann::json& scales) {
  std::string name = tensor[0], kind = tensor[1];
  int64_t cols = tensor[2], rows = tensor[3];
  if (tensor.size() > 4) {  // float32 of what that type has
    const std::string from = tensor_bytes({name, tensor[4], cols, rows}, scales);
    std::vector<float> w(size_t(rows * cols));
    dequantize(weight_type(tensor[4]), reinterpret_cast<const uint8_t*>(from.data()), rows * cols, w.data());
    return {reinterpret_cast<const char*>(w.data()), w.size() * 4};
  }
  if (kind == "F32") {
    std::vector<float> w = formula(name, rows * cols, rows == 1 ? 0.5 : 0.25);
    if (rows == 1)
      for (float& f : w) f = float(double(f) + 1);
    return {reinterpret_cast<const char*>(w.data()), w.size() * 4};
  }
  const TypeInfo& info = *type_info(weight_type(kind));
  std::string out(size_t(rows * cols / info.block * info.bytes), 0);
  // formula() scaled to the 16 bits it is made of.
  std::vector<float> noise = formula(name, int64_t(out.size()), 65536);
  for (size_t i = 0; i < out.size(); ++i) out[i] = char((int(noise[i]) + 32768) & 255);
  for (size_t at = 0; at < out.size(); at += size_t(info.bytes))
    for (auto& s : scales[kind]) {
      uint16_t half = s[1];
      std::memcpy(out.data() + at + s[0].get<size_t>(), &half, 2);
    }
  return out;
}

class GgufText {
 public:
  template <class T>
  GgufText& put(T v) {
    text.append(reinterpret_cast<const char*>(&v), sizeof v);
    return *this;
  }
  GgufText& name(const std::string& s) {
    put(uint64_t(s.size()));
    text += s;
    return *this;
  }
  GgufText& pad() {
    text.resize((text.size() + 31) / 32 * 32);
    return *this;
  }
  std::string text;
};

// Part `part` of `parts`: every parts-th tensor. The keys are the first part's.
inline std::string gguf_text(const nlohmann::json& one, const nlohmann::json& scales, int part = 0, int parts = 1) {
  std::vector<nlohmann::json> mine;
  for (size_t i = 0; i < one["tensors"].size(); ++i)
    if (int(i % size_t(parts)) == part) mine.push_back(one["tensors"][i]);
  std::string arch = one["arch"];
  GgufText out;
  out.put(uint32_t(0x46554747)).put(uint32_t(3)).put(uint64_t(mine.size()));
  auto number = [&](const std::string& key, uint32_t v) { out.name(key).put(uint32_t(4)).put(v); };
  out.put(uint64_t(part == 0 ? 1 + one["kv"].size() + 3 : 3));
  if (part == 0) {
    out.name("general.architecture").put(uint32_t(8)).name(arch);
    for (auto& kv : one["kv"]) {
      std::string key = arch + "." + kv[0].get<std::string>();
      if (kv[1].is_number_float())
        out.name(key).put(uint32_t(6)).put(kv[1].get<float>());
      else
        number(key, kv[1]);
    }
  }
  number("split.count", uint32_t(parts));
  number("split.no", uint32_t(part));
  number("split.tensors.count", uint32_t(one["tensors"].size()));
  std::string data;
  for (auto& t : mine) {
    bool vector = t[3] == 1;
    out.name(t[0]).put(uint32_t(vector ? 1 : 2)).put(t[2].get<uint64_t>());
    if (!vector) out.put(t[3].get<uint64_t>());
    out.put(uint32_t(weight_type(t[1]))).put(uint64_t(data.size()));
    data += tensor_bytes(t, scales);
    data.resize((data.size() + 31) / 32 * 32);
  }
  return out.pad().text + data;
}

}  // namespace kvasir::model
