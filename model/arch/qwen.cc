// Qwen 2 (and 2.5): biases on q, k and v. Qwen 3: none, and norms on the heads of q and k instead.
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

// A window only where it is switched on, and then from some layer on.
Status json(const JsonKeys& in, ModelConfig& c) {
  int32_t full = 28;
  KVASIR_TRY(in.get({"max_window_layers"}, &full));
  if (!in.has("use_sliding_window")) c.window = 0;
  if (c.window == 0 || !c.layer_kinds.empty()) return {};
  for (int32_t i = 0; i < c.layers && c.layers <= 1024; ++i) c.layer_kinds.push_back({.windowed = i >= full});
  return {};
}

void qwen2(ModelConfig& c) { c.qkv_bias = true; }
void qwen3(ModelConfig& c) { c.qk_norm = QkNorm::head; }

}  // namespace

extern const Architecture kQwen2{
    .name = "qwen2", .models = "Qwen 1.5, 2 and 2.5, DeepSeek-R1-Distill-Qwen", .family = qwen2, .json = json};
extern const Architecture kQwen3{
    .name = "qwen3", .models = "Qwen 3", .json_defaults = R"({"head_dim": 128})", .family = qwen3, .json = json};

}  // namespace kvasir::model
