// ppl.llm's params.json, under Hugging Face's names. Keys that say how its graph was exported are not the model's: each
// is passed over with a line that says why. What this program cannot do is refused, and so is a key nobody knows.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "core/log.h"
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
constexpr std::pair<const char*, const char*> kForeign[] = {
    {"cache_quant_bit", "kv_dtype says what the cache is made of"},
    {"cache_quant_group", "kv_dtype says what the cache is made of"},
    {"cache_layout", "the cache is laid out by this program"},
    {"cache_mode", "kv_index says how the cache is indexed"},
    {"page_size", "page_size of the configuration says it"},
    {"dynamic_batching", "requests are always batched as they come"}};

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
    auto foreign = std::find_if(std::begin(kForeign), std::end(kForeign), is_it);
    if (foreign != std::end(kForeign))
      log_warn("a key of params.json means nothing here", {{"key", key}, {"why", foreign->second}, {"file", name}});
    else if (key != "num_experts" && key != "num_experts_per_token" && key != "auto_causal" &&
             key != "rope_scaling_type" && key != "rope_scaling_factor")
      return invalid_argument(cat(name, ": the key ", key.substr(0, 64), " is not known; if it says nothing about the ",
                                  "model's shape, remove it"));
  }
  try {
    KVASIR_TRY(check_what_is_asked(in, name));
    KVASIR_TRY(read_scaling(in, name, out));
  } catch (const json::exception&) {
    return invalid_argument(cat(name, ": num_experts and rope_scaling_factor must be numbers, auto_causal true or ",
                                "false, rope_scaling_type a text"));
  }
  return config_from_json(out.dump(-1, ' ', false, json::error_handler_t::replace), name);
}

}  // namespace kvasir::model
