#include "model/config.h"

#include <algorithm>
#include <cmath>

#include "core/cat.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

Status in_range(const char* field, double value, double low, double high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(cat("the model's ", field, " is ", value, "; it must be from ", low, " to ", high));
}

}  // namespace

Status ModelConfig::validate() const {
  if (!find_architecture(architecture))
    return invalid_argument(
        cat("the model's architecture is ", architecture, "; the known ones are ", known_architectures()));
  KVASIR_TRY(in_range("vocabulary size", vocab, 1, 1 << 21));
  KVASIR_TRY(in_range("context length", context, 1, 1 << 24));
  KVASIR_TRY(in_range("number of layers", layers, 1, 1024));
  KVASIR_TRY(in_range("hidden size", hidden, 1, 1 << 17));
  KVASIR_TRY(in_range("feed-forward size", ffn, 1, 1 << 19));
  KVASIR_TRY(in_range("number of heads", heads, 1, 1024));
  KVASIR_TRY(in_range("number of key/value heads", kv_heads, 1, heads));
  if (latent.on()) KVASIR_TRY(validate_latent());
  KVASIR_TRY(in_range("head size", head_dim, 2, latent.on() ? 576 : 512));
  if (heads % kv_heads != 0)
    return invalid_argument(
        cat("the model has ", heads, " heads, which is no multiple of its ", kv_heads, " key/value heads"));
  int32_t longest_head = head_dim;
  for (int32_t n : layer_head_dim) longest_head = std::max(longest_head, n);
  for (const attention::RopeConfig* r : {&rope, &local_rope}) {
    KVASIR_TRY(in_range("rotary dimension", r->rotary_dim, 0, longest_head));
    if (r->rotary_dim % 2 != 0)
      return invalid_argument(cat("the model's rotary dimension is ", r->rotary_dim, "; it must be even"));
    KVASIR_TRY(in_range("rope base", r->base, 1.000001, 1e15));
    KVASIR_TRY(in_range("rope scaling factor", r->factor, 1e-6, 1e6));
  }
  if (!rope_divisors.empty() && int32_t(rope_divisors.size()) != rope.rotary_dim / 2)
    return invalid_argument(
        cat("the model brings ", rope_divisors.size(), " rope factors for ", rope.rotary_dim / 2, " frequencies"));
  KVASIR_TRY(in_range("norm epsilon", norm_eps, 0, 1));
  KVASIR_TRY(in_range("attention window", window, 0, 1 << 24));
  if (!layer_kinds.empty() && int64_t(layer_kinds.size()) != layers)
    return invalid_argument(cat("the model says how ", layer_kinds.size(), " of its ", layers, " layers attend"));
  if (!alibi_slopes.empty() && int64_t(alibi_slopes.size()) != heads)
    return invalid_argument(cat("the model has ", alibi_slopes.size(), " ALiBi slopes for ", heads, " heads"));
  for (const auto& [field, value] : {std::pair<const char*, float>{"embedding multiplier", embedding_scale},
                                     {"residual multiplier", residual_scale},
                                     {"logit multiplier", logit_scale}})
    KVASIR_TRY(in_range(field, value, 1e-6, 1e6));
  KVASIR_TRY(in_range("attention multiplier", query_scale, 0, 1e6));
  KVASIR_TRY(in_range("softcap of scores", attention_softcap, 0, 1e6));
  KVASIR_TRY(in_range("softcap of logits", logit_softcap, 0, 1e6));
  KVASIR_TRY(in_range("growth of queries with position", query_position_slope, 0, 1e3));
  KVASIR_TRY(in_range("positions of one query scale", query_position_unit, 1, 1 << 24));
  if (residual_scale != 1 && (norm != NormKind::rms || !input_norms || output_norms || embedding_norm))
    return invalid_argument("the model has a residual multiplier beside norms that it cannot be folded into");
  if (output_norms && norm != NormKind::rms)
    return invalid_argument("the model has layer norms after its sublayers; only RMS norms are supported there");
  KVASIR_TRY(in_range("number of layers that predict further tokens", next_layers, 0, 1024));
  KVASIR_TRY(in_range("first position", first_position, 0, 1 << 16));
  KVASIR_TRY(in_range("window to each side", window_each_way, 0, 1 << 16));
  KVASIR_TRY(in_range("number of token types", token_types, 0, 1 << 10));
  KVASIR_TRY(in_range("number of labels", labels, 0, 1 << 16));
  if (encoder && (kv_heads != heads || heads * head_dim != hidden))
    return invalid_argument(cat("the encoder has ", heads, " heads of ", head_dim, " for a hidden size of ", hidden));
  if (encoder_layers > 0) {
    if (window > 0)
      return invalid_argument(cat("the model's attention window is ", window, "; encoder-decoders have none"));
    KVASIR_TRY(in_range("number of encoder layers", encoder_layers, 1, 1024));
    KVASIR_TRY(in_range("number of decoder layers", decoder_layers, 1, 1024));
    KVASIR_TRY(in_range("decoder_start_token_id", decoder_start, 0, vocab - 1));
    KVASIR_TRY(in_range("relative_attention_num_buckets", bias_buckets, 4, 1 << 12));
    const auto exact = bias_buckets / 2;  // distances have a bucket of their own up to here
    KVASIR_TRY(in_range("relative_attention_max_distance", bias_reach, exact + 1, 1 << 16));
  }
  KVASIR_TRY(validate_layer_sizes());
  if (linear.taps > 0 || gated_attention) {
    KVASIR_TRY(linear.validate());
    bool full = false;
    for (int32_t i = 0; i < layers; ++i) full |= !is_linear(i);
    if (!full)
      return invalid_argument("the model has layers of linear attention only; one of full attention is needed");
  }
  KVASIR_TRY(experts.validate(layers));
  if (experts.routing.experts > 0 && (!gated || !input_norms || output_norms))
    return invalid_argument("the model has experts without gates, or beside norms that are not supported with them");
  return in_range("step time in ms", step_ms, 0, 60000);
}

Status ModelConfig::validate_latent() const {
  KVASIR_TRY(in_range("kv_lora_rank", latent.rank, 2, 512));
  KVASIR_TRY(in_range("qk_rope_head_dim", latent.rope, 2, 512));
  KVASIR_TRY(in_range("qk_nope_head_dim", latent.nope, 1, 1 << 10));
  KVASIR_TRY(in_range("v_head_dim", latent.value, 1, 1 << 10));
  return in_range("q_lora_rank", latent.query_rank, 0, 1 << 16);
}

Status ModelConfig::validate_layer_sizes() const {
  struct Field {
    const char* name;
    const std::vector<int32_t>& values;
    double low, high;
  };
  for (const Field& f : {Field{"feed-forward size", layer_ffn, 1, 1 << 19},
                         Field{"number of key/value heads", layer_kv_heads, 1, double(heads)},
                         Field{"head size", layer_head_dim, 2, 512}}) {
    if (f.values.empty()) continue;
    if (!sizes_by_layer)
      return invalid_argument(cat("the model's ", f.name, " differs from layer to layer, which is not supported in ",
                                  architecture, " models"));
    if (int64_t(f.values.size()) != layers)
      return invalid_argument(
          cat("the model says the ", f.name, " of ", f.values.size(), " of its ", layers, " layers"));
    for (int32_t v : f.values) KVASIR_TRY(in_range(f.name, v, f.low, f.high));
  }
  for (int32_t n : layer_kv_heads)
    if (heads % n != 0)
      return invalid_argument(
          cat("the model has ", heads, " heads, which is no multiple of the ", n, " key/value heads of some layer"));
  KVASIR_TRY(in_range("number of layers that share a cache", shared_kv_layers, 0, layers - 1));
  KVASIR_TRY(in_range("numbers that a token gives to each layer", layer_input, 0, 1 << 13));
  bool seen[2] = {};
  for (int32_t i = 0; i < layers; ++i) {
    const int32_t of = cache_layer(i);
    if (of < 0) return invalid_argument(cat("the model's layer ", i, " shares a cache that no layer of its kind has"));
    int32_t first = 0;
    while (windowed(first) != windowed(i)) ++first;
    if (kv_heads_of(i) != kv_heads_of(first) || head_dim_of(i) != head_dim_of(first))
      return invalid_argument(
          cat("the model's layers ", first, " and ", i,
              " have caches of different shapes; only those with a window may differ from the others"));
    seen[windowed(i)] = true;
  }
  if (two_cache_shapes() && !(seen[0] && seen[1]))
    return invalid_argument(
        "the model has sizes for layers with a window and without one, and layers of one kind only");
  return {};
}

int32_t ModelConfig::cache_layer(int32_t layer) const {
  if (layer < layers - shared_kv_layers) return layer;
  int32_t of = layers - shared_kv_layers - 1;
  while (of >= 0 && windowed(of) != windowed(layer)) --of;
  return of;
}

int64_t ModelConfig::kv_bytes_per_token(const kvcache::CacheForm& form, bool windowed_only) const {
  int64_t out = 0;
  for (int32_t i = 0; i < layers; ++i)
    if (has_cache(i) && (windowed(i) || !windowed_only))
      out += (latent.on() ? 1 : 2) * int64_t(kv_heads_of(i)) * form.row_bytes(head_dim_of(i));
  return out;
}

int64_t ModelConfig::state_bytes() const {
  int64_t out = 0;
  for (int32_t i = 0; i < layers; ++i)
    if (is_linear(i)) out += linear.state_floats() * int64_t(sizeof(float));
  return out;
}

void ModelConfig::set_window_pattern(int32_t pattern) {
  layer_kinds.assign(size_t(std::clamp(layers, 0, 1 << 10)), {});
  for (size_t i = 0; i < layer_kinds.size(); ++i) layer_kinds[i].windowed = (int64_t(i) + 1) % pattern != 0;
}

void ModelConfig::settle_longrope() {
  if (rope.scaling != attention::RopeScaling::longrope || rope.attention_factor != 0 || rope.original_context < 2)
    return;
  const double factor = double(context) / double(rope.original_context);
  rope.attention_factor = factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(double(rope.original_context)));
}

int64_t ModelConfig::idle_parameters() const {
  const int64_t each = 3 * int64_t(experts.ffn) * hidden;
  int64_t out = 0;
  for (int32_t i = 0; i < layers; ++i)
    if (experts.in_layer(i)) out += each * (experts.routing.experts - experts.routing.used);
  return out;
}

ModelInfo ModelConfig::info() const {
  ModelInfo i;
  i.name = name, i.architecture = architecture, i.quantization = quantization;
  i.vocab_size = vocab, i.context_length = context;
  i.layers = layers, i.hidden = hidden, i.heads = heads, i.kv_heads = kv_heads, i.head_dim = head_dim;
  i.sliding_window = window;
  i.pooling = pooling, i.encoder = encoder, i.labels = labels, i.two_separators = two_separators,
  i.next_layers = next_layers;
  if (encoder_layers > 0) i.decoder_start = decoder_start, --i.context_length;  // which takes a place of its own
  for (int32_t layer = 0; layer < layers; ++layer) i.windowed_layers += windowed(layer);
  i.state_bytes = state_bytes();
  return i;
}

}  // namespace kvasir::model
