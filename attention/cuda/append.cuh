// Eight elements of a row on their way into the cache: read, rotated, quantized, written. Whoever appends does it with
// these, so that the same bits come of the same input.
#pragma once

#include "attention/cuda/device.cuh"
#include "attention/cuda/launch.h"

namespace kvasir::attention::cuda {

struct Vec8 {
  float x[8];
};

__device__ inline Vec8 load8(const void* base, DType type, int64_t i) {
  Vec8 v;
  switch (type) {
    case DType::f32: {
      const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(base) + i);
      float4 a = p[0], b = p[1];
      v = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      break;
    }
    case DType::f16: {
      uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const __half*>(base) + i);
      const __half* h = reinterpret_cast<const __half*>(&raw);
      for (int k = 0; k < 8; ++k) v.x[k] = __half2float(h[k]);
      break;
    }
    case DType::bf16: {
      uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(base) + i);
      const __nv_bfloat16* h = reinterpret_cast<const __nv_bfloat16*>(&raw);
      for (int k = 0; k < 8; ++k) v.x[k] = __bfloat162float(h[k]);
      break;
    }
    case DType::i4: {
      uint32_t raw = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(base) + i / 2);
      for (int k = 0; k < 8; ++k) v.x[k] = float(int((raw >> (4 * k) & 15) ^ 8) - 8);
      break;
    }
    default: {
      uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(base) + i);
      const uint8_t* b = reinterpret_cast<const uint8_t*>(&raw);
      for (int k = 0; k < 8; ++k) v.x[k] = type == DType::i8 ? float(int8_t(b[k])) : e4m3_float(b[k]);
    }
  }
  return v;
}

__device__ inline int round_clamp(float x, float limit) {
  return x != x ? 0 : int(fminf(fmaxf(rintf(x), -limit), limit));
}

__device__ inline void store8(void* base, DType type, int64_t i, const Vec8& v) {
  switch (type) {
    case DType::f32: {
      float4* p = reinterpret_cast<float4*>(static_cast<float*>(base) + i);
      p[0] = {v.x[0], v.x[1], v.x[2], v.x[3]};
      p[1] = {v.x[4], v.x[5], v.x[6], v.x[7]};
      break;
    }
    case DType::f16: {
      uint4 raw;
      __half* h = reinterpret_cast<__half*>(&raw);
      for (int k = 0; k < 8; ++k) h[k] = __float2half_rn(v.x[k]);
      *reinterpret_cast<uint4*>(static_cast<__half*>(base) + i) = raw;
      break;
    }
    case DType::bf16: {
      uint4 raw;
      __nv_bfloat16* h = reinterpret_cast<__nv_bfloat16*>(&raw);
      for (int k = 0; k < 8; ++k) h[k] = __float2bfloat16_rn(v.x[k]);
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(base) + i) = raw;
      break;
    }
    case DType::i4: {
      uint32_t raw = 0;
      for (int k = 0; k < 8; ++k) raw |= uint32_t(round_clamp(v.x[k], 7.0f) & 15) << (4 * k);
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(base) + i / 2) = raw;
      break;
    }
    default: {
      uint2 raw;
      uint8_t* b = reinterpret_cast<uint8_t*>(&raw);
      for (int k = 0; k < 8; ++k)
        b[k] = type == DType::i8 ? uint8_t(int(fminf(fmaxf(rintf(v.x[k]), -128.0f), 127.0f)))
                                 : __nv_cvt_float_to_fp8(v.x[k], __NV_SATFINITE, __NV_E4M3);
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(base) + i) = raw;
    }
  }
}

// As kvcache/quant.h: the value that quantizes is the value stored.
__device__ inline float group_scale(float absmax, DType type, DType scale_type) {
  float scale = __fdiv_rn(absmax, type == DType::i4 ? 7.0f : 127.0f);
  if (!(scale > 1e-5f)) scale = 1e-5f;
  return scale_type == DType::f16 ? __half2float(__float2half_rn(fminf(scale, 65504.0f))) : scale;
}

// Quantize 8 elements of a row; `v` becomes what the cache returns, but for the scale of a tensor, which no element
// meets: it would round once more. Written where `row` and `scales` are given.
// `as_is`: they are the cache's int8 already; `in_units`: in units of its scale.
__device__ inline void through_cache(const CacheLayer& c, bool as_is, bool in_units, bool value, int lane,
                                     int lanes_in_group, Vec8& v, uint8_t* row, uint8_t* scales) {
  if (c.quant == int(kvcache::QuantKind::group)) {
    float top = 0.0f;
    for (int k = 0; k < 8; ++k) top = fabsf(v.x[k]) > top ? fabsf(v.x[k]) : top;
    for (int o = 1; o < lanes_in_group; o <<= 1) {
      float other = __shfl_xor_sync(0xffffffffu, top, o);
      top = other > top ? other : top;
    }
    float scale = group_scale(top, c.dtype, c.scale_dtype);
    float limit = c.dtype == DType::i4 ? 7.0f : 127.0f;
    Vec8 q;
    for (int k = 0; k < 8; ++k) q.x[k] = float(round_clamp(__fdiv_rn(v.x[k], scale), limit));
    if (row) store8(row, c.dtype, lane * 8, q);
    if (scales && lane % lanes_in_group == 0) store_float(scales, c.scale_dtype, lane / lanes_in_group, scale);
    for (int k = 0; k < 8; ++k) v.x[k] = q.x[k] * scale;
  } else if (as_is) {
    if (row) store8(row, c.dtype, lane * 8, v);
  } else if (c.quant == int(kvcache::QuantKind::per_tensor)) {
    const float inverse = __fdiv_rn(1.0f, in_units ? 1.0f : value ? c.v_scale : c.k_scale);
    for (int k = 0; k < 8; ++k) {
      float x = v.x[k] * inverse;
      v.x[k] = c.dtype == DType::i8 ? float(round_clamp(x, 127.0f))
                                    : e4m3_float(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
    }
    if (row) store8(row, c.dtype, lane * 8, v);
  } else {
    if (row) store8(row, c.dtype, lane * 8, v);
    if (c.dtype == DType::f16)
      for (int k = 0; k < 8; ++k) v.x[k] = __half2float(__float2half_rn(v.x[k]));
    if (c.dtype == DType::bf16)
      for (int k = 0; k < 8; ++k) v.x[k] = __bfloat162float(__float2bfloat16_rn(v.x[k]));
  }
}

__device__ inline void query_as_fp8(const Layer& l, Vec8& x) {
  if (l.q_inverse == 0.0f) return;
#pragma unroll
  for (int k = 0; k < 8; ++k) x.x[k] = as_fp8(l, x.x[k]);
}
__device__ inline void store_query(const Layer& l, DType work, int32_t flags, int64_t at, const Vec8& x) {
  if (l.q8 && flags & kEight)
    store8(l.q8, DType::f8_e4m3, at, x);
  else
    store8(l.q, work, at, x);
}

// x * cosine - y * sine of an angle given as (cosine, sine, what float32 left of each): rounded as if once, so that
// what remains where the two nearly cancel is right as well.
__device__ inline float rotated(float x, float y, const float4& a) {
  const float p = __fmul_rn(y, a.y), missed = __fmaf_rn(y, a.y, -p);
  return (__fmaf_rn(x, a.x, -p) - missed) + __fmaf_rn(x, a.z, -(y * a.w));
}

// ---- rows of 16-bit floats, of which a lane has 8 elements and the 8 that stand half a row on ----

__device__ inline Vec8 load16(const uint4& raw, bool brain) {
  return brain ? load8(&raw, DType::bf16, 0) : load8(&raw, DType::f16, 0);
}
__device__ inline uint4 pack16(const Vec8& v, bool brain) {
  uint4 raw;
  brain ? store8(&raw, DType::bf16, 0, v) : store8(&raw, DType::f16, 0, v);
  return raw;
}

// Where a token's row of queries (part 0), keys (1) or values (2) was given.
__device__ inline const uint16_t* given_row(const Shape& s, const Layer& l, int part, int head, int token, int dim) {
  const void* base = s.packed || part == 0 ? l.query : part == 1 ? l.key : l.value;
  const int64_t row = s.packed ? int64_t(token) * (s.heads + 2 * s.kv_heads) +
                                     (part == 0 ? head : s.heads + (part - 1) * s.kv_heads + head)
                               : int64_t(token) * (part == 0 ? s.heads : s.kv_heads) + head;
  return static_cast<const uint16_t*>(base) + row * dim;
}

struct Angles {
  float4 of[8];
};
__device__ inline Angles angles_of(const Shape& s, int token, int dim, int d) {
  const float4* from = reinterpret_cast<const float4*>(s.rope) + int64_t(token) * (dim / 2) + d;
  Angles a;
#pragma unroll
  for (int k = 0; k < 8; ++k) a.of[k] = from[k];
  return a;
}
__device__ inline void rotate_pairs(const Angles& a, Vec8& x, Vec8& y) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float was = x.x[k];
    x.x[k] = rotated(was, y.x[k], a.of[k]);
    y.x[k] = rotated(y.x[k], -was, a.of[k]);
  }
}
__device__ inline void add_bias(const Layer& l, bool brain, int at, int dim, Vec8& x, Vec8& y) {
  const uint16_t* bias = static_cast<const uint16_t*>(l.bias) + at;
  const Vec8 to_x = load16(*reinterpret_cast<const uint4*>(bias), brain),
             to_y = load16(*reinterpret_cast<const uint4*>(bias + dim / 2), brain);
#pragma unroll
  for (int k = 0; k < 8; ++k) x.x[k] += to_x.x[k], y.x[k] += to_y.x[k];
}

// Where the cache has a token's row of a kv head, and its scales.
__device__ inline void cache_row(const CacheLayer& c, bool value, int64_t place, int head, uint8_t*& row,
                                 uint8_t*& scales) {
  row = (value ? c.value : c.key) + place * c.token + head * c.head;
  if (c.quant_group) scales = (value ? c.value_scale : c.key_scale) + place * c.scale_token + head * c.scale_head;
}

}  // namespace kvasir::attention::cuda
