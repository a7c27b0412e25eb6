// The params.json of a folder as Mistral publishes it, under Hugging Face's names. What only other programs read is
// passed over; what changes numbers and is not served is refused by its name.
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "core/log.h"
#include "model/config.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

constexpr std::pair<const char*, const char*> kNames[] = {{"dim", "hidden_size"},
                                                          {"n_layers", "num_hidden_layers"},
                                                          {"n_heads", "num_attention_heads"},
                                                          {"n_kv_heads", "num_key_value_heads"},
                                                          {"hidden_dim", "intermediate_size"},
                                                          {"norm_eps", "rms_norm_eps"},
                                                          {"tied_embeddings", "tie_word_embeddings"},
                                                          {"activation", "hidden_act"},
                                                          {"max_seq_len", "max_position_embeddings"}};
// How the makers' own program runs and trains it.
constexpr const char* kHarmless[] = {"model_type", "dtype",          "torch_dtype",
                                     "use_cache",  "model_parallel", "max_batch_size"};
// Files that do not say how long a text may be: what others who serve such folders take.
constexpr int kContext = 128'000;
constexpr int kMaxDepth = 16;

Status wrong(const std::string& name, std::string_view key, std::string_view want) {
  return invalid_argument(cat(name, ": ", key, " must be ", want));
}

// Takes a key out of an object; null where there is none.
json take(json& in, const char* key) {
  const auto found = in.find(key);
  if (found == in.end()) return nullptr;
  json out = std::move(*found);
  in.erase(found);
  return out;
}

// Nothing may be left of an object that says how to compute.
Status all_read(const json& in, const std::string& name, const char* key) {
  if (in.empty()) return {};
  return invalid_argument(cat(name, ": ", key, " has the key ", in.begin().key().substr(0, 64),
                              ", which is not known; serve the model's folder of config.json instead"));
}

// One size for all layers, or a list that is repeated: null where a layer sees all.
Status read_windows(json& in, const std::string& name, json& out) {
  const json window = take(in, "sliding_window");
  if (!window.is_array()) {
    out["sliding_window"] = window;
    return {};
  }
  const json layers = out.value("num_hidden_layers", json());
  if (!layers.is_number_unsigned() || layers > 1024 || window.empty() || layers.get<size_t>() % window.size() != 0)
    return wrong(name, "sliding_window", "a number, or a list that fits into n_layers");
  json kinds = json::array(), size;
  for (size_t i = 0; i < layers.get<size_t>(); ++i) {
    const json& one = window[i % window.size()];
    kinds.push_back(one.is_null() ? "full_attention" : "sliding_attention");
    if (one.is_null()) continue;
    if (!size.is_null() && size != one) return wrong(name, "sliding_window", "of one size in all layers that have one");
    size = one;
  }
  out["sliding_window"] = size, out["layer_types"] = kinds;
  return {};
}

Status read_rope(json& in, const std::string& name, json& out) {
  json theta = take(in, "rope_theta"), yarn = take(in, "yarn"), growth = take(in, "llama_4_scaling");
  // Where it is not said: what their program takes.
  if (theta.is_null()) theta = out["sliding_window"].is_null() ? 1e6 : 1e4;
  out["rope_theta"] = theta;
  if (yarn.is_null() && growth.is_null()) return {};
  constexpr const char* kOriginal = "original_max_position_embeddings";
  json rope = {{"rope_type", "default"}, {"rope_theta", theta}};
  if (!yarn.is_null()) {
    if (!yarn.is_object()) return wrong(name, "yarn", "an object");
    rope["rope_type"] = "yarn";
    for (const auto& [theirs, ours] :
         {std::pair{"factor", "factor"}, {kOriginal, kOriginal}, {"beta", "beta_fast"}, {"alpha", "beta_slow"}})
      if (json value = take(yarn, theirs); !value.is_null()) rope[ours] = value;
    if (take(yarn, "apply_scale") == false) rope["attention_factor"] = 1.0;
    KVASIR_TRY(all_read(yarn, name, "yarn"));
  }
  if (!growth.is_null()) {
    if (!growth.is_object()) return wrong(name, "llama_4_scaling", "an object");
    const json of = take(growth, kOriginal);
    if (of.is_null() || (rope.contains(kOriginal) && rope[kOriginal] != of))
      return wrong(name, "llama_4_scaling.original_max_position_embeddings",
                   "a number, and yarn's where both are there");
    rope[kOriginal] = of, rope["llama_4_scaling_beta"] = take(growth, "beta");
    KVASIR_TRY(all_read(growth, name, "llama_4_scaling"));
    out["model_type"] = "ministral3";
  }
  out["rope_parameters"] = rope;
  return {};
}

Status read_experts(json& in, const std::string& name, json& out) {
  json moe = take(in, "moe");
  if (moe.is_null()) return {};
  if (!moe.is_object()) return wrong(name, "moe", "an object");
  if (out["model_type"] != "mistral")
    return invalid_argument(cat(name, ": moe beside llama_4_scaling is not supported"));
  out["model_type"] = "mixtral";
  out["num_local_experts"] = take(moe, "num_experts"), out["num_experts_per_tok"] = take(moe, "num_experts_per_tok");
  take(moe, "expert_parallel"), take(moe, "expert_model_parallel");
  return all_read(moe, name, "moe");
}

Status read_quantization(json& in, const std::string& name, json& out) {
  json own = take(in, "quantization");
  if (own.is_null()) return {};
  if (!own.is_object()) return wrong(name, "quantization", "an object");
  if (own.contains("quant_method")) {
    out["quantization_config"] = own;
    return {};
  }
  const json format = take(own, "qformat_weight");
  if (format != "fp8_e4m3")
    return invalid_argument(cat(name, ": quantization has qformat_weight ",
                                format.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 64),
                                "; fp8_e4m3 is supported: take another checkpoint of the model"));
  take(own, "qscheme_act");  // of what is multiplied with weights, which has scales of its own here, by token
  KVASIR_TRY(all_read(own, name, "quantization"));
  out["quantization_config"] = {{"quant_method", "fp8"}};
  return {};
}

}  // namespace

Result<ModelConfig> config_from_mistral(std::string_view text, const std::string& name) {
  bool deep = false;
  json in = json::parse(
      text, [&](int depth, json::parse_event_t, json&) { return !(deep |= depth > kMaxDepth); }, false);
  if (!in.is_object() || deep) return invalid_argument(cat(name, " is not a JSON object we can read"));
  json out = {{"model_type", "mistral"}, {"rms_norm_eps", 1e-5}};
  for (const auto& [theirs, ours] : kNames)
    if (json value = take(in, theirs); !value.is_null()) out[ours] = value;
  for (const char* key : kHarmless) take(in, key);
  if (take(in, "causal") == false)
    return invalid_argument(cat(name, ": causal is false; only causal models are served"));
  bool sees = false;
  for (const char* key : {"vision_encoder", "multimodal", "audio_encoder"}) sees |= !take(in, key).is_null();
  if (sees) log_info("only the text of this model is served", {{"file", name}});
  KVASIR_TRY(read_windows(in, name, out));
  KVASIR_TRY(read_rope(in, name, out));
  KVASIR_TRY(read_experts(in, name, out));
  KVASIR_TRY(read_quantization(in, name, out));
  // Those that it shares with config.json, and those that nobody knows: judged there.
  if (in.contains("text_config")) return invalid_argument(cat(name, ": text_config is a key of config.json alone"));
  out.update(in);
  if (!out.contains("max_position_embeddings")) {
    out["max_position_embeddings"] = kContext;
    log_info("params.json does not say how long a text may be", {{"file", name}, {"taken", kContext}});
  }
  KVASIR_ASSIGN(ModelConfig c, config_from_json(out.dump(-1, ' ', false, json::error_handler_t::replace), name));
  c.from_mistral = true;
  c.rope.style = c.local_rope.style = attention::RopeStyle::gptj;
  return c;
}

}  // namespace kvasir::model
