// ppl.llm's params.json, under Hugging Face's names. Its cache keys are not the model's: they were baked into the graph
// it stood beside, and here kv_dtype says what the cache is made of.
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "core/log.h"
#include "model/config.h"

namespace kvasir::model {

Result<ModelConfig> config_from_params(std::string_view text, const std::string& name) {
  using nlohmann::json;
  json in = json::parse(text, nullptr, false);
  if (!in.is_object()) return invalid_argument(cat(name, " is not a JSON object"));
  json out = {{"model_type", "llama"}};
  constexpr std::pair<const char*, const char*> kNames[] = {{"hidden_dim", "hidden_size"},
                                                            {"intermediate_dim", "intermediate_size"},
                                                            {"num_layers", "num_hidden_layers"},
                                                            {"num_heads", "num_attention_heads"},
                                                            {"vocab_size", "vocab_size"},
                                                            {"num_kv_heads", "num_key_value_heads"},
                                                            {"norm_eps", "rms_norm_eps"},
                                                            {"rope_theta", "rope_theta"},
                                                            {"max_position", "max_position_embeddings"}};
  for (const auto& [theirs, ours] : kNames)
    if (in.contains(theirs)) out[ours] = in[theirs];
  for (const char* key : {"hidden_dim", "intermediate_dim", "num_layers", "num_heads", "vocab_size"})
    if (!in.contains(key)) return invalid_argument(cat(name, ": ", key, " is missing"));
  if (auto bits = in.find("cache_quant_bit"); bits != in.end() && *bits != json(0))
    log_warn("cache_quant_bit means nothing here: kv_dtype says what the cache is made of", {{"file", name}});
  return config_from_json(out.dump(), name);
}

}  // namespace kvasir::model
