// Qwen 3 Next and Qwen 3.5: three of four layers are of linear attention, the fourth of full attention with a gate on
// its output (hybrid_network.h). Of models that also see the text is served; the layer of multi-token prediction is
// left out.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "model/arch/experts.h"
#include "model/arch/hybrid_network.h"
#include "model/arch/next_layers.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"blk.#.ffn_norm", "", "blk.#.post_attention_norm"},
    {"blk.#.attn_qkv", "model.layers.#.linear_attn.in_proj_qkv"},
    {"blk.#.attn_gate", "model.layers.#.linear_attn.in_proj_z"},
    {"blk.#.ssm_in", "model.layers.#.linear_attn.in_proj_qkvz"},
    {"blk.#.ssm_ba", "model.layers.#.linear_attn.in_proj_ba"},
    {"blk.#.ssm_beta", "model.layers.#.linear_attn.in_proj_b"},
    {"blk.#.ssm_alpha", "model.layers.#.linear_attn.in_proj_a"},
    {"blk.#.ssm_conv1d", "model.layers.#.linear_attn.conv1d"},
    {"blk.#.ssm_a", "model.layers.#.linear_attn.A_log$", "blk.#.ssm_a$"},
    {"blk.#.ssm_dt", "model.layers.#.linear_attn.dt_bias$"},
    {"blk.#.ssm_norm", "model.layers.#.linear_attn.norm"},
    {"blk.#.ssm_out", "model.layers.#.linear_attn.out_proj"},
};

constexpr std::string_view kDenseDefaults = R"({"head_dim": 256, "partial_rotary_factor": 0.25})";
constexpr std::string_view kNextDefaults = R"({"head_dim": 256, "partial_rotary_factor": 0.25, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "norm_topk_prob": true})";
constexpr std::string_view kMoeDefaults = R"({"head_dim": 256, "partial_rotary_factor": 0.25, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "norm_topk_prob": true, "intermediate_size": 512})";

void dense(ModelConfig& c) {
  c.qk_norm = QkNorm::head;
  c.gated_attention = true;
  c.linear.taps = 4;
}

void mixture(ModelConfig& c) {
  dense(c);
  c.ffn = 512;  // of no layer, and GGUF files may leave it out
  c.experts.routing.experts = 256, c.experts.routing.used = 8;
  c.experts.routing.normalized = c.experts.shared_gate = true;
}

// Every `interval`-th layer is of full attention.
void set_linear_layers(ModelConfig& c, int32_t interval) {
  c.layer_kinds.assign(size_t(std::clamp(c.layers, 0, 1 << 10)), {});
  for (size_t i = 0; i < c.layer_kinds.size(); ++i) c.layer_kinds[i].linear = (int64_t(i) + 1) % interval != 0;
}

Status dense_json(const JsonKeys& in, ModelConfig& c) {
  c.norm_shift = 1;
  LinearConfig& l = c.linear;  // of all of them, where a file leaves a key out
  l.key_heads = 16, l.value_heads = 32, l.key_dim = l.value_dim = 128;
  KVASIR_TRY(in.get({"linear_conv_kernel_dim"}, &l.taps));
  KVASIR_TRY(in.get({"linear_num_key_heads"}, &l.key_heads));
  KVASIR_TRY(in.get({"linear_num_value_heads"}, &l.value_heads));
  KVASIR_TRY(in.get({"linear_key_head_dim"}, &l.key_dim));
  KVASIR_TRY(in.get({"linear_value_head_dim"}, &l.value_dim));
  int32_t interval = 4;
  KVASIR_TRY(in.get({"full_attention_interval"}, &interval));
  if (interval < 1) return in.wrong("full_attention_interval", "at least 1");
  if (c.layer_kinds.empty()) set_linear_layers(c, interval);
  KVASIR_TRY(in.only("attn_output_gate", "true"));
  KVASIR_TRY(in.only("attention_bias", "false"));
  KVASIR_TRY(in.only("mtp_use_dedicated_embeddings", "false"));
  KVASIR_TRY(in.get({"mtp_num_hidden_layers"}, &c.next_layers));
  if (c.activation != Activation::silu) return in.wrong("hidden_act", "silu, which the convolution has, too");
  in.pass_over({"mamba_ssm_dtype"});  // states are float32
  return {};
}

Status mixture_json(const JsonKeys& in, ModelConfig& c) {
  KVASIR_TRY(dense_json(in, c));
  return read_experts(in, c);
}

// `tiled`: value head h goes with key head h % key_heads, as the converter puts those of Qwen 3.5.
Status read_metadata(const GgufKeys& in, ModelConfig& c, bool tiled) {
  LinearConfig& l = c.linear;
  int32_t inner = 0, interval = 4;
  KVASIR_TRY(in.need("ssm.conv_kernel", &l.taps));
  KVASIR_TRY(in.need("ssm.group_count", &l.key_heads));
  KVASIR_TRY(in.need("ssm.time_step_rank", &l.value_heads));
  KVASIR_TRY(in.need("ssm.state_size", &l.key_dim));
  KVASIR_TRY(in.need("ssm.inner_size", &inner));
  l.value_dim = l.value_heads > 0 ? inner / l.value_heads : 0;
  if (l.value_heads * int64_t(l.value_dim) != inner)
    return invalid_argument(cat(in.file().name(), ": ", in.key("ssm.inner_size"), " is ", inner,
                                "; it must be a multiple of ", in.key("ssm.time_step_rank"), ", ", l.value_heads));
  l.tiled = tiled;
  KVASIR_TRY(read_next_layers(in, c));
  KVASIR_TRY(in.get("full_attention_interval", &interval));
  if (interval < 1) return invalid_argument(cat(in.file().name(), ": ", in.key("full_attention_interval"), " is 0"));
  set_linear_layers(c, interval);
  if (const GgufValue* linear = in.find("attention.recurrent_layers")) {  // with those that predict further tokens
    if (linear->kind != GgufKind::array || linear->element != GgufKind::boolean || int64_t(linear->count) < c.layers)
      return invalid_argument(
          cat(in.file().name(), ": ", in.key("attention.recurrent_layers"), " must be a truth a layer"));
    for (size_t i = 0; i < c.layer_kinds.size(); ++i) c.layer_kinds[i].linear = linear->data[i] != 0;
  }
  in.pass_over({"rope.dimension_sections"});  // of pictures; a text has one position in all of them
  return {};
}

Status dense_metadata(const GgufKeys& in, ModelConfig& c) { return read_metadata(in, c, true); }

Status mixture_metadata(const GgufKeys& in, ModelConfig& c) {
  KVASIR_TRY(read_metadata(in, c, true));
  return read_experts(in, c);
}

Status next_metadata(const GgufKeys& in, ModelConfig& c) {
  KVASIR_TRY(read_metadata(in, c, false));
  return read_experts(in, c);
}

// A dummy's: with as many heads as its full layers have.
void derive(ModelConfig& c) {
  LinearConfig& l = c.linear;
  if (!c.layer_kinds.empty() || c.layers > 1024) return;
  set_linear_layers(c, std::clamp(c.layers, 1, 4));  // a small one has a layer of full attention, too
  c.rope.rotary_dim = c.head_dim / 4 / 2 * 2;
  if (l.key_heads == 0) l.key_heads = c.kv_heads, l.value_heads = c.heads, l.key_dim = l.value_dim = c.head_dim;
}

}  // namespace

extern const Architecture kQwen3Next{.name = "qwen3_next",
                                     .models = "Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
                                     .gguf = "qwen3next",
                                     .names = kNames,
                                     .json_defaults = kNextDefaults,
                                     .family = mixture,
                                     .json = mixture_json,
                                     .metadata = next_metadata,
                                     .derive = derive,
                                     .load = load_hybrid};
extern const Architecture kQwen35{.name = "qwen3_5",
                                  .models = "Qwen 3.5 0.8B to 27B",
                                  .gguf = "qwen35",
                                  .hugging_face = "qwen3_5_text",
                                  .names = kNames,
                                  .json_defaults = kDenseDefaults,
                                  .family = dense,
                                  .json = dense_json,
                                  .metadata = dense_metadata,
                                  .derive = derive,
                                  .load = load_hybrid};
extern const Architecture kQwen35Moe{.name = "qwen3_5_moe",
                                     .models = "Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B",
                                     .gguf = "qwen35moe",
                                     .hugging_face = "qwen3_5_moe_text",
                                     .names = kNames,
                                     .json_defaults = kMoeDefaults,
                                     .family = mixture,
                                     .json = mixture_json,
                                     .metadata = mixture_metadata,
                                     .derive = derive,
                                     .load = load_hybrid};

}  // namespace kvasir::model
