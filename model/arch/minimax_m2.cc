// MiniMax M2: norms over the full width of q and k, half of each head rotated, experts by sigmoid with a correction.
#include "model/arch/experts.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"blk.#.ffn_gate_inp", "model.layers.#.block_sparse_moe.gate"},
    {"blk.#.exp_probs_b", "model.layers.#.block_sparse_moe.e_score_correction_bias$"},
    {"blk.#.ffn_gate.%", "model.layers.#.block_sparse_moe.experts.%.w1"},
    {"blk.#.ffn_up.%", "model.layers.#.block_sparse_moe.experts.%.w3"},
    {"blk.#.ffn_down.%", "model.layers.#.block_sparse_moe.experts.%.w2"},
};

void family(ModelConfig& c) {
  c.qk_norm = QkNorm::full;
  c.rope.base = 5e6;
  Routing& r = c.experts.routing;
  r.experts = 256, r.used = 8;
  r.scores_of = ExpertScores::sigmoid;
  r.normalized = r.corrected = true;
}

Status json(const JsonKeys& in, ModelConfig& c) {
  KVASIR_TRY(in.only("use_qk_norm", "true"));
  KVASIR_TRY(in.only("qk_norm_type", R"("per_layer")"));
  KVASIR_TRY(in.only("scoring_func", R"("sigmoid")"));
  KVASIR_TRY(in.only("use_routing_bias", "true"));
  in.pass_over({"use_mtp", "num_mtp_modules", "mtp_transformer_layers"});  // of tokens beyond the next
  return read_experts(in, c);
}

Status metadata(const GgufKeys& in, ModelConfig& c) { return read_experts(in, c); }

}  // namespace

extern const Architecture kMinimaxM2{.name = "minimax_m2",
                                     .models = "MiniMax M2",
                                     .gguf = "minimax-m2",
                                     .names = kNames,
                                     .json_defaults = R"({"head_dim": 128, "rotary_dim": 64})",
                                     .family = family,
                                     .json = json,
                                     .metadata = metadata};

}  // namespace kvasir::model
