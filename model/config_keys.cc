#include "model/config_keys.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/log.h"
#include "model/formats/weight_type.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

// Keys that say nothing about what a forward pass computes: training, sampling, and how transformers runs a model.
constexpr std::string_view kHarmless[] = {"_attn_implementation_autoset",
                                          "_name_or_path",
                                          "architectures",
                                          "attention_dropout",
                                          "attn_implementation",
                                          "attn_pdrop",
                                          "auto_map",
                                          "bos_token_id",
                                          "cache_implementation",
                                          "chunk_size_feed_forward",
                                          "classifier_dropout",
                                          "decoder_start_token_id",
                                          "dtype",
                                          "embd_pdrop",
                                          "emb_pdrop",
                                          "resid_pdrop",
                                          "eos_token_id",
                                          "gradient_checkpointing",
                                          "hidden_dropout",
                                          "id2label",
                                          "init_device",
                                          "initializer_factor",
                                          "initializer_range",
                                          "is_decoder",
                                          "is_llama_config",
                                          "keys_to_ignore_at_inference",
                                          "label2id",
                                          "learned_pos_emb",
                                          "max_window_layers",
                                          "mlp_dropout",
                                          "model_type",
                                          "n_ctx",
                                          "num_ln_in_parallel_attn",
                                          "output_attentions",
                                          "output_hidden_states",
                                          "output_router_logits",
                                          "pad_token_id",
                                          "prefix",
                                          "pretraining_tp",
                                          "residual_dropout",
                                          "return_dict",
                                          "rope_interleaved",
                                          "rotary",
                                          "router_aux_loss_coef",
                                          "scale_attn_weights",
                                          "sep_token_id",
                                          "skip_bias_add",
                                          "skip_bias_add_qkv",
                                          "slow_but_exact",
                                          "summary_activation",
                                          "summary_first_dropout",
                                          "summary_proj_to_labels",
                                          "summary_type",
                                          "summary_use_proj",
                                          "task_specific_params",
                                          "tie_word_embeddings",
                                          "tokenizer_class",
                                          "torch_dtype",
                                          "transformers_version",
                                          "unk_token_id",
                                          "unsloth_fixed",
                                          "unsloth_version",
                                          "use_cache",
                                          "verbose"};

// Keys that change numbers in some architecture: where one does not read them they must say what is so without them.
constexpr std::string_view kNumeric[] = {"add_cross_attention",
                                         "alibi",
                                         "altup_num_inputs",
                                         "apply_residual_connection_post_layernorm",
                                         "attention_bias",
                                         "attention_chunk_size",
                                         "attention_k_eq_v",
                                         "attention_multiplier",
                                         "attention_out_bias",
                                         "attn_logit_softcapping",
                                         "attn_temperature_tuning",
                                         "bias",
                                         "clip_qkv",
                                         "dim_model_base",
                                         "embedding_multiplier",
                                         "enable_moe_block",
                                         "final_logit_softcapping",
                                         "hidden_size_per_layer_input",
                                         "is_encoder_decoder",
                                         "kv_lora_rank",
                                         "laurel_rank",
                                         "layer_types",
                                         "linear_num_key_heads",
                                         "logit_scale",
                                         "logits_scaling",
                                         "mlp_bias",
                                         "multi_query",
                                         "n_routed_experts",
                                         "new_decoder_architecture",
                                         "no_rope_layers",
                                         "num_experts",
                                         "num_global_key_value_heads",
                                         "num_kv_shared_layers",
                                         "num_local_experts",
                                         "parallel_attn",
                                         "partial_rotary_factor",
                                         "position_embedding_type",
                                         "q_lora_rank",
                                         "qk_layernorm",
                                         "qk_norm",
                                         "qkv_bias",
                                         "quantization_config",
                                         "query_pre_attn_scalar",
                                         "residual_multiplier",
                                         "rotary_dim",
                                         "rotary_pct",
                                         "scale_attn_by_inverse_layer_idx",
                                         "scale_depth",
                                         "scale_emb",
                                         "sliding_window",
                                         "use_bidirectional_attention",
                                         "use_double_wide_mlp",
                                         "use_parallel_residual",
                                         "use_qk_norm"};

// Of GGUF, after the architecture's name and a dot. What begins so is the training's, or another program's.
constexpr std::string_view kHarmlessFields[] = {"vocab_size",
                                                "tensor_data_layout",
                                                "rope.scaling.finetuned",
                                                "attention.causal",
                                                "attention.layer_norm_epsilon",
                                                "attention.layer_norm_rms_epsilon",
                                                "rope.dimension_count",
                                                "rope.freq_base",
                                                "rope.scaling.original_context_length",
                                                "rope.scaling.factor",
                                                "attention.key_length",
                                                "attention.value_length",
                                                "attention.head_count_kv",
                                                "feed_forward_length"};
// Begins of fields that change numbers.
constexpr std::string_view kNumericFields[] = {"expert",  "attention.", "rope.", "ssm.",      "use_parallel_residual",
                                               "attn_",   "final_",     "logit", "residual_", "embedding_",
                                               "pooling", "decoder_"};

template <size_t n>
bool in(const std::string_view (&list)[n], std::string_view key) {
  return std::find(std::begin(list), std::end(list), key) != std::end(list);
}

// The value a key has where it says nothing.
bool neutral(std::string_view key, const json& v) {
  if (v.is_null() || v == false) return true;
  if (v.is_number()) return v == 0 || v == 1;
  if (v.is_string()) return v == "" || (key == "position_embedding_type" && (v == "rope" || v == "rotary"));
  return v.is_structured() && v.empty();
}

std::string shown(const json& v) {
  std::string s = v.dump(-1, ' ', false, json::error_handler_t::replace);
  return s.size() > 48 ? s.substr(0, 45) + "..." : s;
}

}  // namespace

const json* JsonKeys::find(const char* key) const {
  auto it = object_.find(key);
  if (it == object_.end()) return nullptr;
  read_.insert(key);
  return it->is_null() ? nullptr : &*it;
}

Status JsonKeys::wrong(std::string_view key, std::string_view want) const {
  return invalid_argument(cat(file_, ": ", key, " must be ", want));
}

Status JsonKeys::need(Names keys, int32_t* out) const {
  if (std::none_of(keys.begin(), keys.end(), [this](const char* key) { return has(key); }))
    return invalid_argument(cat(file_, ": ", *keys.begin(), " is missing"));
  return get(keys, out);
}

Status JsonKeys::get(Names keys, int32_t* out) const {
  for (const char* key : keys) {
    const json* v = find(key);
    if (!v) continue;
    if (!v->is_number_integer()) return wrong(key, "a whole number");
    if (v->is_number_unsigned() ? v->get<uint64_t>() > INT32_MAX : v->get<int64_t>() < 0)
      return wrong(key, "from 0 to 2147483647");
    *out = v->get<int32_t>();
    return {};
  }
  return {};
}

Status JsonKeys::get(Names keys, double* out) const {
  for (const char* key : keys) {
    const json* v = find(key);
    if (!v) continue;
    if (!v->is_number()) return wrong(key, "a number");
    *out = v->get<double>();
    return {};
  }
  return {};
}

Status JsonKeys::get(Names keys, float* out) const {
  double v = *out;
  KVASIR_TRY(get(keys, &v));
  *out = float(v);
  return {};
}

Status JsonKeys::get(const char* key, bool* out) const {
  const json* v = find(key);
  if (!v) return {};
  if (!v->is_boolean()) return wrong(key, "true or false");
  *out = v->get<bool>();
  return {};
}

Status JsonKeys::get(const char* key, std::vector<float>* out) const {
  const json* v = find(key);
  if (!v) return {};
  if (!v->is_array() || v->size() > 4096) return wrong(key, "a list of at most 4096 numbers");
  out->clear();
  for (const json& x : *v) {
    if (!x.is_number()) return wrong(key, "a list of at most 4096 numbers");
    out->push_back(x.get<float>());
  }
  return {};
}

std::string JsonKeys::text(const char* key) const {
  const json* v = find(key);
  return v && v->is_string() ? v->get<std::string>() : "";
}

Status JsonKeys::only(const char* key, const char* value) const {
  const json* v = find(key);
  if (!v || v->dump() == value) return {};
  return invalid_argument(cat(file_, ": ", key, " is ", shown(*v), "; only ", value, " is supported"));
}

void JsonKeys::pass_over(Names keys) const {
  for (const char* key : keys) (void)find(key);
}

Status JsonKeys::judge_unread(std::string_view architecture) const {
  for (const auto& [key, value] : object_.items()) {
    if (read_.count(key) || in(kHarmless, key)) continue;
    if (!in(kNumeric, key)) {
      log_warn("a key of the model's configuration is not known, and not read",
               {{"key", key.substr(0, 64)}, {"value", shown(value)}, {"file", file_}});
    } else if (!neutral(key, value)) {
      return invalid_argument(
          cat(file_, ": ", key, " is ", shown(value), ", which is not supported in ", architecture, " models"));
    }
  }
  return {};
}

const GgufValue* GgufKeys::find(std::string_view field) const {
  const GgufValue* v = gguf_.value(key(field));
  if (v) read_.emplace(field);
  return v;
}

Status GgufKeys::need(std::string_view field, int32_t* out) const {
  if (!has(field)) return invalid_argument(cat(gguf_.name(), ": the key ", key(field), " is missing or no integer"));
  return get(field, out);
}

Status GgufKeys::get(std::string_view field, int64_t* out) const {
  if (!has(field)) return {};
  auto v = gguf_.integer(key(field));
  if (!v) return invalid_argument(cat(gguf_.name(), ": the key ", key(field), " is missing or no integer"));
  *out = *v;
  return {};
}

Status GgufKeys::get(std::string_view field, int32_t* out) const {
  int64_t v = *out;
  KVASIR_TRY(get(field, &v));
  if (v < 0 || v > INT32_MAX) return invalid_argument(cat(gguf_.name(), ": ", key(field), " is ", v, ", out of range"));
  *out = int32_t(v);
  return {};
}

Status GgufKeys::get(std::string_view field, double* out) const {
  if (!has(field)) return {};
  auto v = gguf_.number(key(field));
  if (!v) return invalid_argument(cat(gguf_.name(), ": ", key(field), " must be a number"));
  *out = *v;
  return {};
}

Status GgufKeys::get(std::string_view field, float* out) const {
  double v = *out;
  KVASIR_TRY(get(field, &v));
  *out = float(v);
  return {};
}

Status GgufKeys::get(std::string_view field, bool* out) const {
  if (!has(field)) return {};
  auto v = gguf_.boolean(key(field));
  if (!v) return invalid_argument(cat(gguf_.name(), ": ", key(field), " must be true or false"));
  *out = *v;
  return {};
}

std::string GgufKeys::text(std::string_view field) const {
  return has(field) ? std::string(gguf_.string(key(field)).value_or("")) : "";
}

Result<std::vector<float>> GgufKeys::tensor(std::string_view name) const {
  const GgufTensor* t = gguf_.tensor(name);
  if (!t) return std::vector<float>();
  if (t->type != WeightType::f32 || t->dims[0] > 1024 || t->dims[1] != 1)
    return invalid_argument(cat(gguf_.name(), ": ", name, " must be F32 and at most 1024 long"));
  std::vector<float> out(size_t(t->dims[0]));
  dequantize(WeightType::f32, t->data, t->dims[0], out.data());
  for (float d : out)
    if (!(d > 0)) return invalid_argument(cat(gguf_.name(), ": ", name, " holds a value that is not positive"));
  return out;
}

void GgufKeys::pass_over(std::initializer_list<std::string_view> fields) const {
  for (std::string_view field : fields) (void)find(field);
}

Status GgufKeys::judge_unread() const {
  const std::string begin = prefix_ + ".";
  for (const auto& [whole, value] : gguf_.metadata()) {
    if (!whole.starts_with(begin)) continue;
    const std::string_view field = whole.substr(begin.size());
    if (read_.count(field) || in(kHarmlessFields, field)) continue;
    const auto number = gguf_.number(whole);
    const auto truth = gguf_.boolean(whole);
    const bool numeric = std::any_of(std::begin(kNumericFields), std::end(kNumericFields),
                                     [&](std::string_view b) { return field.starts_with(b); });
    if (!numeric)
      log_warn("a key of the model's metadata is not known, and not read",
               {{"key", whole.substr(0, 96)}, {"file", gguf_.name()}});
    else if (!(number && (*number == 0 || *number == 1)) && !(truth && !*truth))
      return invalid_argument(
          cat(gguf_.name(), ": the key ", whole.substr(0, 96), " is not supported in ", prefix_, " models"));
  }
  return {};
}

}  // namespace kvasir::model
