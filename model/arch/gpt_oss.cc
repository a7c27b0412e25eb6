// gpt-oss: a logit a head that takes part in the softmax without a value, windows in every other layer, biases
// everywhere, YaRN of unrounded corrections; experts whose gates are clamped, chosen by logits and weighed among
// themselves. Its folders have a tensor of all experts: in MXFP4, or transposed.
#include "model/arch/experts.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"blk.#.attn_sinks", "model.layers.#.self_attn.sinks$"},
    {"blk.#.ffn_norm", "", "blk.#.post_attention_norm"},
    {"blk.#.ffn_gate_inp", "model.layers.#.mlp.router"},
    {"blk.#.ffn_gate_up_exps.bias", "model.layers.#.mlp.experts.gate_up_proj_bias$"},
    {"blk.#.ffn_down_exps.bias", "model.layers.#.mlp.experts.down_proj_bias$"},
    {"blk.#.ffn_gate_up_exps", "model.layers.#.mlp.experts.gate_up_proj_blocks$"},
    {"blk.#.ffn_down_exps", "model.layers.#.mlp.experts.down_proj_blocks$"},
    {"blk.#.ffn_gate_up_exps_t", "model.layers.#.mlp.experts.gate_up_proj$"},
    {"blk.#.ffn_down_exps_t", "model.layers.#.mlp.experts.down_proj$"},
};

void family(ModelConfig& c) {
  c.norm_eps = 1e-5f;
  c.head_sinks = true;
  c.qkv_bias = c.out_bias = true;
  ExpertsConfig& e = c.experts;
  e.routing.experts = 32, e.routing.used = 4;
  e.routing.scores_of = ExpertScores::of_chosen;
  e.router_bias = e.bias = true;
  e.limit = 7;
}

Status json(const JsonKeys& in, ModelConfig& c) {
  c.experts.by_turns = true;
  KVASIR_TRY(in.get({"swiglu_limit"}, &c.experts.limit));
  KVASIR_TRY(in.get({"swiglu_alpha"}, &c.experts.slope));
  in.pass_over({"initial_context_length"});
  return read_experts(in, c);
}

Status metadata(const GgufKeys& in, ModelConfig& c) {
  c.rope.truncate = false;
  return read_experts(in, c);
}

void derive(ModelConfig& c) {
  if (c.window > 0 && c.layer_kinds.empty()) c.set_window_pattern(2);
}

}  // namespace

extern const Architecture kGptOss{
    .name = "gpt_oss",
    .models = "gpt-oss 20B, 120B",
    .gguf = "gpt-oss",
    .names = kNames,
    .json_defaults = R"({"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 150000, "attention_bias": true})",
    .family = family,
    .json = json,
    .metadata = metadata,
    .derive = derive};

}  // namespace kvasir::model
