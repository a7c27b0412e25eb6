#include "model/cache_form.h"

#include <cmath>

#include "core/cat.h"
#include "core/log.h"

namespace kvasir::model {
namespace {

// Of a layer's keys or values; 0 when the checkpoint has none.
Result<float> scale_of(Weights& weights, int32_t layer, const char* which) {
  const std::string tensor = cat("blk.", layer, ".attn_", which, "_cache.scale");
  if (!weights.has(tensor)) return 0.0f;
  KVASIR_ASSIGN(HostTensor t, weights.get(tensor, 1, 1));
  float scale = 0;
  dequantize(t.type, t.data, 1, &scale);
  if (std::isfinite(scale) && scale > 0) return scale;
  return invalid_argument(
      cat("the checkpoint's ", which, "_scale of layer ", layer, " is ", scale, "; it must be finite and above 0"));
}

Status read_scales(const kvcache::FormWish& wish, int32_t layers, Weights& weights, kvcache::CacheForm* form) {
  bool some = false, all = true;
  std::vector<kvcache::TensorScales> scales;
  for (int32_t layer = 0; layer < layers; ++layer) {
    KVASIR_ASSIGN(float k, scale_of(weights, layer, "k"));
    KVASIR_ASSIGN(float v, scale_of(weights, layer, "v"));
    KVASIR_ASSIGN(const float q, scale_of(weights, layer, "q"));
    if (wish.k_scale > 0) k = float(wish.k_scale);
    if (wish.v_scale > 0) v = float(wish.v_scale);
    some |= k > 0 || v > 0, all &= k > 0 && v > 0;
    scales.push_back({k > 0 ? k : 1, v > 0 ? v : 1, q > 0 ? q : 1});
  }
  if (form->quant() != kvcache::QuantKind::per_tensor) return {};  // they are for other caches
  if (form->dtype == DType::i8 && !all)
    return invalid_argument(
               "kv_dtype is int8 with kv_group 0, and the checkpoint has no k_scale and v_scale for it; give "
               "kv_k_scale "
               "and kv_v_scale, or a kv_group")
        .with_field("kv_group");
  if (some && !all) log_warn("the checkpoint has scales for some layers' caches only; the others have 1");
  form->tensor_scales = std::move(scales);
  return {};
}

}  // namespace

Result<kvcache::CacheForm> cache_form_of(const ModelConfig& config, const kvcache::FormWish& wish, DType otherwise,
                                         Weights& weights) {
  kvcache::FormWish w = wish;
  if (w.dtype == "auto" && w.group < 0 && w.scale_dtype == "auto") w.dtype = config.kv.dtype, w.group = config.kv.group;
  if (w.layout == "auto") w.layout = config.kv.layout;
  for (int32_t other : config.layer_head_dim) KVASIR_TRY(kvcache::cache_form(w, other, otherwise).status());
  KVASIR_ASSIGN(auto form, kvcache::cache_form(w, config.head_dim, otherwise));
  KVASIR_TRY(read_scales(w, config.layers, weights, &form));
  return form;
}

CacheLayout cache_layout(const ModelConfig& config, const kvcache::CacheForm& form, int32_t page_size, bool apart) {
  const bool two = apart || config.two_cache_shapes();
  CacheLayout out;
  out.shapes.assign(two ? 2 : 1, {form, 0, config.kv_heads, config.head_dim, page_size, config.latent.on()});
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    CacheShape& of = out.shapes[two && config.windowed(layer) ? 1 : 0];
    of.kv_heads = config.kv_heads_of(layer), of.head_dim = config.head_dim_of(layer);
    out.places.push_back(config.has_cache(layer) ? of.layers++ : -1);
  }
  return out;
}

}  // namespace kvasir::model
