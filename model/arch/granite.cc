// Granite: Llama with four multipliers.
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

Status json(const JsonKeys& in, ModelConfig& c) {
  float logits = 1;
  c.query_scale = 1;
  KVASIR_TRY(in.get({"embedding_multiplier"}, &c.embedding_scale));
  KVASIR_TRY(in.get({"residual_multiplier"}, &c.residual_scale));
  KVASIR_TRY(in.get({"attention_multiplier"}, &c.query_scale));
  KVASIR_TRY(in.get({"logits_scaling"}, &logits));
  c.logit_scale = 1 / logits;
  return {};
}

Status metadata(const GgufKeys& in, ModelConfig& c) {
  float logits = 1;
  bool rotated = true;
  KVASIR_TRY(in.get("embedding_scale", &c.embedding_scale));
  KVASIR_TRY(in.get("residual_scale", &c.residual_scale));
  KVASIR_TRY(in.get("attention.scale", &c.query_scale));
  KVASIR_TRY(in.get("logit_scale", &logits));
  c.logit_scale = 1 / logits;
  KVASIR_TRY(in.get("rope.scaling.finetuned", &rotated));  // its converter's way to say that there is no rope
  if (!rotated && c.layers <= 1024) c.layer_kinds.assign(size_t(c.layers), {.rotated = false});
  return {};
}

}  // namespace

extern const Architecture kGranite{.name = "granite",
                                   .models = "Granite 3, Granite 4 without Mamba layers",
                                   .gguf_turns_neighbours = true,
                                   .json = json,
                                   .metadata = metadata};

}  // namespace kvasir::model
