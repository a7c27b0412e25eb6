// Four lanes of NEON; with the dot product extension four products and their sum are one instruction.
#pragma once

#include <arm_neon.h>

#include "model/cpu/kernels.h"
#include "simd/neon.h"

namespace kvasir::model::cpu {
namespace {

struct Blocks {
  static constexpr int kTile = 4, kAhead = 1, kLocality = 3;
  static constexpr bool kMakesBlocks = false;
  using I = int32x4_t;
  struct W {
    int8x16_t c[8];
  };
  static I load_i(const int32_t* p) { return vld1q_s32(p); }
  static void store_i(uint8_t* p, I a) { vst1q_u8(p, vreinterpretq_u8_s32(a)); }
  static I all(int32_t v) { return vdupq_n_s32(v); }
  static I bytes(const uint8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
  }
  static I rounded(simd::V v) { return vcvtnq_s32_f32(v); }
  static simd::V as_float(I a) { return vreinterpretq_f32_s32(a); }
  // E4M3 of 16 rows, two neighbours of each, times 2^-8; codes of no numbers are taken for those they would be.
  static void two_e4m3(const uint8_t* p, simd::V* first, simd::V* second) {
    const uint16x8_t mask = vdupq_n_u16(0xbf80);
    auto halves = [&](int16x8_t v) { return vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(v, 1)), mask); };
    for (int i = 0; i < 4; i += 2, p += 16) {
      const int16x8_t v = vreinterpretq_s16_u8(vld1q_u8(p));
      const uint16x8_t low = halves(vshlq_n_s16(v, 8)), high = halves(v);
      first[i] = simd::from_half(vget_low_u16(low)), first[i + 1] = simd::from_half(vget_high_u16(low));
      second[i] = simd::from_half(vget_low_u16(high)), second[i + 1] = simd::from_half(vget_high_u16(high));
    }
  }
  static I look_up(const uint8_t* values, I codes) {
    return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(values), vreinterpretq_u8_s32(codes)));
  }
  static simd::V to_float(I a) { return vcvtq_f32_s32(a); }
  static W load4(const uint8_t* p) {
    W w;
    for (int c = 0; c < 4; ++c) {
      uint8x16_t v = vld1q_u8(p + 64 * c);
      w.c[c] = vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15)));
      w.c[c + 4] = vreinterpretq_s8_u8(vshrq_n_u8(v, 4));
    }
    return w;
  }
  static W load8(const uint8_t* p) {
    W w;
    for (int c = 0; c < 8; ++c) w.c[c] = vreinterpretq_s8_u8(vld1q_u8(p + 64 * c));
    return w;
  }
  static int8x16_t inputs(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  // Eight bits have a zero point of 128 taken from them here; other weights are below 64.
  template <int bits>
  static int8x16_t weights(const W& w, int c) {
    return bits == 8 ? veorq_s8(w.c[c], vdupq_n_s8(-128)) : w.c[c];
  }
  template <int bits>
  static I plane(const W& w, const int8_t* x, int first, int count) {
#if defined(__ARM_FEATURE_DOTPROD)
    I sum = vdupq_n_s32(0);
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) sum = vdotq_s32(sum, weights<bits>(w, c), inputs(x + 4 * c));
    return sum;
#else
    I rows01 = vdupq_n_s32(0), rows23 = rows01;
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) {
      int8x16_t v = weights<bits>(w, c), in = inputs(x + 4 * c);
      rows01 = vpadalq_s16(rows01, vmull_s8(vget_low_s8(v), vget_low_s8(in)));
      rows23 = vpadalq_s16(rows23, vmull_s8(vget_high_s8(v), vget_high_s8(in)));
    }
    return vpaddq_s32(rows01, rows23);
#endif
  }
  template <int bits, int zero>
  static I dot(const W& w, const int8_t* x, int first, int count, int32_t) {
    return vaddq_s32(vshlq_n_s32(plane<bits>(w, x, first, count), 4), plane<bits>(w, x + 32, first, count));
  }
  struct Pair {
    I d, m;
  };
  static I zero_i() { return vdupq_n_s32(0); }
  static I add_i(I a, I b) { return vaddq_s32(a, b); }
  static I and_i(I a, int32_t mask) { return vandq_s32(a, vdupq_n_s32(mask)); }
  template <int n>
  static I left(I a) {
    return vshlq_n_s32(a, n);
  }
  template <int n>
  static I right(I a) {
    return vshrq_n_s32(a, n);
  }
  template <Packing P>
  static Pair load_pair(const uint8_t* p, int half, int part) {
    if constexpr (packing_info(P).zero != 0)
      return {vmovl_s16(vld1_s16(reinterpret_cast<const int16_t*>(p + 8 * part))), vdupq_n_s32(0)};
    const int16x4x2_t both = vld2_s16(reinterpret_cast<const int16_t*>(p + 64 * half + 16 * part));
    return {vmovl_s16(both.val[0]), vmovl_s16(both.val[1])};
  }
  template <bool zero>
  static void add_products(const W& w, const int8_t* x, int first, int count, const int32_t* sums, const Pair& pair,
                           I& high, I& low) {
    high = vmlaq_s32(high, vaddq_s32(plane<4>(w, x, first, count), vdupq_n_s32(sums[0])), pair.d);
    low = vmlaq_s32(low, vaddq_s32(plane<4>(w, x + 32, first, count), vdupq_n_s32(sums[1])), pair.d);
    if constexpr (!zero) high = vmlaq_n_s32(high, pair.m, sums[2] >> 16), low = vmlaq_n_s32(low, pair.m, sums[3] >> 16);
  }
};

}  // namespace
}  // namespace kvasir::model::cpu
