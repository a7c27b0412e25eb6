// Mixtral: Mistral whose MLP is a mixture of experts. Its GGUF files are Llama's.
#include "model/arch/experts.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"blk.#.ffn_gate_inp", "model.layers.#.block_sparse_moe.gate"},
    {"blk.#.ffn_gate.%", "model.layers.#.block_sparse_moe.experts.%.w1"},
    {"blk.#.ffn_up.%", "model.layers.#.block_sparse_moe.experts.%.w3"},
    {"blk.#.ffn_down.%", "model.layers.#.block_sparse_moe.experts.%.w2"},
};

void family(ModelConfig& c) {
  c.experts.routing.experts = 8, c.experts.routing.used = 2;
  c.experts.routing.normalized = true;
}

}  // namespace

extern const Architecture kMixtral{.name = "mixtral",
                                   .models = "Mixtral 8x7B, 8x22B",
                                   .gguf = "llama",
                                   .names = kNames,
                                   .gguf_turns_neighbours = true,
                                   .json_defaults = R"({"num_local_experts": 8, "num_experts_per_tok": 2,
                                       "num_key_value_heads": 8})",
                                   .family = family,
                                   .json = read_experts};

}  // namespace kvasir::model
