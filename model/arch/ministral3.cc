// Ministral 3: Mistral with YaRN, and queries that grow with their position.
#include <nlohmann/json.hpp>

#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

void family(ModelConfig& c) { c.norm_eps = 1e-5f; }

Status grow(ModelConfig& c, float slope) {
  c.query_position_slope = slope;
  c.query_position_unit = int32_t(std::clamp<int64_t>(c.rope.original_context, 1, 1 << 24));
  return {};
}

Status json(const JsonKeys& in, ModelConfig& c) {
  const nlohmann::json* rope = in.find("rope_parameters");
  if (!rope) return {};
  float slope = 0;
  KVASIR_TRY(JsonKeys(*rope, in.file()).get({"llama_4_scaling_beta"}, &slope));
  return grow(c, slope);
}

Status metadata(const GgufKeys& in, ModelConfig& c) {
  float slope = 0;
  KVASIR_TRY(in.get("attention.temperature_scale", &slope));
  KVASIR_TRY(in.get("rope.scaling.yarn_log_multiplier", &c.rope.mscale_all_dim));
  c.rope.mscale = c.rope.mscale_all_dim;
  return grow(c, slope);
}

}  // namespace

extern const Architecture kMinistral3{.name = "ministral3",
                                      .models = "Ministral 3",
                                      .gguf = "mistral3",
                                      .gguf_turns_neighbours = true,
                                      .json_defaults = R"({"head_dim": 128, "num_key_value_heads": 8})",
                                      .family = family,
                                      .json = json,
                                      .metadata = metadata};

}  // namespace kvasir::model
