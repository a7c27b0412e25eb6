// Qwen 2 (and 2.5): biases on q, k and v. Qwen 3: none, and norms on the heads of q and k instead. Both also with
// experts, Qwen 2 with one more that all tokens share.
#include "model/arch/experts.h"
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

void qwen2_moe(ModelConfig& c) {
  qwen2(c);
  c.experts.routing.experts = 60, c.experts.routing.used = 4;
  c.experts.shared_gate = true;
}

void qwen3_moe(ModelConfig& c) {
  qwen3(c);
  c.experts.routing.experts = 128, c.experts.routing.used = 8;
}

Status qwen2_moe_json(const JsonKeys& in, ModelConfig& c) {
  KVASIR_TRY(in.get("qkv_bias", &c.qkv_bias));
  KVASIR_TRY(json(in, c));
  return read_experts(in, c);
}

Status qwen3_moe_json(const JsonKeys& in, ModelConfig& c) {
  KVASIR_TRY(json(in, c));
  return read_experts(in, c);
}

Status qwen3_moe_metadata(const GgufKeys& in, ModelConfig& c) {
  c.experts.routing.normalized = true;
  return read_experts(in, c);
}

}  // namespace

extern const Architecture kQwen2{
    .name = "qwen2", .models = "Qwen 1.5, 2 and 2.5, DeepSeek-R1-Distill-Qwen", .family = qwen2, .json = json};
extern const Architecture kQwen3{
    .name = "qwen3", .models = "Qwen 3", .json_defaults = R"({"head_dim": 128})", .family = qwen3, .json = json};
extern const Architecture kQwen2Moe{.name = "qwen2_moe",
                                    .models = "Qwen 1.5 MoE, Qwen 2 57B-A14B",
                                    .gguf = "qwen2moe",
                                    .family = qwen2_moe,
                                    .json = qwen2_moe_json,
                                    .metadata = read_experts};
extern const Architecture kQwen3Moe{.name = "qwen3_moe",
                                    .models = "Qwen 3 30B-A3B, 235B-A22B, Qwen3-Coder",
                                    .gguf = "qwen3moe",
                                    .family = qwen3_moe,
                                    .json = qwen3_moe_json,
                                    .metadata = qwen3_moe_metadata};

}  // namespace kvasir::model
