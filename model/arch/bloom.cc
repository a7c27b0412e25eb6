// Bloom and MPT: ALiBi in place of rope, layer norms; Bloom with biases and a norm on the embedding, MPT without any.
#include <cmath>
#include <nlohmann/json.hpp>

#include "attention/rules.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kBloomNames[] = {
    {"token_embd", "transformer.word_embeddings"},
    {"token_embd_norm", "transformer.word_embeddings_layernorm"},
    {"output_norm", "transformer.ln_f"},
    {"blk.#.attn_norm", "transformer.h.#.input_layernorm"},
    {"blk.#.attn_qkv", "transformer.h.#.self_attention.query_key_value"},
    {"blk.#.attn_output", "transformer.h.#.self_attention.dense"},
    {"blk.#.ffn_norm", "transformer.h.#.post_attention_layernorm"},
    {"blk.#.ffn_up", "transformer.h.#.mlp.dense_h_to_4h"},
    {"blk.#.ffn_down", "transformer.h.#.mlp.dense_4h_to_h"},
};

void bloom(ModelConfig& c) {
  c.norm = NormKind::layer;
  c.norm_eps = 1e-5f;
  c.embedding_norm = true;
  c.gated = false;
  c.activation = Activation::gelu_tanh;
  c.qkv_bias = c.out_bias = c.mlp_bias = true;
  c.tied_head = true;
  c.alibi = true;
}

Status bloom_json(const JsonKeys&, ModelConfig& c) {
  c.qkv_by_group = true;
  return {};
}

constexpr TensorName kMptNames[] = {
    {"token_embd", "transformer.wte"},
    {"output_norm", "transformer.norm_f"},
    {"blk.#.attn_norm", "transformer.blocks.#.norm_1"},
    {"blk.#.attn_qkv", "transformer.blocks.#.attn.Wqkv"},
    {"blk.#.attn_output", "transformer.blocks.#.attn.out_proj"},
    {"blk.#.ffn_norm", "transformer.blocks.#.norm_2"},
    {"blk.#.ffn_up", "transformer.blocks.#.ffn.up_proj"},
    {"blk.#.ffn_down", "transformer.blocks.#.ffn.down_proj"},
};

void mpt(ModelConfig& c) {
  c.norm = NormKind::layer;
  c.norm_eps = 1e-5f;
  c.norm_bias = false;
  c.gated = false;
  c.activation = Activation::gelu;
  c.tied_head = true;
  c.alibi = true;
}

// The greatest of its exponents is 8 as a rule.
void scale_slopes(ModelConfig& c, double most) {
  if (most == 8 || c.heads < 1 || c.heads > 1024) return;
  c.alibi_slopes = attention::default_alibi_slopes(c.heads);
  for (float& s : c.alibi_slopes) s = float(std::pow(double(s), most / 8));
}

Status mpt_json(const JsonKeys& in, ModelConfig& c) {
  double ratio = 4, most = 8;
  KVASIR_TRY(in.get({"expansion_ratio"}, &ratio));
  c.ffn = int32_t(std::clamp(ratio, 0.0, 64.0) * c.hidden);
  KVASIR_TRY(in.only("no_bias", "true"));
  in.pass_over({"norm_type", "embedding_fraction", "init_device"});
  const nlohmann::json* attention = in.find("attn_config");
  if (!attention) return {};
  if (!attention->is_object()) return in.wrong("attn_config", "an object");
  const JsonKeys keys(*attention, in.file());
  KVASIR_TRY(keys.only("alibi", "true"));
  KVASIR_TRY(keys.only("attn_type", "\"multihead_attention\""));
  KVASIR_TRY(keys.only("qk_ln", "false"));
  KVASIR_TRY(keys.only("prefix_lm", "false"));
  KVASIR_TRY(keys.only("attn_uses_sequence_id", "false"));
  KVASIR_TRY(keys.get({"alibi_bias_max"}, &most));
  KVASIR_TRY(keys.get({"softmax_scale"}, &c.query_scale));
  keys.pass_over({"attn_impl", "attn_pdrop"});
  scale_slopes(c, most);
  return keys.judge_unread("mpt");
}

Status mpt_metadata(const GgufKeys& in, ModelConfig& c) {
  double most = 0;
  KVASIR_TRY(in.get("attention.max_alibi_bias", &most));
  if (most <= 0)
    return invalid_argument(
        cat(in.file().name(), ": an mpt model without ALiBi has learned positions, which are not supported"));
  scale_slopes(c, most);
  return {};
}

void no_rope(ModelConfig& c) { c.layer_kinds.assign(size_t(std::clamp(c.layers, 0, 1024)), {.rotated = false}); }

}  // namespace

extern const Architecture kBloom{.name = "bloom",
                                 .models = "BLOOM, BLOOMZ",
                                 .names = kBloomNames,
                                 .family = bloom,
                                 .json = bloom_json,
                                 .derive = no_rope};
extern const Architecture kMpt{.name = "mpt",
                               .models = "MPT",
                               .names = kMptNames,
                               .family = mpt,
                               .json = mpt_json,
                               .metadata = mpt_metadata,
                               .derive = no_rope};

}  // namespace kvasir::model
