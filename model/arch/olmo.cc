// OLMo 2: norms after the sublayers alone, and on q and k over their whole width. OLMo 3: with windows, but for every
// fourth layer, whose rope alone is scaled.
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"blk.#.post_attention_norm", "model.layers.#.post_attention_layernorm"},
    {"blk.#.post_ffw_norm", "model.layers.#.post_feedforward_layernorm"},
};

void family(ModelConfig& c) {
  c.norm_eps = 1e-5f;
  c.input_norms = false;
  c.output_norms = true;
  c.qk_norm = QkNorm::full;
  c.local_rope.base = 0;  // as the others', unless it is named
}

void derive(ModelConfig& c) {
  if (c.local_rope.base == 0) c.local_rope.base = c.rope.base;
  if (c.window == 0) return;
  if (c.layer_kinds.empty()) c.set_window_pattern(4);
  c.local_rope.rotary_dim = c.rope.rotary_dim;
}

void olmo3(ModelConfig& c) {
  family(c);
  c.rope.base = 500000;
}

}  // namespace

extern const Architecture kOlmo2{
    .name = "olmo2", .models = "OLMo 2", .names = kNames, .family = family, .derive = derive};
extern const Architecture kOlmo3{.name = "olmo3",
                                 .models = "OLMo 3",
                                 .names = kNames,
                                 .json_defaults = R"({"sliding_window": 4096})",
                                 .family = olmo3,
                                 .derive = derive};

}  // namespace kvasir::model
