// Falcon: attention and MLP side by side, one key/value head or few, layer norms, no biases; the first (RW) have ALiBi.
#include <cmath>

#include "attention/rules.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"token_embd", "transformer.word_embeddings"},
    {"output_norm", "transformer.ln_f"},
    {"blk.#.attn_norm", "transformer.h.#.ln_attn", "blk.#.attn_norm_2"},
    {"blk.#.attn_norm", "transformer.h.#.input_layernorm", "blk.#.attn_norm"},
    {"blk.#.attn_qkv", "transformer.h.#.self_attention.query_key_value"},
    {"blk.#.attn_output", "transformer.h.#.self_attention.dense"},
    {"blk.#.ffn_norm", "transformer.h.#.ln_mlp", "blk.#.attn_norm"},
    {"blk.#.ffn_norm", "transformer.h.#.post_attention_layernorm"},
    {"blk.#.ffn_up", "transformer.h.#.mlp.dense_h_to_4h"},
    {"blk.#.ffn_down", "transformer.h.#.mlp.dense_4h_to_h"},
};

void family(ModelConfig& c) {
  c.norm = NormKind::layer;
  c.norm_eps = 1e-5f;
  c.parallel = c.shared_norm = true;
  c.gated = false;
  c.activation = Activation::gelu;
  c.tied_head = true;
}

Status json(const JsonKeys& in, ModelConfig& c) {
  bool grouped = false, one_head = true, bias = false;
  c.qkv_by_group = true;
  KVASIR_TRY(in.get("new_decoder_architecture", &grouped));
  KVASIR_TRY(in.get("multi_query", &one_head));
  KVASIR_TRY(in.get("parallel_attn", &c.parallel));
  KVASIR_TRY(in.get("alibi", &c.alibi));
  KVASIR_TRY(in.get("bias", &bias));
  c.qkv_bias = c.out_bias = c.mlp_bias = bias;
  c.kv_heads = c.heads;
  KVASIR_TRY(in.get({"num_kv_heads", "n_head_kv"}, &c.kv_heads));
  if (!grouped) c.kv_heads = one_head ? 1 : c.heads;
  int32_t norms = 2;
  KVASIR_TRY(in.get({"num_ln_in_parallel_attn"}, &norms));
  if (grouped) c.parallel = true;
  c.shared_norm = grouped ? norms == 1 : c.parallel;
  return {};
}

Status metadata(const GgufKeys& in, ModelConfig& c) {
  c.shared_norm = in.file().tensor("blk.0.attn_norm_2.weight") == nullptr;
  return {};
}

// Its biases are added before scores are scaled.
void derive(ModelConfig& c) {
  if (!c.alibi || c.heads < 1 || c.heads > 1024) return;
  c.alibi_slopes = attention::default_alibi_slopes(c.heads);
  for (float& s : c.alibi_slopes) s /= std::sqrt(float(c.head_dim));
  c.layer_kinds.assign(size_t(std::clamp(c.layers, 0, 1024)), {.rotated = false});
}

}  // namespace

extern const Architecture kFalcon{.name = "falcon",
                                  .models = "Falcon 7B, 40B, RW",
                                  .names = kNames,
                                  .family = family,
                                  .json = json,
                                  .metadata = metadata,
                                  .derive = derive};

}  // namespace kvasir::model
