// Hugging Face's config.json: what every decoder reads. Its architecture's own keys are in model/arch.
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "core/log.h"
#include "model/arch/registry.h"
#include "model/config.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
constexpr int kMaxDepth = 16;

Status read_rope(const JsonKeys& in, attention::RopeConfig* rope) {
  KVASIR_TRY(in.get({"rope_theta"}, &rope->base));
  std::string type = in.text("rope_type").empty() ? in.text("type") : in.text("rope_type");
  in.pass_over({"type"});
  if (type.empty()) type = "default";
  KVASIR_ASSIGN(rope->scaling, attention::parse_rope_scaling(type));
  int32_t original = int32_t(rope->original_context);
  KVASIR_TRY(in.get({"original_max_position_embeddings"}, &original));
  rope->original_context = original;
  KVASIR_TRY(in.get({"factor"}, &rope->factor));
  KVASIR_TRY(in.get({"low_freq_factor"}, &rope->low_freq_factor));
  KVASIR_TRY(in.get({"high_freq_factor"}, &rope->high_freq_factor));
  KVASIR_TRY(in.get({"beta_fast"}, &rope->beta_fast));
  KVASIR_TRY(in.get({"beta_slow"}, &rope->beta_slow));
  KVASIR_TRY(in.get("truncate", &rope->truncate));
  KVASIR_TRY(in.get({"mscale"}, &rope->mscale));
  KVASIR_TRY(in.get({"mscale_all_dim"}, &rope->mscale_all_dim));
  KVASIR_TRY(in.get("short_factor", &rope->short_factor));
  KVASIR_TRY(in.get("long_factor", &rope->long_factor));
  KVASIR_TRY(in.get({"attention_factor"}, &rope->attention_factor));
  // llama_4_scaling_beta is read where it means something (Ministral 3).
  in.pass_over({"partial_rotary_factor", "max_position_embeddings", "llama_4_scaling_beta"});
  in.pass_over({"mrope_section", "mrope_interleaved"});  // of pictures; a text has one position in all sections
  return in.judge_unread(cat("rope scaling ", type));
}

Status read_ropes(const JsonKeys& in, ModelConfig* c) {
  KVASIR_TRY(in.get({"rope_theta", "rotary_emb_base"}, &c->rope.base));
  c->rope.original_context = c->local_rope.original_context = c->rope.configured_context = c->context;
  int32_t original = c->context;
  KVASIR_TRY(in.get({"original_max_position_embeddings"}, &original));
  c->rope.original_context = original;
  const json* rope = in.find("rope_parameters");
  if (const json* scaling = in.find("rope_scaling"); !rope) rope = scaling;
  const json* local = nullptr;
  if (rope && rope->is_object() && rope->contains("full_attention")) {
    if (rope->contains("sliding_attention")) local = &(*rope)["sliding_attention"];
    rope = &(*rope)["full_attention"];
  }
  for (const json* r : {rope, local})
    if (r && !r->is_object()) return in.wrong("rope_scaling", "an object");
  double part = 1;
  KVASIR_TRY(in.get({"partial_rotary_factor", "rotary_pct"}, &part));
  if (rope) {
    const JsonKeys keys(*rope, in.file());
    KVASIR_TRY(keys.get({"partial_rotary_factor"}, &part));
    KVASIR_TRY(read_rope(keys, &c->rope));
  }
  c->rope.rotary_dim = int32_t(std::min(std::max(part, 0.0), 2.0) * c->head_dim);
  if (c->rope.scaling == attention::RopeScaling::proportional) c->rope.part = part, c->rope.rotary_dim = c->head_dim;
  KVASIR_TRY(in.get({"rotary_dim"}, &c->rope.rotary_dim));
  KVASIR_TRY(in.get({"rope_local_base_freq"}, &c->local_rope.base));
  if (local) {
    KVASIR_TRY(read_rope(JsonKeys(*local, in.file()), &c->local_rope));
    c->local_rope.rotary_dim = c->rope.rotary_dim;
    c->local_rope.style = c->rope.style;
  }
  return {};
}

// Every n-th layer is full: from the number, or from the list of kinds.
Status read_layer_kinds(const JsonKeys& in, ModelConfig* c) {
  int32_t pattern = 0;
  KVASIR_TRY(in.get({"sliding_window_pattern", "_sliding_window_pattern"}, &pattern));
  if (pattern > 0) c->set_window_pattern(pattern);
  const json* kinds = in.find("layer_types");
  if (!kinds) return {};
  if (!kinds->is_array() || int64_t(kinds->size()) != c->layers) return in.wrong("layer_types", "one kind a layer");
  c->layer_kinds.assign(size_t(c->layers), {});
  for (int32_t i = 0; i < c->layers; ++i) {
    const json& kind = (*kinds)[size_t(i)];
    const bool linear = kind == "linear_attention" && c->linear.taps > 0;
    if (!linear && kind != "sliding_attention" && kind != "full_attention")
      return invalid_argument(cat(in.file(), ": layer_types has ",
                                  kind.dump(-1, ' ', false, json::error_handler_t::replace),
                                  "; full_attention and sliding_attention are supported"));
    c->layer_kinds[size_t(i)].windowed = kind == "sliding_attention";
    c->layer_kinds[size_t(i)].linear = linear;
  }
  return {};
}

// What compressed-tensors says of the cache that the checkpoint's k_scale and v_scale are for.
void read_kv_scheme(const JsonKeys& in, const json& object, ModelConfig* c) {
  const json all = object.value("quantization_config", json()),
             scheme = all.is_object() ? all.value("kv_cache_scheme", json()) : json();
  if (!scheme.is_object()) return;
  const bool weights = all.contains("config_groups") && !all["config_groups"].empty();
  if (!weights) in.pass_over({"quantization_config"});
  const JsonKeys s(scheme, in.file());
  const std::string type = s.text("type"), strategy = s.text("strategy");
  int32_t bits = 0;
  bool dynamic = false;
  if (s.get({"num_bits"}, &bits).ok() && s.get("dynamic", &dynamic).ok() && bits == 8 && !dynamic &&
      (type == "float" || type == "int") && (strategy.empty() || strategy == "tensor"))
    c->kv.dtype = type == "float" ? "fp8" : "int8", c->kv.group = 0;
  else
    log_warn(
        "the checkpoint's kv_cache_scheme is none that is known here (8 bits, float or int, strategy tensor): "
        "kv_dtype auto is as without it",
        {{"file", in.file()}});
}

// Weights of 4 bits, and of 8: what their makers' tools write without saying it in the tensors.
Status read_int4(const JsonKeys& q, const std::string& method, ModelConfig* c) {
  int32_t bits = 4;
  KVASIR_TRY(q.get({"bits", "w_bit"}, &bits));
  if (bits != 4 && !(bits == 8 && method == "gptq"))
    return invalid_argument(cat(q.file(), ": quantization_config has bits ", bits, "; of ", method,
                                method == "gptq" ? " 4 and 8 are" : " 4 is", " supported"));
  const std::string version = q.text("version"), format = q.text("checkpoint_format");
  if (method == "awq" && !version.empty() && version != "gemm" && version != "GEMM")
    return invalid_argument(
        cat(q.file(), ": quantization_config has version '", version.substr(0, 64), "'; of awq gemm is supported"));
  if (method == "gptq" && format != "gptq_v2") c->int4_zero_shift = 1;
  return {};
}

// A checkpoint says how its weights are scaled; which scales there are, the tensors themselves say.
Status read_quantization(const JsonKeys& in, const json& object, ModelConfig* c) {
  const auto found = object.find("quantization_config");
  if (found == object.end() || found->is_null()) return {};
  const JsonKeys q(*found, in.file());
  const std::string method = found->is_object() ? q.text("quant_method") : "";
  bool known = method == "fp8" || method == "fbgemm_fp8" || method == "mxfp4";
  // Nothing of the weights: the cache's scales alone.
  if (method.empty() || method == "compressed-tensors")
    if (found->is_object() && found->contains("kv_cache_scheme"))
      if (const json groups = found->value("config_groups", json()); groups.is_null() || groups.empty()) return {};
  if (method == "compressed-tensors") {
    const std::string format = q.text("format");
    known = format == "float-quantized" || format == "naive-quantized" || format == "pack-quantized" ||
            format == "nvfp4-pack-quantized";
  }
  if (method == "modelopt") {
    const std::string algorithm = q.text("quant_algo");
    known = algorithm == "FP8" || algorithm == "NVFP4";
  }
  if (method == "awq" || method == "gptq") {
    KVASIR_TRY(read_int4(q, method, c));
    known = true;
  }
  if (const json size = found->is_object() ? found->value("weight_block_size", json()) : json(); !size.is_null())
    known &= size == json::array({128, 128});
  if (!known)
    return invalid_argument(
        cat(in.file(), ": quantization_config has quant_method '", method.substr(0, 64),
            "'; fp8 (also in blocks of 128 x 128), mxfp4, awq, gptq, compressed-tensors' float-quantized, "
            "pack-quantized and nvfp4-pack-quantized, and modelopt's FP8 and NVFP4 are supported: take another "
            "checkpoint of the model"));
  in.pass_over({"quantization_config"});
  return {};
}

Status read_activation(const JsonKeys& in, ModelConfig* c) {
  std::string name;
  for (const char* key : {"activation_function", "activation", "hidden_act", "hidden_activation"})
    if (std::string here = in.text(key); !here.empty()) name = here;
  constexpr std::pair<std::string_view, Activation> kKnown[] = {
      {"silu", Activation::silu},           {"swish", Activation::silu},
      {"gelu", Activation::gelu},           {"gelu_new", Activation::gelu_tanh},
      {"gelu_fast", Activation::gelu_tanh}, {"gelu_pytorch_tanh", Activation::gelu_tanh},
      {"relu", Activation::relu},           {"relu2", Activation::relu_squared}};
  if (name.empty()) return {};
  for (const auto& [known, activation] : kKnown)
    if (name == known) return c->activation = activation, Status();
  return invalid_argument(cat(in.file(), ": the activation is ", name.substr(0, 64),
                              "; silu, gelu, gelu_new, gelu_pytorch_tanh, relu and relu2 are supported"));
}

Status read_decoder(const JsonKeys& in, ModelConfig* c) {
  KVASIR_TRY(in.need({"hidden_size", "n_embd", "d_model", "n_embed"}, &c->hidden));
  KVASIR_TRY(in.need({"num_hidden_layers", "n_layer", "n_layers", "num_layers"}, &c->layers));
  KVASIR_TRY(in.need({"num_attention_heads", "n_head", "n_heads", "num_heads"}, &c->heads));
  KVASIR_TRY(in.need({"vocab_size"}, &c->vocab));
  KVASIR_TRY(in.get({"intermediate_size", "ffn_hidden_size", "n_inner", "d_ff"}, &c->ffn));
  if (c->ffn == 0 && c->gated) return invalid_argument(cat(in.file(), ": intermediate_size is missing"));
  if (c->ffn == 0) c->ffn = int32_t(std::min<int64_t>(4 * int64_t(c->hidden), INT32_MAX));
  c->context = 2048;
  KVASIR_TRY(in.get({"max_position_embeddings", "n_positions", "max_seq_len", "seq_length"}, &c->context));
  c->kv_heads = c->heads;
  KVASIR_TRY(in.get({"num_key_value_heads"}, &c->kv_heads));
  c->head_dim = c->heads > 0 ? c->hidden / c->heads : 0;
  KVASIR_TRY(in.get({"head_dim", "d_kv"}, &c->head_dim));
  KVASIR_TRY(in.get("tie_word_embeddings", &c->tied_head));
  KVASIR_TRY(in.get({"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"}, &c->norm_eps));
  KVASIR_TRY(in.get("attention_bias", &c->qkv_bias));
  if (in.has("attention_bias")) c->out_bias = c->qkv_bias;
  KVASIR_TRY(in.get("mlp_bias", &c->mlp_bias));
  KVASIR_TRY(read_activation(in, c));
  KVASIR_TRY(in.get({"sliding_window"}, &c->window));
  bool windows = true;
  KVASIR_TRY(in.get("use_sliding_window", &windows));
  if (!windows) c->window = 0;
  KVASIR_TRY(read_layer_kinds(in, c));
  return read_ropes(in, c);
}

}  // namespace

Result<ModelConfig> config_from_json(std::string_view text, const std::string& name) {
  bool deep = false;
  json root = json::parse(
      text, [&](int depth, json::parse_event_t, json&) { return !(deep |= depth > kMaxDepth); }, false);
  if (root.is_discarded() || !root.is_object() || deep)
    return invalid_argument(cat(name, " is not a JSON object we can read"));
  // Models that also see have what they say of text in an object of its own.
  const bool within = root.contains("text_config") && root["text_config"].is_object();
  json& object = within ? root["text_config"] : root;
  std::string type = JsonKeys(object, name).text("model_type");
  if (type.empty()) type = JsonKeys(root, name).text("model_type");
  const Architecture* a = find_model_type(type);
  if (!a)
    return invalid_argument(
        cat(name, ": model_type is '", type.substr(0, 64), "'; the known ones are ", known_architectures()));
  if (within)
    log_info("only the text of this model is served", {{"model_type", JsonKeys(root, name).text("model_type")}});
  if (!a->json_defaults.empty()) {
    json whole = json::parse(a->json_defaults);
    whole.update(object);
    object = std::move(whole);
  }
  const JsonKeys in(object, name);
  ModelConfig c;
  c.architecture = a->name;
  c.name = in.text("_name_or_path").empty() ? type : in.text("_name_or_path");
  c.norm_eps = 1e-6f;
  if (a->family) a->family(c);
  KVASIR_TRY(read_quantization(in, object, &c));
  KVASIR_TRY(read_decoder(in, &c));
  if (a->json) KVASIR_TRY(a->json(in, c));
  read_kv_scheme(in, object, &c);
  KVASIR_TRY(in.judge_unread(a->name));
  if (a->derive) a->derive(c);
  c.settle_longrope();
  KVASIR_TRY(c.validate());
  return c;
}

}  // namespace kvasir::model
