// GLM 4.5 and later with experts: the first layers have one MLP, the others experts by sigmoid in groups, with a
// correction, beside one that all tokens share.
#include "model/arch/experts.h"
#include "model/arch/next_layers.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"blk.#.ffn_norm", "", "blk.#.post_attention_norm"},
    {"blk.#.exp_probs_b", "model.layers.#.mlp.gate.e_score_correction_bias$"},
    {"blk.#.ffn_gate_shexp", "model.layers.#.mlp.shared_experts.gate_proj"},
    {"blk.#.ffn_up_shexp", "model.layers.#.mlp.shared_experts.up_proj"},
    {"blk.#.ffn_down_shexp", "model.layers.#.mlp.shared_experts.down_proj"},
};

void family(ModelConfig& c) {
  c.norm_eps = 1e-5f;
  Routing& r = c.experts.routing;
  r.experts = 128, r.used = 8;
  r.scores_of = ExpertScores::sigmoid;
  r.normalized = r.corrected = true;
}

Status json(const JsonKeys& in, ModelConfig& c) {
  bool norms = false;
  KVASIR_TRY(in.get("use_qk_norm", &norms));
  if (norms) c.qk_norm = QkNorm::head;
  c.out_bias = false;
  KVASIR_TRY(in.get({"num_nextn_predict_layers", "num_mtp_layers"}, &c.next_layers));
  return read_experts(in, c);
}

Status metadata(const GgufKeys& in, ModelConfig& c) {
  KVASIR_TRY(read_next_layers(in, c));
  if (in.file().tensor("blk.0.attn_q_norm.weight")) c.qk_norm = QkNorm::head;
  return read_experts(in, c);
}

}  // namespace

extern const Architecture kGlm4Moe{.name = "glm4_moe",
                                   .models = "GLM 4.5, 4.6, 4.5 Air",
                                   .gguf = "glm4moe",
                                   .names = kNames,
                                   .json_defaults = R"({"partial_rotary_factor": 0.5, "first_k_dense_replace": 1})",
                                   .family = family,
                                   .json = json,
                                   .metadata = metadata};

}  // namespace kvasir::model
