// DeepSeek V2 and V3, and those built as they are (Kimi K2, GLM 4.7 Flash): latent attention, the first layers with one
// MLP and the others with experts beside one that all tokens share.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "model/arch/experts.h"
#include "model/arch/next_layers.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"blk.#.attn_q_a", "model.layers.#.self_attn.q_a_proj"},
    {"blk.#.attn_q_a_norm", "model.layers.#.self_attn.q_a_layernorm"},
    {"blk.#.attn_q_b", "model.layers.#.self_attn.q_b_proj"},
    {"blk.#.attn_kv_a_mqa", "model.layers.#.self_attn.kv_a_proj_with_mqa"},
    {"blk.#.attn_kv_a_norm", "model.layers.#.self_attn.kv_a_layernorm"},
    {"blk.#.attn_kv_b", "model.layers.#.self_attn.kv_b_proj"},
    {"blk.#.attn_k_b", "model.layers.#.self_attn.kv_b_proj"},  // so that an error names it where neither is there
    {"blk.#.exp_probs_b", "model.layers.#.mlp.gate.e_score_correction_bias$"},
    {"blk.#.ffn_gate_shexp", "model.layers.#.mlp.shared_experts.gate_proj"},
    {"blk.#.ffn_up_shexp", "model.layers.#.mlp.shared_experts.up_proj"},
    {"blk.#.ffn_down_shexp", "model.layers.#.mlp.shared_experts.down_proj"},
};

constexpr std::string_view kV2Defaults = R"({"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "moe_intermediate_size": 1407})";
constexpr std::string_view kV3Defaults = R"({"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
    "norm_topk_prob": true, "moe_intermediate_size": 2048})";
constexpr std::string_view kLiteDefaults = R"({"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "norm_topk_prob": true, "moe_intermediate_size": 1536})";

void v2(ModelConfig& c) {
  Routing& r = c.experts.routing;
  r.experts = 64, r.used = 6;
  r.group_best = 1;
}

void v3(ModelConfig& c) {
  Routing& r = c.experts.routing;
  r.experts = 64, r.used = 8;
  r.scores_of = ExpertScores::sigmoid;
  r.normalized = r.corrected = true;
}

void lite(ModelConfig& c) {
  v3(c);
  c.norm_eps = 1e-5f;
}

// Which layers have one MLP, as GLM's files say it.
Status read_mlp_kinds(const JsonKeys& in, ModelConfig& c) {
  const nlohmann::json* kinds = in.find("mlp_layer_types");
  if (!kinds) return {};
  if (!kinds->is_array() || int64_t(kinds->size()) != c.layers) return in.wrong("mlp_layer_types", "one kind a layer");
  c.experts.dense.clear();
  for (const nlohmann::json& kind : *kinds) {
    if (kind != "dense" && kind != "sparse") return in.wrong("mlp_layer_types", "dense or sparse for each layer");
    c.experts.dense.push_back(kind == "dense");
  }
  return {};
}

Status read_latent(const JsonKeys& in, ModelConfig& c) {
  LatentConfig& l = c.latent;
  KVASIR_TRY(in.need({"kv_lora_rank"}, &l.rank));
  if (!l.on()) return in.wrong("kv_lora_rank", "at least 1");
  KVASIR_TRY(in.get({"q_lora_rank"}, &l.query_rank));
  KVASIR_TRY(in.need({"qk_rope_head_dim"}, &l.rope));
  KVASIR_TRY(in.need({"qk_nope_head_dim"}, &l.nope));
  KVASIR_TRY(in.need({"v_head_dim"}, &l.value));
  if (c.rope.rotary_dim != c.head_dim)
    return in.wrong("partial_rotary_factor", "1; qk_rope_head_dim says how much is rotated");
  c.rope.rotary_dim = l.rope;
  bool neighbours = true;
  KVASIR_TRY(in.get("rope_interleave", &neighbours));
  c.rope.style = neighbours ? attention::RopeStyle::gptj : attention::RopeStyle::neox;
  KVASIR_TRY(in.get({"num_nextn_predict_layers", "num_mtp_layers"}, &c.next_layers));
  KVASIR_TRY(in.only("moe_layer_freq", "1"));
  in.pass_over({"qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux"});  // what follows, and of training
  KVASIR_TRY(read_experts(in, c));
  return read_mlp_kinds(in, c);
}

Status v2_json(const JsonKeys& in, ModelConfig& c) {
  KVASIR_TRY(read_latent(in, c));
  KVASIR_TRY(in.only("scoring_func", "\"softmax\""));
  KVASIR_TRY(in.only("norm_topk_prob", "false"));
  const std::string method = in.text("topk_method");
  if (method.empty() || method == "greedy")
    c.experts.routing.groups = c.experts.routing.used_groups = 1;
  else if (method != "group_limited_greedy")
    return in.wrong("topk_method", "greedy or group_limited_greedy");
  return {};
}

Status v3_json(const JsonKeys& in, ModelConfig& c) {
  KVASIR_TRY(read_latent(in, c));
  KVASIR_TRY(in.only("scoring_func", "\"sigmoid\""));
  return in.only("topk_method", "\"noaux_tc\"");
}

// One architecture of GGUF for all.
Status metadata(const GgufKeys& in, ModelConfig& c) {
  LatentConfig& l = c.latent;
  KVASIR_TRY(in.need("attention.kv_lora_rank", &l.rank));
  if (!l.on()) return invalid_argument(cat(in.file().name(), ": ", in.key("attention.kv_lora_rank"), " is 0"));
  KVASIR_TRY(in.get("attention.q_lora_rank", &l.query_rank));
  int32_t key = c.head_dim;  // older files have no heads but these
  KVASIR_TRY(in.get("attention.key_length_mla", &key));
  KVASIR_TRY(in.need("attention.value_length", &l.value));
  KVASIR_TRY(in.get("attention.value_length_mla", &l.value));
  l.rope = c.rope.rotary_dim, l.nope = key - l.rope;
  c.rope.style = attention::RopeStyle::gptj;
  float log_multiplier = 0;  // 0.1 * mscale_all_dim, beside which mscale is the same
  KVASIR_TRY(in.get("rope.scaling.yarn_log_multiplier", &log_multiplier));
  c.rope.mscale = c.rope.mscale_all_dim = double(log_multiplier) * 10;
  auto has = [&](std::string_view name) { return in.file().tensor(name) != nullptr; };
  c.qkv_bias = has("blk.0.attn_kv_a_mqa.bias");
  KVASIR_TRY(read_next_layers(in, c));
  Routing& r = c.experts.routing;
  r.corrected = has(cat("blk.", c.layers - 1, ".exp_probs_b.bias"));
  r.scores_of = r.corrected ? ExpertScores::sigmoid : ExpertScores::softmax;  // where nothing is said
  r.normalized = false;
  KVASIR_TRY(read_experts(in, c));
  const bool sigmoid = r.scores_of == ExpertScores::sigmoid;
  c.architecture = sigmoid ? "deepseek_v3" : "deepseek_v2";
  r.group_best = sigmoid ? 2 : 1;
  return {};
}

// A token's row in the cache, and the scale of scores: YaRN's magnitude of queries and keys is in it, twice.
void derive(ModelConfig& c) {
  LatentConfig& l = c.latent;
  if (const int32_t d = c.head_dim; !l.on())  // a dummy
    l = {.rank = int32_t(std::min<int64_t>(4 * int64_t(d), 512)), .rope = std::min(d / 2, 64), .nope = d, .value = d};
  c.head_dim = int32_t(std::min<int64_t>(int64_t(l.rank) + l.rope, INT32_MAX));  // validate() has not been here yet
  c.kv_heads = 1;
  c.rope.rotary_dim = l.rope;
  double magnitude = 1;
  if (c.rope.scaling != attention::RopeScaling::none && c.rope.mscale_all_dim != 0 && c.rope.factor > 1)
    magnitude = 0.1 * c.rope.mscale_all_dim * std::log(c.rope.factor) + 1;
  c.query_scale = float(magnitude * magnitude / std::sqrt(double(l.nope) + l.rope));
}

constexpr Architecture latent(std::string_view name, std::string_view models, std::string_view defaults,
                              void (*family)(ModelConfig&), Status (*json)(const JsonKeys&, ModelConfig&)) {
  return {.name = name,
          .models = models,
          .gguf = "deepseek2",
          .names = kNames,
          .json_defaults = defaults,
          .family = family,
          .json = json,
          .metadata = metadata,
          .derive = derive};
}

}  // namespace

extern const Architecture kDeepseekV3 =
    latent("deepseek_v3", "DeepSeek V3, R1, V3.1, Moonlight", kV3Defaults, v3, v3_json);
extern const Architecture kDeepseekV2 =
    latent("deepseek_v2", "DeepSeek V2, V2 Lite, V2.5, Coder V2", kV2Defaults, v2, v2_json);
extern const Architecture kKimiK2 = latent("kimi_k2", "Kimi K2", kV3Defaults, v3, v3_json);
extern const Architecture kGlm4MoeLite = latent("glm4_moe_lite", "GLM 4.7 Flash", kLiteDefaults, lite, v3_json);

}  // namespace kvasir::model
