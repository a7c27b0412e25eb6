// Hugging Face's config.json.
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "model/arch/registry.h"
#include "model/config.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
constexpr int kMaxDepth = 16;

class Reader {
 public:
  Reader(const json& object, std::string name) : object_(object), name_(std::move(name)) {}

  const json* find(const char* key) const {
    auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  Status wrong(const char* key, const char* want) const {
    return invalid_argument(cat(name_, ": ", key, " must be ", want));
  }

  Status need(const char* key, int32_t* out) const {
    if (!find(key)) return invalid_argument(cat(name_, ": ", key, " is missing"));
    return get(key, out);
  }
  Status get(const char* key, int32_t* out) const {
    const json* v = find(key);
    if (!v) return {};
    if (!v->is_number_integer()) return wrong(key, "a whole number");
    if (v->is_number_unsigned() ? v->get<uint64_t>() > INT32_MAX : v->get<int64_t>() < 0)
      return wrong(key, "from 0 to 2147483647");
    *out = v->get<int32_t>();
    return {};
  }
  Status get(const char* key, double* out) const {
    const json* v = find(key);
    if (!v) return {};
    if (!v->is_number()) return wrong(key, "a number");
    *out = v->get<double>();
    return {};
  }
  std::string text(const char* key) const {
    const json* v = find(key);
    return v && v->is_string() ? v->get<std::string>() : "";
  }
  bool truth(const char* key, bool otherwise) const {
    const json* v = find(key);
    return v && v->is_boolean() ? v->get<bool>() : otherwise;
  }

 private:
  const json& object_;
  std::string name_;
};

Status read_rope(const Reader& in, const char* base_key, const json* scaling, const std::string& name, int32_t context,
                 attention::RopeConfig* rope) {
  KVASIR_TRY(in.get(base_key, &rope->base));
  rope->original_context = context;
  if (!scaling) return {};
  if (!scaling->is_object()) return invalid_argument(cat(name, ": rope_scaling must be an object"));
  Reader s(*scaling, name);
  KVASIR_TRY(s.get("rope_theta", &rope->base));
  std::string type = s.text("rope_type").empty() ? s.text("type") : s.text("rope_type");
  if (type.empty()) type = "default";
  KVASIR_ASSIGN(rope->scaling, attention::parse_rope_scaling(type));
  if (rope->scaling == attention::RopeScaling::longrope)
    return invalid_argument(cat(name, ": rope scaling longrope is not supported; linear, llama3 and yarn are"));
  int32_t original = context;
  KVASIR_TRY(s.get("original_max_position_embeddings", &original));
  rope->original_context = original;
  KVASIR_TRY(s.get("factor", &rope->factor));
  KVASIR_TRY(s.get("low_freq_factor", &rope->low_freq_factor));
  KVASIR_TRY(s.get("high_freq_factor", &rope->high_freq_factor));
  KVASIR_TRY(s.get("beta_fast", &rope->beta_fast));
  KVASIR_TRY(s.get("beta_slow", &rope->beta_slow));
  KVASIR_TRY(s.get("mscale", &rope->mscale));
  KVASIR_TRY(s.get("mscale_all_dim", &rope->mscale_all_dim));
  return s.get("attention_factor", &rope->attention_factor);
}

// Every n-th layer is full: from the number, or from the list of kinds.
Status read_pattern(const Reader& in, const std::string& name, ModelConfig* c) {
  c->window_pattern = 6;
  KVASIR_TRY(in.get("sliding_window_pattern", &c->window_pattern));
  const json* kinds = in.find("layer_types");
  if (!kinds) return {};
  if (!kinds->is_array() || int64_t(kinds->size()) != c->layers) return in.wrong("layer_types", "one kind a layer");
  int32_t first_full = c->layers + 1;
  for (int32_t i = c->layers - 1; i >= 0; --i)
    if ((*kinds)[size_t(i)] == "full_attention") first_full = i + 1;
  c->window_pattern = first_full;
  for (int32_t i = 0; i < c->layers; ++i)
    if (c->window > 0 && c->windowed(i) != ((*kinds)[size_t(i)] == "sliding_attention"))
      return invalid_argument(cat(name, ": layer_types is no repeating pattern with one full layer"));
  return {};
}

}  // namespace

Result<ModelConfig> config_from_json(std::string_view text, const std::string& name) {
  bool deep = false;
  json root = json::parse(
      text, [&](int depth, json::parse_event_t, json&) { return !(deep |= depth > kMaxDepth); }, false);
  if (root.is_discarded() || !root.is_object() || deep)
    return invalid_argument(cat(name, " is not a JSON object we can read"));
  std::string type = Reader(root, name).text("model_type");
  const json* object = &root;
  if (type == "gemma3" && root.contains("text_config") && root["text_config"].is_object())
    object = &root["text_config"];
  if (type == "gemma3_text") type = "gemma3";
  Reader in(*object, name);
  ModelConfig c;
  c.architecture = type;
  c.name = in.text("_name_or_path").empty() ? type : in.text("_name_or_path");
  if (!find_architecture(type))
    return invalid_argument(cat(name, ": model_type is '", type, "'; the known ones are ", known_architectures()));
  if (in.truth("attention_bias", false) || in.truth("mlp_bias", false))
    return invalid_argument(cat(name, ": attention_bias and mlp_bias are not supported"));
  std::string activation = in.text("hidden_activation").empty() ? in.text("hidden_act") : in.text("hidden_activation");
  const char* expected = type == "gemma3" ? "gelu_pytorch_tanh" : "silu";
  if (!activation.empty() && activation != expected)
    return invalid_argument(cat(name, ": the activation is ", activation, "; ", type, " has ", expected));
  KVASIR_TRY(in.need("hidden_size", &c.hidden));
  KVASIR_TRY(in.need("intermediate_size", &c.ffn));
  KVASIR_TRY(in.need("num_hidden_layers", &c.layers));
  KVASIR_TRY(in.need("num_attention_heads", &c.heads));
  KVASIR_TRY(in.need("vocab_size", &c.vocab));
  c.context = 2048;
  KVASIR_TRY(in.get("max_position_embeddings", &c.context));
  c.kv_heads = c.heads;
  KVASIR_TRY(in.get("num_key_value_heads", &c.kv_heads));
  c.head_dim = c.heads > 0 ? c.hidden / c.heads : 0;
  KVASIR_TRY(in.get("head_dim", &c.head_dim));
  c.tied_head = in.truth("tie_word_embeddings", type == "gemma3");
  double eps = 1e-6, query = 0;
  KVASIR_TRY(in.get("rms_norm_eps", &eps));
  c.norm_eps = float(eps);
  KVASIR_TRY(in.get("sliding_window", &c.window));
  if (!in.truth("use_sliding_window", true)) c.window = 0;
  c.rope.rotary_dim = c.head_dim;
  const json* scaling = in.find("rope_parameters") ? in.find("rope_parameters") : in.find("rope_scaling");
  const json* local_scaling = nullptr;
  if (type == "gemma3") {
    c.norm_shift = 1;
    c.rope.base = 1e6;
    c.local_rope = {.rotary_dim = c.head_dim, .base = 10000};
    KVASIR_TRY(in.get("query_pre_attn_scalar", &query));
    if (query > 0) c.query_scale = float(1 / std::sqrt(query));
    KVASIR_TRY(read_pattern(in, name, &c));
    if (scaling && scaling->contains("full_attention")) {
      if (scaling->contains("sliding_attention")) local_scaling = &(*scaling)["sliding_attention"];
      scaling = &(*scaling)["full_attention"];
    }
    KVASIR_TRY(read_rope(in, "rope_local_base_freq", local_scaling, name, c.context, &c.local_rope));
  }
  KVASIR_TRY(read_rope(in, "rope_theta", scaling, name, c.context, &c.rope));
  find_architecture(type)->adjust(c);
  KVASIR_TRY(c.validate());
  return c;
}

}  // namespace kvasir::model
