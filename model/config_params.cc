// ppl.llm's params.json, under Hugging Face's names. What it says of the cache is how this model is served, unless the
// operator says otherwise. What this program cannot do is refused, and so is a key nobody knows.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "kvcache/view.h"
#include "model/config.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

constexpr std::pair<const char*, const char*> kNames[] = {{"hidden_dim", "hidden_size"},
                                                          {"intermediate_dim", "intermediate_size"},
                                                          {"num_layers", "num_hidden_layers"},
                                                          {"num_heads", "num_attention_heads"},
                                                          {"vocab_size", "vocab_size"},
                                                          {"num_kv_heads", "num_key_value_heads"},
                                                          {"head_dim", "head_dim"},
                                                          {"norm_eps", "rms_norm_eps"},
                                                          {"rope_theta", "rope_theta"},
                                                          {"sliding_window", "sliding_window"},
                                                          {"max_position", "max_position_embeddings"},
                                                          {"max_position_embeddings", "max_position_embeddings"}};
constexpr const char* kNeeded[] = {"hidden_dim", "intermediate_dim", "num_layers", "num_heads", "vocab_size"};
constexpr const char* kRead[] = {"num_experts",       "num_experts_per_token", "auto_causal",
                                 "rope_scaling_type", "rope_scaling_factor",   "cache_quant_bit",
                                 "cache_quant_group", "cache_layout",          "cache_mode",
                                 "page_size",         "dynamic_batching"};

// One of these numbers; what it is when the key is absent.
Result<int64_t> one_of(const json& in, const std::string& name, const char* key, int64_t otherwise,
                       std::initializer_list<int64_t> choices) {
  if (!in.contains(key)) return otherwise;
  std::string all;
  for (int64_t c : choices) {
    if (in[key].is_number_integer() && in[key] == c) return c;
    all += cat(all.empty() ? "" : c == *(choices.end() - 1) ? " or " : ", ", c);
  }
  return invalid_argument(cat(name, ": ", key, " is ", in[key].dump().substr(0, 64), "; it must be ", all));
}

// The attributes of its operators.
Status read_cache(const json& in, const std::string& name, ModelConfig* c) {
  KVASIR_ASSIGN(const int64_t bits, one_of(in, name, "cache_quant_bit", 0, {0, 4, 8}));
  KVASIR_ASSIGN(const int64_t group, one_of(in, name, "cache_quant_group", 8, {1, 2, 4, 8, 16, 32, 64, 128}));
  KVASIR_ASSIGN(const int64_t layout, one_of(in, name, "cache_layout", -1, {0, 1, 2, 3}));
  KVASIR_ASSIGN(const int64_t mode, one_of(in, name, "cache_mode", -1, {0, 1}));
  if (in.contains("page_size")) {
    const json& size = in["page_size"];
    if (!size.is_number_integer() || size < 1 || size > kvcache::kMostPageTokens)
      return invalid_argument(
          cat(name, ": page_size is ", size.dump().substr(0, 64), "; it must be from 1 to ", kvcache::kMostPageTokens));
    c->page_size = size;
  }
  if (bits > 0) c->kv.dtype = bits == 8 ? "int8" : "int4", c->kv.group = int32_t(group);
  if (layout >= 0) c->kv.layout = cat(layout);
  if (mode >= 0) c->kv_index = mode == 0 ? "offset" : "page_table";
  return {};
}

Status read_scaling(const json& in, const std::string& name, json& out) {
  std::string type = in.value("rope_scaling_type", "");
  double factor = in.value("rope_scaling_factor", 1.0);
  if (type.empty() && factor == 1.0) return {};
  if (type != "linear")
    return invalid_argument(cat(name, ": rope_scaling_type is '", type,
                                "'; it must be linear, or empty with a factor of ", "1 (a config.json can say more)"));
  out["rope_scaling"] = {{"rope_type", type}, {"factor", factor}};
  return {};
}

Status check_what_is_asked(const json& in, const std::string& name) {
  if (in.value("num_experts", 1) != 1)
    return invalid_argument(cat(name, ": num_experts is ", in["num_experts"].dump(), "; experts are not supported"));
  if (!in.value("auto_causal", true))
    return invalid_argument(
        cat(name, ": auto_causal is false; a mask from outside is not supported, only a causal one"));
  if (!in.value("dynamic_batching", true))
    return invalid_argument(cat(name, ": dynamic_batching is false; requests are always batched as they come"));
  return {};
}

}  // namespace

Result<ModelConfig> config_from_params(std::string_view text, const std::string& name) {
  json in = json::parse(text, nullptr, false);
  if (!in.is_object()) return invalid_argument(cat(name, " is not a JSON object"));
  for (const char* key : kNeeded)
    if (!in.contains(key)) return invalid_argument(cat(name, ": ", key, " is missing"));
  json out = {{"model_type", "llama"}, {"rms_norm_eps", 1e-5}};
  for (const auto& [key, value] : in.items()) {
    auto is_it = [&key = key](const auto& entry) { return key == entry.first; };
    auto ours = std::find_if(std::begin(kNames), std::end(kNames), is_it);
    if (ours != std::end(kNames)) {
      if (value.is_structured()) return invalid_argument(cat(name, ": ", key, " must be a number"));
      out[ours->second] = value;
      continue;
    }
    if (std::find(std::begin(kRead), std::end(kRead), key) == std::end(kRead))
      return invalid_argument(cat(name, ": the key ", key.substr(0, 64), " is not known; if it says nothing about the ",
                                  "model's shape, remove it"));
  }
  try {
    KVASIR_TRY(check_what_is_asked(in, name));
    KVASIR_TRY(read_scaling(in, name, out));
  } catch (const json::exception&) {
    return invalid_argument(cat(name, ": num_experts and rope_scaling_factor must be numbers, auto_causal and ",
                                "dynamic_batching true or false, rope_scaling_type a text"));
  }
  KVASIR_ASSIGN(ModelConfig c, config_from_json(out.dump(-1, ' ', false, json::error_handler_t::replace), name));
  KVASIR_TRY(read_cache(in, name, &c));
  return c;
}

}  // namespace kvasir::model
