// Gemma 3: windowed layers with a full one every so often (each kind with its own rope), norms on the heads
// of q and k, norms after the sublayers too, a scaled embedding, tanh-GELU. Norm weights are w - 1 in Hugging Face's
// files.
#include <cmath>

#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"blk.#.post_attention_norm", "model.layers.#.post_attention_layernorm"},
    {"blk.#.ffn_norm", "model.layers.#.pre_feedforward_layernorm"},
    {"blk.#.post_ffw_norm", "model.layers.#.post_feedforward_layernorm"},
};

void gemma(ModelConfig& c) {
  c.activation = Activation::gelu_tanh;
  c.tied_head = true;
}

// Its first files name another activation than they are computed with.
Status gemma_json(const JsonKeys&, ModelConfig& c) {
  c.norm_shift = 1;
  c.activation = Activation::gelu_tanh;
  return {};
}

void scale_embedding(ModelConfig& c) { c.embedding_scale = std::sqrt(float(c.hidden)); }

void gemma2(ModelConfig& c) {
  gemma(c);
  c.output_norms = true;
}

Status gemma2_json(const JsonKeys& in, ModelConfig& c) {
  c.norm_shift = 1;
  double scalar = 0;
  KVASIR_TRY(in.get({"query_pre_attn_scalar"}, &scalar));
  if (scalar > 0) c.query_scale = float(1 / std::sqrt(scalar));
  KVASIR_TRY(in.get({"attn_logit_softcapping"}, &c.attention_softcap));
  return in.get({"final_logit_softcapping"}, &c.logit_softcap);
}

Status gemma2_metadata(const GgufKeys& in, ModelConfig& c) {
  c.attention_softcap = 50, c.logit_softcap = 30;
  if (!in.has("attention.sliding_window")) c.window = 4096;
  if (c.layers == 46) c.query_scale = float(1 / std::sqrt(double(c.hidden) / c.heads));  // the 27B alone
  KVASIR_TRY(in.get("attn_logit_softcapping", &c.attention_softcap));
  return in.get("final_logit_softcapping", &c.logit_softcap);
}

void gemma2_derive(ModelConfig& c) {
  scale_embedding(c);
  if (c.window > 0 && c.layer_kinds.empty()) c.set_window_pattern(2);
}

void gemma3(ModelConfig& c) {
  gemma2(c);
  c.qk_norm = QkNorm::head;
  c.rope.base = 1e6;
  c.local_rope.base = 10000;
}

constexpr std::string_view kGemmaDefaults = R"({"head_dim": 256, "max_position_embeddings": 8192})";
constexpr std::string_view kGemma2Defaults = R"({"head_dim": 256, "max_position_embeddings": 8192,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50,
    "final_logit_softcapping": 30})";
constexpr std::string_view kGemma3Defaults = R"({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 262208, "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "num_hidden_layers": 26})";

void gemma3_derive(ModelConfig& c) {
  scale_embedding(c);
  if (c.window > 0 && c.layer_kinds.empty()) c.set_window_pattern(6);
  c.local_rope.rotary_dim = c.rope.rotary_dim;
}

}  // namespace

extern const Architecture kGemma{.name = "gemma",
                                 .models = "Gemma",
                                 .json_defaults = kGemmaDefaults,
                                 .family = gemma,
                                 .json = gemma_json,
                                 .derive = scale_embedding};
extern const Architecture kGemma2{.name = "gemma2",
                                  .models = "Gemma 2",
                                  .names = kNames,
                                  .json_defaults = kGemma2Defaults,
                                  .family = gemma2,
                                  .json = gemma2_json,
                                  .metadata = gemma2_metadata,
                                  .derive = gemma2_derive};
extern const Architecture kGemma3{.name = "gemma3",
                                  .models = "Gemma 3",
                                  .hugging_face = "gemma3_text",
                                  .names = kNames,
                                  .json_defaults = kGemma3Defaults,
                                  .family = gemma3,
                                  .json = gemma2_json,
                                  .derive = gemma3_derive};

}  // namespace kvasir::model
