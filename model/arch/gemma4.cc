// Gemma 4: what its files say. How it flows is gemma4_network.h.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "model/arch/gemma4_network.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"per_layer_token_embd", "model.embed_tokens_per_layer"},
    {"per_layer_model_proj", "model.per_layer_model_projection"},
    {"per_layer_proj_norm", "model.per_layer_projection_norm"},
    {"blk.#.post_attention_norm", "model.layers.#.post_attention_layernorm"},
    {"blk.#.ffn_norm", "model.layers.#.pre_feedforward_layernorm"},
    {"blk.#.pre_ffw_norm_2", "model.layers.#.pre_feedforward_layernorm_2"},
    {"blk.#.post_ffw_norm", "model.layers.#.post_feedforward_layernorm"},
    {"blk.#.post_ffw_norm_1", "model.layers.#.post_feedforward_layernorm_1"},
    {"blk.#.post_ffw_norm_2", "model.layers.#.post_feedforward_layernorm_2"},
    {"blk.#.inp_gate", "model.layers.#.per_layer_input_gate"},
    {"blk.#.proj", "model.layers.#.per_layer_projection"},
    {"blk.#.post_norm", "model.layers.#.post_per_layer_input_norm"},
    {"blk.#.layer_output_scale", "model.layers.#.layer_scalar$"},
    {"blk.#.ffn_gate_inp.scale", "model.layers.#.router.scale$"},
    {"blk.#.ffn_gate_inp", "model.layers.#.router.proj"},
    {"blk.#.ffn_down_exps.scale", "model.layers.#.router.per_expert_scale$"},
    {"blk.#.ffn_gate_up_exps", "model.layers.#.experts.gate_up_proj$"},
    {"blk.#.ffn_down_exps", "model.layers.#.experts.down_proj$"},
};

constexpr std::string_view kDefaults = R"({"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262144,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "sliding_window": 512,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "rope_parameters": {
      "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
      "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}}})";

void gemma4(ModelConfig& c) {
  c.activation = Activation::gelu_tanh;
  c.tied_head = c.sizes_by_layer = true;
  c.rope.base = 1e6, c.rope.scaling = attention::RopeScaling::proportional, c.rope.part = .25;
  c.local_rope.base = 10000;
  ExpertsConfig& e = c.experts;
  e.routing.normalized = e.scaled = true;
}

// The last layers, which share a cache, have MLPs twice as wide.
void widen_sharing_layers(ModelConfig& c) {
  c.layer_ffn.assign(size_t(c.layers), c.ffn);
  const int32_t wide = int32_t(std::min<int64_t>(2 * int64_t(c.ffn), INT32_MAX));
  for (int32_t i = std::max(0, c.layers - c.shared_kv_layers); i < c.layers; ++i) c.layer_ffn[size_t(i)] = wide;
}

void set_full_layers(ModelConfig& c, int32_t ModelConfig::*all, std::vector<int32_t> ModelConfig::*each, int32_t full) {
  if (c.*all == full) return;
  (c.*each).assign(size_t(c.layers), c.*all);
  for (int32_t i = 0; i < c.layers; ++i)
    if (!c.windowed(i)) (c.*each)[size_t(i)] = full;
}

// transformers' own way to say it: {"5": {"head_dim": 512, "num_key_value_heads": 4}, ...}
Status read_layers(const JsonKeys& in, ModelConfig& c) {
  const nlohmann::json* layers = in.find("per_layer_config");
  if (!layers) return {};
  if (!layers->is_object()) return in.wrong("per_layer_config", "an object of layers");
  c.layer_head_dim.assign(size_t(c.layers), c.head_dim);
  c.layer_kv_heads.assign(size_t(c.layers), c.kv_heads);
  for (const auto& [name, sizes] : layers->items()) {
    const bool number = !name.empty() && name.size() < 5 &&
                        std::all_of(name.begin(), name.end(), [](char ch) { return ch >= '0' && ch <= '9'; });
    const size_t i = number ? size_t(std::stoi(name)) : c.layer_head_dim.size();
    if (i >= c.layer_head_dim.size() || !sizes.is_object())
      return in.wrong("per_layer_config", "an object of layers that the model has");
    const JsonKeys keys(sizes, in.file());
    KVASIR_TRY(keys.get({"head_dim"}, &c.layer_head_dim[i]));
    KVASIR_TRY(keys.get({"num_key_value_heads"}, &c.layer_kv_heads[i]));
  }
  return {};
}

Status read_experts_of(const JsonKeys& in, ModelConfig& c) {
  bool experts = false;
  KVASIR_TRY(in.get("enable_moe_block", &experts));
  in.pass_over({"num_experts", "top_k_experts", "moe_intermediate_size"});
  if (!experts) return {};
  KVASIR_TRY(in.need({"num_experts"}, &c.experts.routing.experts));
  KVASIR_TRY(in.need({"top_k_experts"}, &c.experts.routing.used));
  return in.need({"moe_intermediate_size"}, &c.experts.ffn);
}

Status gemma4_json(const JsonKeys& in, ModelConfig& c) {
  if (c.layers > 1024) return {};  // validate() says so
  if (c.layer_kinds.empty()) {
    c.set_window_pattern(6);
    if (!c.layer_kinds.empty()) c.layer_kinds.back().windowed = false;
  }
  int32_t full_head = 512, full_kv = c.kv_heads, table = c.vocab;
  KVASIR_TRY(in.get({"global_head_dim"}, &full_head));
  KVASIR_TRY(in.get({"num_global_key_value_heads"}, &full_kv));
  KVASIR_TRY(in.get("attention_k_eq_v", &c.key_is_value));
  if (in.has("per_layer_config")) {
    KVASIR_TRY(read_layers(in, c));
  } else {
    set_full_layers(c, &ModelConfig::head_dim, &ModelConfig::layer_head_dim, full_head);
    set_full_layers(c, &ModelConfig::kv_heads, &ModelConfig::layer_kv_heads, c.key_is_value ? full_kv : c.kv_heads);
  }
  KVASIR_TRY(in.get({"num_kv_shared_layers"}, &c.shared_kv_layers));
  bool wide = false;
  KVASIR_TRY(in.get("use_double_wide_mlp", &wide));
  if (wide) widen_sharing_layers(c);
  KVASIR_TRY(in.get({"hidden_size_per_layer_input"}, &c.layer_input));
  KVASIR_TRY(in.get({"vocab_size_per_layer_input"}, &table));
  if (c.layer_input > 0 && table != c.vocab)
    return invalid_argument(
        cat(in.file(), ": vocab_size_per_layer_input is ", table, "; only vocab_size, ", c.vocab, ", is supported"));
  // Pictures' tokens see one another; text does not.
  if (const std::string both = in.text("use_bidirectional_attention"); !both.empty() && both != "vision")
    return invalid_argument(cat(in.file(), ": use_bidirectional_attention is '", both.substr(0, 64),
                                "'; only vision, or none, is supported"));
  KVASIR_TRY(read_experts_of(in, c));
  // So far it is of the model's heads, those of layers with a window.
  for (int32_t i = c.layers - 1; i >= 0 && c.head_dim > 0; --i) {
    if (c.windowed(i)) continue;
    c.rope.rotary_dim = int32_t(int64_t(c.rope.rotary_dim) * c.head_dim_of(i) / c.head_dim);
    break;
  }
  c.local_rope.rotary_dim = c.head_dim;
  return in.get({"final_logit_softcapping"}, &c.logit_softcap);
}

Status gemma4_metadata(const GgufKeys& in, ModelConfig& c) {
  if (c.layers > 1024) return {};
  // What it says of heads is that of layers without a window; the others' stands beside it.
  int32_t windowed = c.head_dim, values = 0, rotated = 0;
  const int32_t full = c.head_dim;
  KVASIR_TRY(in.get("attention.key_length_swa", &windowed));
  values = windowed, rotated = windowed;
  KVASIR_TRY(in.get("attention.value_length_swa", &values));
  KVASIR_TRY(in.get("rope.dimension_count_swa", &rotated));
  if (values != windowed)
    return invalid_argument(cat(in.file().name(), ": ", in.key("attention.value_length_swa"), " is ", values,
                                "; only that of keys, ", windowed, ", is supported"));
  c.head_dim = windowed;
  set_full_layers(c, &ModelConfig::head_dim, &ModelConfig::layer_head_dim, full);
  c.local_rope.rotary_dim = rotated;
  for (int32_t i = 0; i < c.layers && !c.key_is_value; ++i)
    c.key_is_value = !c.windowed(i) && in.file().tensor(cat("blk.", i, ".attn_k.weight")) &&
                     !in.file().tensor(cat("blk.", i, ".attn_v.weight"));
  KVASIR_TRY(in.get("attention.shared_kv_layers", &c.shared_kv_layers));
  KVASIR_TRY(in.get("embedding_length_per_layer_input", &c.layer_input));
  if (in.has("expert_count")) {
    KVASIR_TRY(in.need("expert_count", &c.experts.routing.experts));
    KVASIR_TRY(in.need("expert_used_count", &c.experts.routing.used));
    KVASIR_TRY(in.need("expert_feed_forward_length", &c.experts.ffn));
  }
  return in.get("final_logit_softcapping", &c.logit_softcap);
}

void gemma4_derive(ModelConfig& c) {
  c.embedding_scale = std::sqrt(float(c.hidden));
  if (c.window > 0 && c.layer_kinds.empty() && c.layers <= 1024) {  // a dummy: as its models are
    c.set_window_pattern(std::clamp(c.layers, 1, 6));               // a small one has a layer without a window, too
    set_full_layers(c, &ModelConfig::head_dim, &ModelConfig::layer_head_dim, 2 * c.head_dim);
    c.rope.rotary_dim = 2 * c.head_dim;
  }
  if (c.local_rope.rotary_dim == 0) c.local_rope.rotary_dim = c.head_dim;
}

}  // namespace

extern const Architecture kGemma4{.name = "gemma4",
                                  .models = "Gemma 4: dense, E models and mixtures of experts",
                                  .hugging_face = "gemma4_text",
                                  .names = kNames,
                                  .json_defaults = kDefaults,
                                  .family = gemma4,
                                  .json = gemma4_json,
                                  .metadata = gemma4_metadata,
                                  .derive = gemma4_derive,
                                  .load = load_gemma4};

}  // namespace kvasir::model
