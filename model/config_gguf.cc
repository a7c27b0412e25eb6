#include "core/cat.h"
#include "model/arch/registry.h"
#include "model/config.h"
#include "model/formats/gguf.h"

namespace kvasir::model {
namespace {

class Reader {
 public:
  Reader(const Gguf& gguf, std::string prefix) : gguf_(gguf), prefix_(std::move(prefix)) {}
  std::string key(std::string_view field) const { return cat(prefix_, ".", field); }

  Status need(std::string_view field, int32_t* out) const {
    auto v = gguf_.integer(key(field));
    if (!v) return invalid_argument(cat(gguf_.name(), ": the key ", key(field), " is missing or no integer"));
    return fit(field, *v, out);
  }
  Status get(std::string_view field, int32_t* out) const {
    auto v = gguf_.integer(key(field));
    return v ? fit(field, *v, out) : Status();
  }
  void get(std::string_view field, double* out) const { *out = gguf_.number(key(field)).value_or(*out); }

 private:
  Status fit(std::string_view field, int64_t v, int32_t* out) const {
    if (v < 0 || v > INT32_MAX)
      return invalid_argument(cat(gguf_.name(), ": ", key(field), " is ", v, ", out of range"));
    *out = int32_t(v);
    return {};
  }
  const Gguf& gguf_;
  std::string prefix_;
};

Status read_scaling(const Gguf& gguf, const Reader& in, ModelConfig* config) {
  attention::RopeConfig& rope = config->rope;
  std::string_view kind = gguf.string(in.key("rope.scaling.type")).value_or("none");
  in.get("rope.scaling.factor", &rope.factor);
  int32_t original = config->context;
  KVASIR_TRY(in.get("rope.scaling.original_context_length", &original));
  rope.original_context = original;
  if (kind == "none") {
    rope.factor = 1;
    in.get("rope.scale_linear", &rope.factor);
    if (rope.factor != 1) rope.scaling = attention::RopeScaling::linear;
  } else if (kind == "linear") {
    rope.scaling = attention::RopeScaling::linear;
  } else if (kind == "yarn") {
    rope.scaling = attention::RopeScaling::yarn;
    in.get("rope.scaling.yarn_beta_fast", &rope.beta_fast);
    in.get("rope.scaling.yarn_beta_slow", &rope.beta_slow);
    in.get("rope.scaling.yarn_attn_factor", &rope.attention_factor);
  } else {
    return invalid_argument(cat(gguf.name(), ": rope scaling ", kind, " is not supported; none, linear and yarn are"));
  }
  // Llama 3's rule comes as ready divisors.
  if (const GgufTensor* t = gguf.tensor("rope_freqs.weight")) {
    if (t->type != WeightType::f32 || t->dims[0] > 1024)
      return invalid_argument(cat(gguf.name(), ": rope_freqs.weight must be F32 and at most 1024 long"));
    config->rope_divisors.resize(size_t(t->dims[0]));
    dequantize(WeightType::f32, t->data, t->dims[0], config->rope_divisors.data());
    for (float d : config->rope_divisors)
      if (!(d > 0)) return invalid_argument(cat(gguf.name(), ": rope_freqs.weight holds a value that is not positive"));
  }
  return {};
}

}  // namespace

Result<ModelConfig> config_from_gguf(const Gguf& gguf) {
  auto architecture = gguf.string("general.architecture");
  if (!architecture) return invalid_argument(cat(gguf.name(), ": the key general.architecture is missing"));
  ModelConfig c;
  c.architecture = *architecture;
  c.name = gguf.string("general.name").value_or(c.architecture);
  Reader in(gguf, c.architecture);
  KVASIR_TRY(in.need("context_length", &c.context));
  KVASIR_TRY(in.need("block_count", &c.layers));
  KVASIR_TRY(in.need("embedding_length", &c.hidden));
  KVASIR_TRY(in.need("feed_forward_length", &c.ffn));
  KVASIR_TRY(in.need("attention.head_count", &c.heads));
  c.kv_heads = c.heads;
  KVASIR_TRY(in.get("attention.head_count_kv", &c.kv_heads));
  c.head_dim = c.heads > 0 ? c.hidden / c.heads : 0;
  KVASIR_TRY(in.get("attention.key_length", &c.head_dim));
  int32_t value_length = c.head_dim;
  KVASIR_TRY(in.get("attention.value_length", &value_length));
  if (value_length != c.head_dim)
    return invalid_argument(
        cat(gguf.name(), ": values of ", value_length, " beside keys of ", c.head_dim, " are not supported"));
  double eps = c.norm_eps;
  in.get("attention.layer_norm_rms_epsilon", &eps);
  c.norm_eps = float(eps);

  c.vocab = 0;
  KVASIR_TRY(in.get("vocab_size", &c.vocab));
  const GgufTensor* embedding = gguf.tensor("token_embd.weight");
  if (!embedding) return invalid_argument(cat(gguf.name(), ": the tensor token_embd.weight is missing"));
  if (embedding->dims[1] > INT32_MAX) return invalid_argument(cat(gguf.name(), ": token_embd.weight is too large"));
  c.vocab = int32_t(embedding->dims[1]);  // rows that exist decide, whatever vocab_size says

  c.rope.style = attention::RopeStyle::gptj;  // llama's converter interleaves the rows of q and k
  c.rope.rotary_dim = c.head_dim;
  KVASIR_TRY(in.get("rope.dimension_count", &c.rope.rotary_dim));
  in.get("rope.freq_base", &c.rope.base);
  KVASIR_TRY(read_scaling(gguf, in, &c));
  KVASIR_TRY(in.get("attention.sliding_window", &c.window));
  if (c.architecture == "gemma3") {
    if (!gguf.number(in.key("rope.freq_base"))) c.rope.base = 1e6;
    c.local_rope = {.rotary_dim = c.rope.rotary_dim, .base = 10000};
    in.get("rope.freq_base_swa", &c.local_rope.base);
    KVASIR_TRY(in.get("attention.sliding_window_pattern", &c.window_pattern));
  }
  if (const Architecture* a = find_architecture(c.architecture)) a->adjust(c);
  KVASIR_TRY(c.validate());
  return c;
}

}  // namespace kvasir::model
