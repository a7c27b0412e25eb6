// Rows of the operator's inputs and outputs as float32, whatever their element type.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kvcache/quant.h"

namespace kvasir::attention {

// n elements from `first` on; FP8 times `scale`.
inline void read_elements(const void* data, DType type, int64_t first, int64_t n, float scale, float* out) {
  const uint8_t* at = static_cast<const uint8_t*>(data) + dtype_bytes(type, first);
  if (type == DType::f8_e4m3) {
    for (int64_t i = 0; i < n; ++i) out[i] = e4m3_to_f32(at[i]) * scale;
  } else if (type == DType::i8) {
    for (int64_t i = 0; i < n; ++i) out[i] = float(int8_t(at[i])) * scale;
  } else {
    kvcache::decode(at, n, type, out);
  }
}

inline void write_elements(const float* x, DType type, int64_t first, int64_t n, float scale, void* data) {
  uint8_t* at = static_cast<uint8_t*>(data) + dtype_bytes(type, first);
  if (type == DType::f8_e4m3) {
    float inverse = 1.0f / scale;
    for (int64_t i = 0; i < n; ++i) at[i] = f32_to_e4m3(x[i] * inverse);
  } else {
    kvcache::encode(x, n, type, at);
  }
}

// A query as E4M3 in units of `scale`, as fp8_query has it.
inline float as_fp8(float x, float scale) { return e4m3_to_f32(f32_to_e4m3(x * (1.0f / scale))) * scale; }

// Where token `t`'s q head, k head or v head starts in the (maybe packed) input, in elements.
enum class InputPart { query, key, value };
inline const void* part_tensor(const Attributes& a, const Tensors& t, InputPart part) {
  return a.packed_qkv || part == InputPart::query ? t.query : part == InputPart::key ? t.key : t.value;
}
inline int64_t part_head(const Attributes& a, InputPart part, int64_t head) {
  return part == InputPart::query ? head
         : part == InputPart::key ? a.num_heads + head
                                  : a.num_heads + a.num_kv_heads + head;
}
inline int64_t part_element(const Attributes& a, InputPart part, int64_t token, int64_t head) {
  if (a.packed_qkv) return (token * (a.num_heads + 2 * a.num_kv_heads) + part_head(a, part, head)) * a.head_dim;
  return (token * (part == InputPart::query ? a.num_heads : a.num_kv_heads) + head) * a.head_dim;
}
inline float part_scale(const Attributes& a, const Tensors& t, InputPart part) {
  return part == InputPart::query ? a.q_scale : part == InputPart::key ? t.cache.k_scale : t.cache.v_scale;
}

}  // namespace kvasir::attention
