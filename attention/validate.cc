#include "attention/validate.h"

#include <bit>
#include <cmath>

#include "core/cat.h"
#include "kvcache/form.h"

namespace kvasir::attention {
namespace {

using kvcache::CacheView;
using kvcache::QuantKind;

Status bad(const char* field, std::string message) { return invalid_argument(std::move(message)).with_field(field); }

bool positive(float x) { return std::isfinite(x) && x > 0; }
bool is_float(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }

Status validate_heads(const Attributes& a) {
  if (a.num_heads < 1 || a.num_heads > 4096)
    return bad("num_heads", cat("num_heads is ", a.num_heads, "; it must be from 1 to 4096"));
  if (a.num_kv_heads < 1 || a.num_heads % a.num_kv_heads != 0)
    return bad("num_kv_heads", cat("num_kv_heads is ", a.num_kv_heads, "; it must be at least 1 and divide num_heads, ",
                                   "which is ", a.num_heads));
  if (a.head_dim < 1 || a.head_dim > 576)
    return bad("head_dim", cat("head_dim is ", a.head_dim, "; it must be from 1 to 576"));
  if (a.unread_columns < 0 || a.unread_columns > a.head_dim)
    return bad("unread_columns",
               cat("unread_columns is ", a.unread_columns, "; it must be from 0 to head_dim, which is ", a.head_dim));
  return {};
}

Status validate_scalars(const Attributes& a) {
  if (!positive(a.q_scaling))
    return bad("q_scaling", cat("q_scaling is ", a.q_scaling, "; it must be finite and above 0"));
  if (!std::isfinite(a.softcap) || a.softcap < 0)
    return bad("softcap", cat("softcap is ", a.softcap, "; it must be finite and at least 0 (0: none)"));
  if (!positive(a.q_scale)) return bad("q_scale", cat("q_scale is ", a.q_scale, "; it must be finite and above 0"));
  if (a.fp8_query && !is_float(a.io))
    return bad("fp8_query", cat("fp8_query is given and io_dtype is ", dtype_name(a.io),
                                "; queries that become E4M3 are float32, float16 or bfloat16"));
  if (!positive(a.out_scale))
    return bad("out_scale", cat("out_scale is ", a.out_scale, "; it must be finite and above 0"));
  if (!is_float(a.io) && a.io != DType::f8_e4m3 && a.io != DType::i8)
    return bad("io_dtype",
               cat("io_dtype is ", dtype_name(a.io), "; it must be float32, float16, bfloat16, float8_e4m3 ",
                   "or (KeyValueCache only) int8"));
  if (!is_float(a.out) && a.out != DType::f8_e4m3 && a.out != DType::i8)
    return bad("out_dtype", cat("out_dtype is ", dtype_name(a.out), "; it must be float32, float16, bfloat16, ",
                                "float8_e4m3 or (KeyValueCache only) int8"));
  if (!a.alibi_slopes.empty() && int(a.alibi_slopes.size()) != a.num_heads)
    return bad("alibi_slopes", cat("alibi_slopes has ", a.alibi_slopes.size(), " entries; it needs one for each of ",
                                   a.num_heads, " heads"));
  if (const size_t n = a.relative_bias.size();
      n > 0 && (n % size_t(a.num_heads) != 0 || n / size_t(a.num_heads) % 2 != 1))
    return bad("relative_bias", cat("relative_bias has ", n, " entries; it needs 2 * reach + 1 for each of ",
                                    a.num_heads, " heads, for whatever reach"));
  for (float b : a.relative_bias)
    if (!std::isfinite(b)) return bad("relative_bias", cat("relative_bias holds ", b, "; it must be finite"));
  for (float s : a.alibi_slopes)
    if (!std::isfinite(s)) return bad("alibi_slopes", cat("alibi_slopes holds ", s, "; every slope must be finite"));
  return {};
}

Status validate_window(const Attributes& a) {
  if (a.window < 0) return bad("window", cat("window is ", a.window, "; it must be at least 0 (0: none)"));
  if (a.sinks < 0 || (a.sinks > 0 && a.sinks >= a.window))
    return bad("sinks", cat("sinks is ", a.sinks, "; sinks are counted inside the window, so they must be from 0 to ",
                            "window-1, and window is ", a.window));
  if (a.cyclic_capacity < 0 || (a.cyclic_capacity > 0 && (a.window == 0 || a.cyclic_capacity < a.window)))
    return bad("cyclic_capacity",
               cat("cyclic_capacity is ", a.cyclic_capacity,
                   "; a cyclic cache needs a window and at least window slots, and window is ", a.window));
  if (a.streaming_positions && (a.window == 0 || a.rope.style == RopeStyle::none))
    return bad("streaming_positions", "streaming_positions needs both a window and rope");
  return {};
}

Status validate_rope(const Attributes& a) {
  const Rope& r = a.rope;
  if (r.style == RopeStyle::none) return {};
  if (r.rotary_dim < 2 || r.rotary_dim % 2 != 0 || r.rotary_dim > a.head_dim)
    return bad("rope.rotary_dim", cat("rope.rotary_dim is ", r.rotary_dim, "; it must be even, at least 2 and at most ",
                                      "head_dim, which is ", a.head_dim));
  if (int(r.inv_freq.size()) * 2 != r.rotary_dim)
    return bad("rope.inv_freq",
               cat("rope.inv_freq has ", r.inv_freq.size(), " entries; it needs rotary_dim/2 = ", r.rotary_dim / 2));
  for (float f : r.inv_freq)
    if (!std::isfinite(f)) return bad("rope.inv_freq", cat("rope.inv_freq holds ", f, "; it must be finite"));
  if (!positive(r.magnitude))
    return bad("rope.magnitude", cat("rope.magnitude is ", r.magnitude, "; it must be finite and above 0"));
  return {};
}

// The last element a view can reach plus one, or -1 when it does not fit 63 bits.
int64_t extent(const kvcache::Strides& s, const CacheView& c, int64_t row) {
  int64_t end = row, part;
  const int64_t steps[4][2] = {
      {s.token, c.max_tokens - 1}, {s.layer, c.layers - 1}, {s.kv, 1}, {s.head, c.kv_heads - 1}};
  for (const auto& step : steps)
    if (step[0] < 0 || __builtin_mul_overflow(step[0], step[1], &part) || __builtin_add_overflow(end, part, &end))
      return -1;
  return end;
}

Status validate_quant(const CacheView& c) {
  if (c.quant == QuantKind::none) {
    if (!is_float(c.dtype))
      return bad("cache_dtype", cat("cache_dtype is ", dtype_name(c.dtype),
                                    " without quantization; it must be float32, ", "float16 or bfloat16"));
    return {};
  }
  if (c.quant == QuantKind::per_tensor) {
    if (c.dtype != DType::i8 && c.dtype != DType::f8_e4m3)
      return bad("cache_dtype", cat("cache_dtype is ", dtype_name(c.dtype),
                                    " with one scale per tensor; it must be int8 ", "or float8_e4m3"));
    if (!positive(c.k_scale)) return bad("k_scale", cat("k_scale is ", c.k_scale, "; it must be finite and above 0"));
    if (!positive(c.v_scale)) return bad("v_scale", cat("v_scale is ", c.v_scale, "; it must be finite and above 0"));
    return {};
  }
  if (c.dtype != DType::i8 && c.dtype != DType::i4)
    return bad("cache_dtype",
               cat("cache_dtype is ", dtype_name(c.dtype), " with a scale per group; it must be int8 or int4"));
  if (c.quant_group < 1 || !std::has_single_bit(uint32_t(c.quant_group)) || c.head_dim % c.quant_group != 0)
    return bad("quant_group", cat("quant_group is ", c.quant_group, "; it must be a power of two that divides ",
                                  "head_dim, which is ", c.head_dim));
  if (c.scale_dtype != DType::f32 && c.scale_dtype != DType::f16)
    return bad("scale", cat("scale is ", dtype_name(c.scale_dtype), "; it must be float32 or float16"));
  if (c.scale == nullptr) return bad("scale", "scale is absent; a cache quantized by group needs it");
  if (extent(c.scale_strides, c, c.head_dim / c.quant_group) < 0)
    return bad("scale", "the strides of scale are negative or reach past 2^63 elements");
  return {};
}

// Values are the keys as they lie.
Status validate_keys_alone(const Attributes& a, const CacheView& c) {
  if (a.cyclic_capacity > 0)
    return bad("cyclic_capacity", cat("cyclic_capacity is ", a.cyclic_capacity,
                                      " and the cache holds keys alone (kv stride 0); a cyclic one holds values, too"));
  if (c.quant == QuantKind::group && c.scale_strides.kv != 0)
    return bad("scale", cat("scale has a kv stride of ", c.scale_strides.kv, "; the cache's is 0, and so must it be"));
  if (c.quant == QuantKind::per_tensor && c.v_scale != c.k_scale)
    return bad("v_scale", cat("v_scale is ", c.v_scale, " and k_scale ", c.k_scale,
                              "; a cache of keys alone (kv stride 0) has one scale"));
  return {};
}

}  // namespace

Status validate_attributes(const Attributes& a, const Limits& limits) {
  KVASIR_TRY(validate_heads(a));
  KVASIR_TRY(validate_scalars(a));
  KVASIR_TRY(validate_window(a));
  KVASIR_TRY(validate_rope(a));
  if (a.index_mode == kvcache::IndexMode::page_table && (a.page_size < 1 || a.page_size > kvcache::kMostPageTokens))
    return bad("page_size", cat("page_size is ", a.page_size, "; it must be from 1 to ", kvcache::kMostPageTokens));
  if (limits.max_batch < 0 || limits.max_tokens < 0 || limits.max_kvlen < 0 || limits.max_pages < 0)
    return bad("limits", "limits must not be negative");
  if (limits.cache_tokens < 1)
    return bad("limits", cat("limits.cache_tokens is ", limits.cache_tokens, "; it must be the MaxT of the cache"));
  return {};
}

Status validate_cache(const Attributes& a, const CacheView& c, int32_t layer) {
  if (c.data == nullptr) return bad("cache", "cache is absent");
  if (c.head_dim != a.head_dim)
    return bad("cache", cat("cache has head_dim ", c.head_dim, "; the operator's is ", a.head_dim));
  if (c.kv_heads != a.num_kv_heads)
    return bad("cache", cat("cache has ", c.kv_heads, " heads; num_kv_heads is ", a.num_kv_heads));
  if (c.layers < 1) return bad("num_layer", cat("num_layer is ", c.layers, "; it must be at least 1"));
  if (layer < 0 || layer >= c.layers)
    return bad("layer_idx", cat("layer_idx is ", layer, "; it must be from 0 to num_layer-1, which is ", c.layers - 1));
  if (c.max_tokens < 1) return bad("cache", cat("cache holds ", c.max_tokens, " tokens; it must hold at least 1"));
  if (c.dtype == DType::i4 && (c.head_dim % 2 != 0 || c.strides.token % 2 != 0 || c.strides.layer % 2 != 0 ||
                               c.strides.kv % 2 != 0 || c.strides.head % 2 != 0))
    return bad("cache", "an int4 cache packs two elements a byte: head_dim and every stride must be even");
  if (extent(c.strides, c, c.head_dim) < 0)
    return bad("cache", "the strides of cache are negative or reach past 2^63 elements");
  KVASIR_TRY(validate_quant(c));
  if (kvcache::keys_alone(c)) KVASIR_TRY(validate_keys_alone(a, c));
  if (a.io == DType::f8_e4m3 && a.append && !(c.quant == QuantKind::per_tensor && c.dtype == DType::f8_e4m3))
    return bad("io_dtype", "float8_e4m3 keys and values carry the cache's scales, so the cache must be float8_e4m3");
  return {};
}

Status validate_tensors(const Attributes& a, const Tensors& t) {
  KVASIR_TRY(validate_cache(a, t.cache, t.layer));
  if (t.query == nullptr) return bad("query", "query is absent");
  if (a.io == DType::i8) return bad("io_dtype", "io_dtype int8 is for KeyValueCache; attention needs a float type");
  if (a.out == DType::i8) return bad("out_dtype", "out_dtype int8 is for KeyValueCache; attention gives a float type");
  if (t.output == nullptr) return bad("attn_output", "attn_output is absent");
  if (a.append && !a.packed_qkv && (t.key == nullptr || t.value == nullptr))
    return bad("current_key", "current_key and current_value are absent; they are needed unless append is false");
  if (t.qkv_bias != nullptr && !a.packed_qkv) return bad("qkv_bias", "qkv_bias needs packed_qkv");
  if (t.attn_mask != nullptr && t.mask_row_stride < 1)
    return bad("attn_mask", cat("attn_mask has a row stride of ", t.mask_row_stride, "; it must be at least 1"));
  if (t.attn_mask != nullptr && t.mask_head_stride < 0)
    return bad("attn_mask", cat("attn_mask has a head stride of ", t.mask_head_stride, "; it must be at least 0"));
  if (t.attn_mask != nullptr && !is_float(a.io))
    return bad("attn_mask", "attn_mask is of io_dtype, which float8_e4m3 cannot serve");
  if (a.return_lse && t.lse == nullptr) return bad("lse", "return_lse is set and lse is absent");
  return {};
}

Status validate_tensors(const Attributes& a, const KvcTensors& t) {
  KVASIR_TRY(validate_cache(a, t.cache, t.layer));
  if (a.append && (t.key == nullptr || t.value == nullptr))
    return bad("current_key", "current_key and current_value are absent; they are needed unless append is false");
  if ((t.key_out == nullptr) != (t.value_out == nullptr))
    return bad("key",
               "one of the outputs key and value is absent; give both, or neither where nothing is to be given back");
  if (a.window > 0)
    return bad("window", cat("window is ", a.window, "; KeyValueCache gives back every token, so it has no window"));
  if (a.io == DType::i8 && !(t.cache.dtype == DType::i8 && t.cache.quant == QuantKind::per_tensor))
    return bad("io_dtype", "io_dtype int8 is stored as it is, so the cache must be int8 with one scale per tensor");
  if (a.out == DType::i8 && !(t.cache.dtype == DType::i8 && t.cache.quant == QuantKind::per_tensor))
    return bad("out_dtype", "out_dtype int8 is what is stored, so the cache must be int8 with one scale per tensor");
  if (t.num_repeat < 1) return bad("num_repeat", cat("num_repeat is ", t.num_repeat, "; it must be at least 1"));
  return {};
}

}  // namespace kvasir::attention
