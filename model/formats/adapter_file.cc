#include "model/formats/adapter_file.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "model/adapter.h"
#include "model/formats/gguf.h"
#include "model/formats/safetensors.h"

namespace kvasir::model {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
constexpr int64_t kMostConfig = 1 << 20;

Result<std::vector<uint8_t>> read_bytes(const fs::path& path, int64_t most) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return not_found(cat(path.string(), " is not there, or is no file"));
  const auto size = int64_t(fs::file_size(path, error));
  if (error) return not_found(cat(path.string(), " cannot be read: ", error.message()));
  if (size > most)
    return resource_exhausted(
        cat(path.string(), " has ", size, " bytes; there is room for an adapter of ", most, " (lora_memory)"));
  std::vector<uint8_t> out(static_cast<size_t>(size));
  std::ifstream in(path, std::ios::binary);
  in.read(reinterpret_cast<char*>(out.data()), size);
  if (in.gcount() != size) return invalid_argument(cat(path.string(), " cannot be read to its end"));
  return out;
}

// ---- adapter_config.json

struct PeftConfig {
  double r = 0, alpha = 0;
  bool rslora = false, dora = false;
  std::map<std::string, double> rank_pattern, alpha_pattern;
};

bool says_something(const json& v) {
  return !(v.is_null() || (v.is_boolean() && !v.get<bool>()) || (v.is_array() && v.empty()) ||
           (v.is_object() && v.empty()) || (v.is_string() && v.get_ref<const std::string&>().empty()));
}

class PeftReader {
 public:
  explicit PeftReader(std::string where) : where_(std::move(where)) {}

  Result<PeftConfig> read(std::string_view text) {
    bool deep = false;
    json_ = json::parse(
        text, [&](int depth, json::parse_event_t, json&) { return !(deep |= depth > 8); }, false);
    if (json_.is_discarded() || !json_.is_object() || deep) return bad("is not a JSON object we can read");
    if (const json type = json_.value("peft_type", json("LORA")); type != "LORA")
      return bad(cat("peft_type is ", type.dump().substr(0, 64), "; LORA is served"));
    KVASIR_TRY(refuse_what_is_not_served());
    PeftConfig c;
    KVASIR_TRY(number("r", &c.r));
    KVASIR_TRY(number("lora_alpha", &c.alpha));
    KVASIR_TRY(flag("use_rslora", &c.rslora));
    KVASIR_TRY(flag("use_dora", &c.dora));
    KVASIR_TRY(pattern("rank_pattern", &c.rank_pattern));
    KVASIR_TRY(pattern("alpha_pattern", &c.alpha_pattern));
    return c;
  }

 private:
  Status bad(const std::string& what) const { return invalid_argument(cat(where_, ": ", what)); }

  Status refuse_what_is_not_served() const {
    for (const char* key : {"modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters",
                            "alora_invocation_tokens", "use_qalora", "lora_bias"})
      if (json_.contains(key) && says_something(json_[key]))
        return bad(cat(key, " is ", json_[key].dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 128),
                       ", which is not served; adapters of the layers' projections alone are"));
    if (const json bias = json_.value("bias", json("none")); bias != "none")
      return bad(cat("bias is ", bias.dump().substr(0, 64), "; none is served"));
    // These take from the base's weights what they give the adapter.
    const json init = json_.value("init_lora_weights", json(true));
    for (const char* other : {"pissa", "olora", "corda", "loftq"})
      if (init.is_string() && init.get_ref<const std::string&>().starts_with(other))
        return bad(cat("init_lora_weights is ", init.dump().substr(0, 64),
                       ", which changes the base model; save the adapter converted to plain LoRA "
                       "(path_initial_model_for_weight_conversion)"));
    return {};
  }
  Status number(const char* key, double* out) const {
    if (!json_.contains(key) || !json_[key].is_number() || !std::isfinite(json_[key].get<double>()))
      return bad(cat(key, " is missing or no number"));
    *out = json_[key];
    return {};
  }
  Status flag(const char* key, bool* out) const {
    if (!json_.contains(key) || json_[key].is_null()) return {};
    if (!json_[key].is_boolean()) return bad(cat(key, " is neither true nor false"));
    *out = json_[key];
    return {};
  }
  // Of expressions only those that are a module's name or its end.
  Status pattern(const char* key, std::map<std::string, double>* out) const {
    if (!json_.contains(key) || json_[key].is_null()) return {};
    if (!json_[key].is_object()) return bad(cat(key, " is no object"));
    for (auto& [name, value] : json_[key].items()) {
      std::string plain;
      for (size_t i = 0; i < name.size(); ++i) {
        if (name[i] == '\\' && i + 1 < name.size() && name[i + 1] == '.') continue;
        if (name[i] == '$' && i + 1 == name.size()) continue;
        const bool known = std::isalnum(uint8_t(name[i])) || name[i] == '_' || name[i] == '.' || name[i] == '-' ||
                           (name[i] == '^' && i == 0);
        if (!known)
          return bad(cat(key, " has '", name.substr(0, 64),
                         "'; names of modules or their ends are read, no other "
                         "expressions"));
        plain += name[i];
      }
      if (!value.is_number() || !std::isfinite(value.get<double>()))
        return bad(cat(key, ".", name.substr(0, 64), " is no number"));
      (*out)[plain] = value;
    }
    return {};
  }

  std::string where_;
  json json_;
};

double by_pattern(const std::map<std::string, double>& pattern, std::string_view module, double otherwise) {
  for (const auto& [name, value] : pattern) {
    const bool whole = name.starts_with('^');
    const std::string_view end = std::string_view(name).substr(whole);
    if (module == end || (!whole && module.size() > end.size() && module.ends_with(end) &&
                          module[module.size() - end.size() - 1] == '.'))
      return value;
  }
  return otherwise;
}

// ---- what both kinds hold

Status check_values(const std::string& where, const HostTensor& t) {
  std::vector<float> row(static_cast<size_t>(t.cols));
  for (int64_t r = 0; r < t.rows; ++r) {
    dequantize(t.type, t.data + r * t.row_bytes(), t.cols, row.data());
    for (float f : row)
      if (!std::isfinite(f))
        return invalid_argument(
            cat(where, ": tensor ", t.name, " has a value that is no number (NaN or Inf) in row ", r));
  }
  return {};
}

bool plain_type(WeightType type) {
  return type == WeightType::f32 || type == WeightType::f16 || type == WeightType::bf16;
}

Status check_module(const std::string& where, const AdapterModule& m) {
  const std::string what = cat(where, ": module ", m.name);
  if (m.a.data == nullptr || m.b.data == nullptr)
    return invalid_argument(cat(what, " has only one of its two tensors (A and B)"));
  if (m.a.rows > kMostAdapterRank)
    return invalid_argument(cat(what, " has rank ", m.a.rows, "; it must be from 1 to ", kMostAdapterRank));
  if (m.b.cols != m.a.rows)
    return invalid_argument(cat(what, ": A has rank ", m.a.rows, " and B has rank ", m.b.cols, "; they must be equal"));
  if (!m.magnitude.empty() && int64_t(m.magnitude.size()) != m.b.rows)
    return invalid_argument(cat(what, " has ", m.magnitude.size(), " magnitudes for ", m.b.rows, " outputs"));
  if (!std::isfinite(m.scale)) return invalid_argument(cat(what, ": its scale (alpha over rank) is no number"));
  KVASIR_TRY(check_values(where, m.a));
  return check_values(where, m.b);
}

Status check_modules(const AdapterFile& file) {
  if (file.modules.empty()) return invalid_argument(cat(file.path, " holds no module of an adapter"));
  for (const AdapterModule& m : file.modules) KVASIR_TRY(check_module(file.path, m));
  return {};
}

AdapterModule& module_of(AdapterFile& file, std::map<std::string, size_t>& places, const std::string& name) {
  const auto [it, fresh] = places.emplace(name, file.modules.size());
  if (fresh) file.modules.emplace_back().name = name;
  return file.modules[it->second];
}

bool take_end(std::string& name, std::string_view end) {
  if (!name.ends_with(end)) return false;
  name.resize(name.size() - end.size());
  return true;
}

}  // namespace

Result<AdapterFile> peft_adapter(const std::string& path, std::string_view config, std::vector<uint8_t> safetensors) {
  const std::string config_path = (fs::path(path) / "adapter_config.json").string();
  KVASIR_ASSIGN(const PeftConfig peft, PeftReader(config_path).read(config));
  AdapterFile out;
  out.path = (fs::path(path) / "adapter_model.safetensors").string();
  out.bytes = std::make_shared<const std::vector<uint8_t>>(std::move(safetensors));
  SafeTensors tensors;
  KVASIR_TRY(parse_safetensors(out.path, *out.bytes, 0, &tensors));
  const std::map<std::string, SafeTensor> sorted(tensors.begin(), tensors.end());
  std::map<std::string, size_t> places;
  for (const auto& [key, t] : sorted) {
    auto bad = [&, &key = key](const std::string& what) {
      return invalid_argument(cat(out.path, ": tensor ", key, what));
    };
    std::string name = key;
    if (name.starts_with("base_model.model.")) name.erase(0, 17);
    const bool a = take_end(name, ".lora_A.weight"), b = !a && take_end(name, ".lora_B.weight");
    const bool magnitude =
        !a && !b && (take_end(name, ".lora_magnitude_vector") || take_end(name, ".lora_magnitude_vector.weight"));
    if (!a && !b && !magnitude)
      return bad(
          " is not served: adapters of the layers' projections (lora_A, lora_B, lora_magnitude_vector) are, "
          "those of embeddings, biases and whole modules are not");
    if (!plain_type(t.type)) return bad(" is not of F32, F16 or BF16");
    AdapterModule& m = module_of(out, places, name);
    if (magnitude) {
      const int64_t count = t.bytes / type_info(t.type)->bytes;
      if (t.shape.empty() || *std::max_element(t.shape.begin(), t.shape.end()) != count) return bad(" is no vector");
      m.magnitude.resize(size_t(count));
      dequantize(t.type, t.data, count, m.magnitude.data());
      for (float f : m.magnitude)
        if (!std::isfinite(f)) return bad(" has a value that is no number (NaN or Inf)");
      continue;
    }
    if (t.shape.size() != 2) return bad(cat(" has ", t.shape.size(), " dimensions; two are needed"));
    (a ? m.a : m.b) = HostTensor{key, t.type, t.shape[0], t.shape[1], t.data, t.bytes};
  }
  for (AdapterModule& m : out.modules) {
    const double r = by_pattern(peft.rank_pattern, m.name, peft.r);
    if (!(r >= 1 && r <= double(kMostAdapterRank)))
      return invalid_argument(
          cat(config_path, ": the rank of ", m.name, " is ", r, "; it must be from 1 to ", kMostAdapterRank));
    if (m.a.data && double(m.a.rows) != r)
      return invalid_argument(
          cat(out.path, ": module ", m.name, " has rank ", m.a.rows, " where ", config_path, " says ", r));
    if (m.magnitude.empty() == peft.dora)
      return invalid_argument(cat(out.path, ": module ", m.name, peft.dora ? " has no" : " has a",
                                  " lora_magnitude_vector, and use_dora is ", peft.dora ? "true" : "false"));
    m.scale = float(by_pattern(peft.alpha_pattern, m.name, peft.alpha) / (peft.rslora ? std::sqrt(r) : r));
  }
  KVASIR_TRY(check_modules(out));
  return out;
}

Result<AdapterFile> gguf_adapter(const std::string& path, std::vector<uint8_t> bytes) {
  AdapterFile out{.path = path, .gguf = true};
  out.bytes = std::make_shared<const std::vector<uint8_t>>(std::move(bytes));
  KVASIR_ASSIGN(const auto gguf, Gguf::parse(path, *out.bytes));
  auto bad = [&](const std::string& what) { return invalid_argument(cat(path, ": ", what)); };
  if (gguf->string("general.type").value_or("") != "adapter" || gguf->string("adapter.type").value_or("") != "lora")
    return bad("it is no adapter: general.type must be adapter, and adapter.type lora");
  if (gguf->value("adapter.alora.invocation_tokens")) return bad("adapter.alora.invocation_tokens is not served");
  out.architecture = gguf->string("general.architecture").value_or("");
  const auto alpha = gguf->number("adapter.lora.alpha");
  if (!alpha || !std::isfinite(*alpha)) return bad("adapter.lora.alpha is missing or no number");
  std::map<std::string, size_t> places;
  for (const GgufTensor& t : gguf->tensors()) {
    std::string name(t.name);
    auto bad_tensor = [&](const char* what) { return bad(cat("tensor ", t.name, what)); };
    const bool a = take_end(name, ".weight.lora_a");
    if (!a && !take_end(name, ".weight.lora_b"))
      return bad_tensor(" is not served: .weight.lora_a and .weight.lora_b of the layers' projections are");
    if (t.dims[2] != 1 || t.dims[3] != 1) return bad_tensor(" has more than two dimensions (adapters of experts)");
    if (!plain_type(t.type) && t.type != WeightType::q8_0) return bad_tensor(" is not of F32, F16, BF16 or Q8_0");
    AdapterModule& m = module_of(out, places, name);
    (a ? m.a : m.b) = HostTensor{std::string(t.name), t.type, t.dims[1], t.dims[0], t.data, t.bytes};
  }
  for (AdapterModule& m : out.modules)
    if (m.a.data && *alpha != 0) m.scale = float(*alpha / double(m.a.rows));
  KVASIR_TRY(check_modules(out));
  return out;
}

Result<AdapterFile> read_adapter(const std::string& path, int64_t most_bytes) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    if (!fs::exists(path, error))
      return not_found(cat("the adapter ", path, " does not exist; name PEFT's folder or a .gguf file"));
    KVASIR_ASSIGN(auto bytes, read_bytes(path, most_bytes));
    return gguf_adapter(path, std::move(bytes));
  }
  KVASIR_ASSIGN(const auto config, read_bytes(fs::path(path) / "adapter_config.json", kMostConfig));
  KVASIR_ASSIGN(auto weights, read_bytes(fs::path(path) / "adapter_model.safetensors", most_bytes));
  return peft_adapter(path, {reinterpret_cast<const char*>(config.data()), config.size()}, std::move(weights));
}

}  // namespace kvasir::model
