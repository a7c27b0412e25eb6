// A GGUF file's metadata: what every decoder reads. Its architecture's own keys are in model/arch.
#include <algorithm>
#include <cstring>

#include "core/cat.h"
#include "core/utf8.h"
#include "model/arch/registry.h"
#include "model/config.h"
#include "model/formats/gguf.h"

namespace kvasir::model {
namespace {

Status read_scaling(const GgufKeys& in, ModelConfig* c) {
  attention::RopeConfig& rope = c->rope;
  std::string kind = in.text("rope.scaling.type");
  KVASIR_TRY(in.get("rope.scaling.factor", &rope.factor));
  rope.original_context = rope.configured_context = c->context;
  KVASIR_TRY(in.get("rope.scaling.original_context_length", &rope.original_context));
  KVASIR_TRY(in.get("rope.scaling.attn_factor", &rope.attention_factor));
  KVASIR_ASSIGN(rope.long_factor, in.tensor("rope_factors_long.weight"));
  KVASIR_ASSIGN(rope.short_factor, in.tensor("rope_factors_short.weight"));
  if (!rope.long_factor.empty()) kind = "longrope";
  if (kind.empty() || kind == "none") {
    rope.factor = 1;
    KVASIR_TRY(in.get("rope.scale_linear", &rope.factor));
    if (rope.factor != 1) rope.scaling = attention::RopeScaling::linear;
  } else if (kind == "linear") {
    rope.scaling = attention::RopeScaling::linear;
  } else if (kind == "longrope") {
    rope.scaling = attention::RopeScaling::longrope;
  } else if (kind == "yarn") {
    rope.scaling = attention::RopeScaling::yarn;
    KVASIR_TRY(in.get("rope.scaling.yarn_beta_fast", &rope.beta_fast));
    KVASIR_TRY(in.get("rope.scaling.yarn_beta_slow", &rope.beta_slow));
    KVASIR_TRY(in.get("rope.scaling.yarn_attn_factor", &rope.attention_factor));
  } else {
    return invalid_argument(
        cat(in.file().name(), ": rope scaling ", kind, " is not supported; none, linear, yarn and longrope are"));
  }
  // Llama 3's rule comes as ready divisors.
  KVASIR_ASSIGN(c->rope_divisors, in.tensor("rope_freqs.weight"));
  return {};
}

// Every n-th layer is full, or a truth a layer: has it a window?
Status read_layer_kinds(const GgufKeys& in, ModelConfig* c) {
  KVASIR_TRY(in.get("attention.sliding_window", &c->window));
  const GgufValue* pattern = in.find("attention.sliding_window_pattern");
  if (!pattern) return {};
  if (pattern->kind != GgufKind::array) {
    int32_t n = 0;
    KVASIR_TRY(in.get("attention.sliding_window_pattern", &n));
    if (n > 0) c->set_window_pattern(n);
    return {};
  }
  if (pattern->element != GgufKind::boolean || int64_t(pattern->count) != c->layers)
    return invalid_argument(cat(in.file().name(), ": attention.sliding_window_pattern must be a truth a layer"));
  c->layer_kinds.assign(size_t(c->layers), {});
  for (size_t i = 0; i < c->layer_kinds.size(); ++i) c->layer_kinds[i].windowed = pattern->data[i] != 0;
  return {};
}

// One number, or one a layer: the model's is then the first, and what each has only where they differ.
Status read_sizes(const GgufKeys& in, std::string_view field, const ModelConfig& c, int32_t* all,
                  std::vector<int32_t>* each) {
  const GgufValue* v = in.find(field);
  if (!v || v->kind != GgufKind::array) return *all > 0 ? in.get(field, all) : in.need(field, all);
  const bool ints = v->element == GgufKind::i32 || v->element == GgufKind::u32;
  if (!ints || int64_t(v->count) != c.layers || c.layers < 1)
    return invalid_argument(cat(in.file().name(), ": ", in.key(field), " must be a whole number, or one a layer"));
  each->resize(size_t(c.layers));
  for (size_t i = 0; i < each->size(); ++i) std::memcpy(&(*each)[i], v->data + 4 * i, 4);
  *all = each->front();
  if (std::count(each->begin(), each->end(), *all) == std::ssize(*each)) each->clear();
  return {};
}

Status read_decoder(const GgufKeys& in, ModelConfig* c) {
  KVASIR_TRY(in.need("context_length", &c->context));
  KVASIR_TRY(in.need("block_count", &c->layers));
  KVASIR_TRY(in.need("embedding_length", &c->hidden));
  KVASIR_TRY(read_sizes(in, "feed_forward_length", *c, &c->ffn, &c->layer_ffn));
  KVASIR_TRY(in.need("attention.head_count", &c->heads));
  c->kv_heads = c->heads;
  KVASIR_TRY(read_sizes(in, "attention.head_count_kv", *c, &c->kv_heads, &c->layer_kv_heads));
  c->head_dim = c->heads > 0 ? c->hidden / c->heads : 0;
  KVASIR_TRY(in.get("attention.key_length", &c->head_dim));
  int32_t value_length = c->head_dim;
  KVASIR_TRY(in.get("attention.value_length", &value_length));
  // Latent attention's are its own (deepseek.cc).
  if (value_length != c->head_dim && !in.file().value(in.key("attention.kv_lora_rank")))
    return invalid_argument(
        cat(in.file().name(), ": values of ", value_length, " beside keys of ", c->head_dim, " are not supported"));
  KVASIR_TRY(in.get(c->norm == NormKind::rms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon",
                    &c->norm_eps));
  const GgufTensor* embedding = in.file().tensor("token_embd.weight");
  if (!embedding) return invalid_argument(cat(in.file().name(), ": the tensor token_embd.weight is missing"));
  if (embedding->dims[1] > INT32_MAX)
    return invalid_argument(cat(in.file().name(), ": token_embd.weight is too large"));
  c->vocab = int32_t(embedding->dims[1]);  // rows that exist decide, whatever vocab_size says

  c->rope.rotary_dim = c->head_dim;
  KVASIR_TRY(in.get("rope.dimension_count", &c->rope.rotary_dim));
  KVASIR_TRY(in.get("rope.freq_base", &c->rope.base));
  KVASIR_TRY(in.get("rope.freq_base_swa", &c->local_rope.base));
  KVASIR_TRY(read_scaling(in, c));
  return read_layer_kinds(in, c);
}

// Biases have no keys: they are there, or not.
void find_biases(const Gguf& file, ModelConfig* c) {
  auto has = [&file](std::string_view name) { return file.tensor(name) != nullptr; };
  c->qkv_bias = has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias");
  c->out_bias = has("blk.0.attn_output.bias");
  c->mlp_bias = has("blk.0.ffn_down.bias");
  c->head_bias = has("output.bias");
  c->norm_bias = has("blk.0.attn_norm.bias") || has("blk.0.attn_norm_2.bias");
}

}  // namespace

Result<ModelConfig> config_from_gguf(const Gguf& gguf) {
  auto general = gguf.string("general.architecture");
  if (!general) return invalid_argument(cat(gguf.name(), ": the key general.architecture is missing"));
  const Architecture* a = find_gguf_architecture(*general);
  if (!a)
    return invalid_argument(cat(gguf.name(), ": the architecture is ", utf8_made_valid(general->substr(0, 64)),
                                "; the known ones are ", known_architectures()));
  ModelConfig c;
  c.architecture = a->name;
  c.from_gguf = true;
  c.name = utf8_made_valid(gguf.string("general.name").value_or(a->name));  // shown to clients
  if (a->family) a->family(c);
  if (a->gguf_turns_neighbours) c.rope.style = c.local_rope.style = attention::RopeStyle::gptj;
  const GgufKeys in(gguf, std::string(*general));
  KVASIR_TRY(read_decoder(in, &c));
  find_biases(gguf, &c);
  if (a->metadata) KVASIR_TRY(a->metadata(in, c));
  int32_t pooling = 0;
  KVASIR_TRY(in.get("pooling_type", &pooling));
  c.pooling = pooling_from_gguf(pooling, c.pooling);
  KVASIR_TRY(in.judge_unread());
  if (a->derive) a->derive(c);
  c.settle_longrope();
  KVASIR_TRY(c.validate());
  return c;
}

}  // namespace kvasir::model
