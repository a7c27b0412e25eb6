// The quantization rule, once. Every back end must produce these bytes: float32 arithmetic, IEEE
// division, round half to even. A NaN quantizes to 0 and takes no part in the absolute maximum.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "kvcache/view.h"

namespace kvasir::kvcache {

constexpr float kMinScale = 1e-5f;
constexpr float kMaxF16 = 65504.0f;

constexpr int quant_max(DType type) { return type == DType::i4 ? 7 : 127; }

// The scale that is stored for a group, as it reads back (after rounding to float16 if it is one).
inline float group_scale(float absmax, DType type, DType scale_dtype) {
  float scale = absmax / float(quant_max(type));
  if (!(scale > kMinScale)) scale = kMinScale;
  if (scale_dtype == DType::f16) return f16_to_f32(f32_to_f16(scale < kMaxF16 ? scale : kMaxF16));
  return scale;
}

// clamp(round_half_even(x), -limit, limit) for an x that was divided or multiplied already.
inline int round_clamp(float x, int limit) {
  if (!(x == x)) return 0;
  if (x >= float(limit)) return limit;
  if (x <= float(-limit)) return -limit;
  return int(std::nearbyint(x));
}

// n float32 values as `type` (float32, float16, bfloat16) with one rounding, and back.
void encode(const float* x, int64_t n, DType type, void* out);
void decode(const void* in, int64_t n, DType type, float* x);

// Where one head's row begins. `elements` are of dtype, so int4 rows start at elements/2 bytes.
inline int64_t row_element(const Strides& s, int64_t token, int64_t layer, int64_t head, bool value) {
  return token * s.token + layer * s.layer + head * s.head + (value ? s.kv : 0);
}

// One head's K or V of one token: into the cache by the view's rule, and as it reads back.
// `row` holds head_dim floats. A store touches exactly the row's bytes and its scales.
void store_row(const CacheView& cache, int64_t token, int64_t layer, int64_t head, bool value, const float* row);
void load_row(const CacheView& cache, int64_t token, int64_t layer, int64_t head, bool value, float* row);

}  // namespace kvasir::kvcache
