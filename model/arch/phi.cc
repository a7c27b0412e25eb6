// Phi 1, 1.5 and 2: attention and MLP read one layer norm, biases everywhere, rope on part of a head.
// Phi 3 and 4: Llama's layers with q, k and v in one tensor and gate and up in another; LongRoPE.
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kPhi2Names[] = {
    {"output_norm", "model.final_layernorm"},
    {"blk.#.attn_output", "model.layers.#.self_attn.dense"},
    {"blk.#.ffn_up", "model.layers.#.mlp.fc1"},
    {"blk.#.ffn_down", "model.layers.#.mlp.fc2"},
};

void phi2(ModelConfig& c) {
  c.norm = NormKind::layer;
  c.norm_eps = 1e-5f;
  c.parallel = c.shared_norm = true;
  c.gated = false;
  c.activation = Activation::gelu_tanh;
  c.qkv_bias = c.out_bias = c.mlp_bias = c.head_bias = true;
}

constexpr TensorName kPhi3Names[] = {{"blk.#.ffn_gate_up", "", "blk.#.ffn_up"}};

void phi3(ModelConfig& c) { c.norm_eps = 1e-5f; }

// Its first files say yarn where they mean LongRoPE.
Status phi3_json(const JsonKeys&, ModelConfig& c) {
  if (c.rope.scaling == attention::RopeScaling::yarn && !c.rope.short_factor.empty())
    c.rope.scaling = attention::RopeScaling::longrope;
  return {};
}

}  // namespace

extern const Architecture kPhi2{.name = "phi2",
                                .models = "Phi 1, 1.5, 2",
                                .hugging_face = "phi",
                                .names = kPhi2Names,
                                .json_defaults = R"({"partial_rotary_factor": 0.5})",
                                .family = phi2};
extern const Architecture kPhi3{.name = "phi3",
                                .models = "Phi 3, 3.5, 4",
                                .names = kPhi3Names,
                                .json_defaults = R"({"original_max_position_embeddings": 4096})",
                                .family = phi3,
                                .json = phi3_json};

}  // namespace kvasir::model
