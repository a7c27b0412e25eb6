// Four lanes of NEON.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "core/dtype.h"

namespace kvasir::simd {
namespace {

constexpr int W = 4;
constexpr int kRegisters = 32;
#define KVASIR_SIMD_HALF_COLUMNS 0

using V = float32x4_t;
inline V load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, V x) { vst1q_f32(p, x); }
inline V set1(float x) { return vdupq_n_f32(x); }
inline V hold(V x) { return x; }
inline V load_first(int n, const float* p) {
  float lanes[W] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
inline void store_first(int n, float* p, V x) {
  float lanes[W];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
inline V zero() { return vdupq_n_f32(0); }
inline V add(V a, V b) { return vaddq_f32(a, b); }
inline V sub(V a, V b) { return vsubq_f32(a, b); }
inline V mul(V a, V b) { return vmulq_f32(a, b); }
inline V div_v(V a, V b) { return vdivq_f32(a, b); }
inline V fma_v(V a, V b, V c) { return vfmaq_f32(c, a, b); }
inline V fused(V a, V b, V c) { return fma_v(a, b, c); }
inline V max_v(V a, V b) { return vmaxq_f32(a, b); }
inline V min_v(V a, V b) { return vminq_f32(a, b); }
inline V abs_v(V a) { return vabsq_f32(a); }
// x * 2^n, n in the low bits of what exp2_v rounded.
inline V add_exponent(V x, V n) {
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vreinterpretq_s32_f32(n), 23)));
}
inline V two_halves(float low, float) { return set1(low); }  // no vector holds two groups
inline V zero_below(V a, V limit, V x) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcltq_f32(a, limit)));
}
inline V select_ge(V a, V b, V yes, V no) { return vbslq_f32(vcgeq_f32(a, b), yes, no); }
inline V iota() {
  const float values[4] = {0, 1, 2, 3};
  return vld1q_f32(values);
}
inline float first(V a) { return vgetq_lane_f32(a, 0); }

// Lane i is the 4 floats of row i folded by `both`, halves first.
template <class F>
inline V fold_rows(const float* rows, const F& both) {
  const V a = load(rows), b = load(rows + 4), c = load(rows + 8), d = load(rows + 12);
  auto pairs = [](V x, V y, bool high) {  // two lanes of each
    return high ? vcombine_f32(vget_high_f32(x), vget_high_f32(y)) : vcombine_f32(vget_low_f32(x), vget_low_f32(y));
  };
  const V ab = both(pairs(a, b, false), pairs(a, b, true)), cd = both(pairs(c, d, false), pairs(c, d, true));
  return both(vuzp1q_f32(ab, cd), vuzp2q_f32(ab, cd));
}

inline V from_half(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
inline uint16x4_t four_u16(const uint8_t* p) { return vreinterpret_u16_u8(vld1_u8(p)); }
inline uint8x8_t four_bytes(const uint8_t* p) {
  uint32_t word;
  __builtin_memcpy(&word, p, 4);
  return vreinterpret_u8_u32(vdup_n_u32(word));
}
inline V load_f16(const uint8_t* p) { return from_half(four_u16(p)); }
inline V load_bf16(const uint8_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(four_u16(p), 16)); }
inline V load_i8(const uint8_t* p) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p))))));
}
inline V load_i4(const uint8_t* p) {
  const int32_t q[4] = {int8_t(p[0] << 4) >> 4, int8_t(p[0]) >> 4, int8_t(p[1] << 4) >> 4, int8_t(p[1]) >> 4};
  return vcvtq_f32_s32(vld1q_s32(q));
}
// E4M3 (in 16 bits) as float16 bits is the value times 2^-8, exactly; NaN (0x7f) is put back.
inline V from_e4m3(uint16x4_t b) {
  uint16x4_t low = vand_u16(b, vdup_n_u16(0x7f)), sign = vshl_n_u16(vand_u16(b, vdup_n_u16(0x80)), 8);
  uint16x4_t nan = vand_u16(vceq_u16(low, vdup_n_u16(0x7f)), vdup_n_u16(0x7e00));
  return vmulq_n_f32(from_half(vorr_u16(vorr_u16(vshl_n_u16(low, 7), sign), nan)), 256.0f);
}
inline V load_e4m3(const uint8_t* p) { return from_e4m3(vget_low_u16(vmovl_u8(four_bytes(p)))); }
inline void store_f16(uint8_t* p, V x) { vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32(x))); }
inline void store_bf16(uint8_t* p, V x) {
  uint32x4_t u = vreinterpretq_u32_f32(x), high = vshrq_n_u32(u, 16);
  uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), vandq_u32(high, vdupq_n_u32(1))), 16);
  uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
  vst1_u8(p, vreinterpret_u8_u16(vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet))));
}
using Words = uint32x4_t;
inline Words load_words(const uint8_t* p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
inline Words load_some(const uint8_t* p, int bytes) {
  uint8_t part[16] = {};
  __builtin_memcpy(part, p, size_t(bytes));
  return load_words(part);
}
inline void store_words(uint32_t* p, Words w) { vst1q_u32(p, w); }
inline void transpose(Words r[4]) {
  uint32x4x2_t a = vtrnq_u32(r[0], r[1]), b = vtrnq_u32(r[2], r[3]);
  r[0] = vcombine_u32(vget_low_u32(a.val[0]), vget_low_u32(b.val[0]));
  r[1] = vcombine_u32(vget_low_u32(a.val[1]), vget_low_u32(b.val[1]));
  r[2] = vcombine_u32(vget_high_u32(a.val[0]), vget_high_u32(b.val[0]));
  r[3] = vcombine_u32(vget_high_u32(a.val[1]), vget_high_u32(b.val[1]));
}
template <DType kType, int kElement>
inline V element_of(Words w) {
  if constexpr (kType == DType::f32) return vreinterpretq_f32_u32(w);
  if constexpr (kType == DType::f16) return from_half(kElement == 0 ? vmovn_u32(w) : vshrn_n_u32(w, 16));
  if constexpr (kType == DType::bf16)
    return vreinterpretq_f32_u32(kElement == 0 ? vshlq_n_u32(w, 16) : vandq_u32(w, vdupq_n_u32(0xffff0000)));
  if constexpr (kType == DType::i8)
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(vreinterpretq_s32_u32(w), vdupq_n_s32(24 - 8 * kElement)), 24));
  if constexpr (kType == DType::i4)
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(vreinterpretq_s32_u32(w), vdupq_n_s32(28 - 4 * kElement)), 28));
  if constexpr (kType == DType::f8_e4m3)
    return from_e4m3(vmovn_u32(vandq_u32(vshlq_u32(w, vdupq_n_s32(-8 * kElement)), vdupq_n_u32(0xff))));
}

}  // namespace
}  // namespace kvasir::simd
