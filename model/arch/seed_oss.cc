// Seed-OSS: Llama with biases on q, k and v.
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {{"blk.#.ffn_norm", "", "blk.#.post_attention_norm"}};

void family(ModelConfig& c) { c.qkv_bias = true; }

Status json(const JsonKeys& in, ModelConfig& c) {
  c.out_bias = false;
  return in.get("attention_out_bias", &c.out_bias);
}

}  // namespace

extern const Architecture kSeedOss{.name = "seed_oss",
                                   .models = "Seed-OSS",
                                   .names = kNames,
                                   .json_defaults = R"({"head_dim": 128, "num_key_value_heads": 8})",
                                   .family = family,
                                   .json = json};

}  // namespace kvasir::model
