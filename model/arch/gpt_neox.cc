// GPT-NeoX (Pythia, RedPajama-INCITE): layer norms, biases, rope on a quarter of a head, and as a rule attention and
// MLP side by side. GPT-J: likewise, through one norm, with rope on neighbours.
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNeoxNames[] = {
    {"token_embd", "gpt_neox.embed_in"},
    {"output_norm", "gpt_neox.final_layer_norm"},
    {"output", "embed_out"},
    {"blk.#.attn_norm", "gpt_neox.layers.#.input_layernorm"},
    {"blk.#.attn_qkv", "gpt_neox.layers.#.attention.query_key_value"},
    {"blk.#.attn_output", "gpt_neox.layers.#.attention.dense"},
    {"blk.#.ffn_norm", "gpt_neox.layers.#.post_attention_layernorm"},
    {"blk.#.ffn_up", "gpt_neox.layers.#.mlp.dense_h_to_4h"},
    {"blk.#.ffn_down", "gpt_neox.layers.#.mlp.dense_4h_to_h"},
};

void neox(ModelConfig& c) {
  c.norm = NormKind::layer;
  c.norm_eps = 1e-5f;
  c.parallel = true;
  c.gated = false;
  c.activation = Activation::gelu;
  c.qkv_bias = c.out_bias = c.mlp_bias = true;
}

Status neox_json(const JsonKeys& in, ModelConfig& c) {
  c.qkv_by_group = true;
  return in.get("use_parallel_residual", &c.parallel);
}

Status neox_metadata(const GgufKeys& in, ModelConfig& c) { return in.get("use_parallel_residual", &c.parallel); }

constexpr TensorName kGptjNames[] = {
    {"token_embd", "transformer.wte"},
    {"output_norm", "transformer.ln_f"},
    {"blk.#.attn_norm", "transformer.h.#.ln_1"},
    {"blk.#.attn_q", "transformer.h.#.attn.q_proj"},
    {"blk.#.attn_k", "transformer.h.#.attn.k_proj"},
    {"blk.#.attn_v", "transformer.h.#.attn.v_proj"},
    {"blk.#.attn_output", "transformer.h.#.attn.out_proj"},
    {"blk.#.ffn_up", "transformer.h.#.mlp.fc_in"},
    {"blk.#.ffn_down", "transformer.h.#.mlp.fc_out"},
};

void gptj(ModelConfig& c) {
  neox(c);
  c.shared_norm = true;
  c.activation = Activation::gelu_tanh;
  c.qkv_bias = c.out_bias = false;
  c.head_bias = true;
  c.rope.style = attention::RopeStyle::gptj;
}

}  // namespace

extern const Architecture kGptNeox{.name = "gptneox",
                                   .models = "GPT-NeoX, Pythia, RedPajama-INCITE",
                                   .hugging_face = "gpt_neox",
                                   .names = kNeoxNames,
                                   .json_defaults = R"({"rotary_pct": 0.25})",
                                   .family = neox,
                                   .json = neox_json,
                                   .metadata = neox_metadata};
extern const Architecture kGptj{
    .name = "gptj", .models = "GPT-J", .names = kGptjNames, .json_defaults = R"({"rotary_dim": 64})", .family = gptj};

}  // namespace kvasir::model
