// Eight lanes of AVX2; AVX-VNNI replaces three integer instructions by one when `kVnni`.
#pragma once

#include <immintrin.h>

#include <utility>

#include "model/cpu/kernels.h"
#include "simd/avx2.h"

namespace kvasir::model::cpu {
namespace {

struct Blocks {
  static constexpr int kTile = 4;
  // Into the second-level cache: a line on its way into the first holds one of few places, which loads want, too.
  static constexpr int kAhead = 2, kLocality = 2;
  static constexpr bool kMakesBlocks = true;
  using I = __m256i;
  struct W {
    __m256i c[8];
  };
  static I load_i(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_i(uint8_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
  static I all(int32_t v) { return _mm256_set1_epi32(v); }
  static I bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I rounded(simd::V v) { return _mm256_cvtps_epi32(v); }
  static simd::V as_float(I a) { return _mm256_castsi256_ps(a); }
  // E4M3 of 16 rows, two neighbours of each, times 2^-8; codes of no numbers are taken for those they would be.
  static void two_e4m3(const uint8_t* p, simd::V* first, simd::V* second) {
    const I v = _mm256_loadu_si256(reinterpret_cast<const I*>(p)), mask = _mm256_set1_epi16(int16_t(0xbf80));
    const I low = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 1), mask);
    const I high = _mm256_and_si256(_mm256_srai_epi16(v, 1), mask);
    first[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(low));
    first[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1));
    second[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(high));
    second[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1));
  }
  static I look_up(const uint8_t* values, I codes) {
    const __m128i of = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(of), codes);
  }
  static simd::V to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static I chunk(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static W load4(const uint8_t* p) {
    W w;
    const I low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      I v = chunk(p + 64 * c);
      w.c[c] = _mm256_and_si256(v, low);
      w.c[c + 4] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
    }
    return w;
  }
  static W load8(const uint8_t* p) {
    W w;
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) w.c[c] = chunk(p + 64 * c);
    return w;
  }
  // As in blocks_avx512.h.
  static void plane_sums(const int8_t* high, const int8_t* low, int32_t* sums) {
    auto fours = [](const int8_t* q) {
      I twos = _mm256_maddubs_epi16(_mm256_set1_epi8(1), chunk(reinterpret_cast<const uint8_t*>(q)));
      return _mm256_madd_epi16(twos, _mm256_set1_epi16(1));
    };
    I pairs = _mm256_hadd_epi32(fours(high), fours(low));
    I both = _mm256_hadd_epi32(pairs, pairs);  // high, low of the first half; of the second
    __m128i halves = _mm_unpacklo_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), halves);
  }
  static I inputs(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
  }
  struct Pair {
    I d, m;  // D in both halves of a lane; M, as of q = 0, in the upper one
  };
  static I zero_i() { return _mm256_setzero_si256(); }
  static I add_i(I a, I b) { return _mm256_add_epi32(a, b); }
  static I sub_i(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I and_i(I a, int32_t mask) { return _mm256_and_si256(a, _mm256_set1_epi32(mask)); }
  template <int n>
  static I left(I a) {
    return _mm256_slli_epi32(a, n);
  }
  template <int n>
  static I right(I a) {
    return _mm256_srai_epi32(a, n);
  }
  template <Packing P>
  static Pair load_pair(const uint8_t* p, int half, int part) {
    I pair = packing_info(P).zero != 0
                 ? _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * part)))
                 : chunk(p + 64 * half + 32 * part);
#if defined(__AVXVNNI__)
    return {pair, pair};
#else
    const I twice = _mm256_set_epi64x(0x0d0c0d0c09080908, 0x0504050401000100, 0x0d0c0d0c09080908, 0x0504050401000100);
    const I d = _mm256_shuffle_epi8(pair, twice);
    return {d, _mm256_sub_epi16(pair, _mm256_slli_epi16(d, 3))};
#endif
  }
#if defined(__AVXVNNI__)
  // As in blocks_avx512.h.
  template <bool zero>
  static I plane_products(const W& w, const int8_t* x, int first, int count, int32_t offset, int32_t upper,
                          const Pair& pair, I to) {
    I sum = _mm256_set1_epi32(offset);
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) sum = _mm256_dpbusd_avx_epi32(sum, w.c[c], inputs(x + 4 * c));
    if constexpr (!zero) sum = _mm256_blend_epi16(sum, _mm256_set1_epi32(upper), 0xaa);
    return _mm256_dpwssd_avx_epi32(to, sum, pair.d);
  }
#else
  // A plane's products are added in pairs of 16 bits: 16 times 15 * 127 fit.
  template <bool zero>
  static I plane_products(const W& w, const int8_t* x, int first, int count, int32_t, int32_t upper, const Pair& pair,
                          I to) {
    I sum = _mm256_maddubs_epi16(w.c[first], inputs(x + 4 * first));
#pragma GCC unroll 8
    for (int c = first + 1; c < first + count; ++c)
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w.c[c], inputs(x + 4 * c)));
    to = _mm256_add_epi32(to, _mm256_madd_epi16(_mm256_set1_epi32(upper), pair.m));
    return _mm256_add_epi32(to, _mm256_madd_epi16(sum, pair.d));
  }
#endif
  template <bool zero>
  static void add_products(const W& w, const int8_t* x, int first, int count, const int32_t* sums, const Pair& pair,
                           I& high, I& low) {
    high = plane_products<zero>(w, x, first, count, sums[0], sums[2], pair, high);
    low = plane_products<zero>(w, x + 32, first, count, sums[1], sums[3], pair, low);
  }
#if defined(__AVXVNNI__)
  template <int bits, int zero>
  static I dot(const W& w, const int8_t* x, int first, int count, int32_t offset) {
    I sum = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) sum = _mm256_dpbusd_avx_epi32(sum, w.c[c], inputs(x + 4 * c));
    sum = _mm256_slli_epi32(sum, 4);
    if constexpr (zero != 0) sum = _mm256_add_epi32(sum, _mm256_set1_epi32(offset));
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) sum = _mm256_dpbusd_avx_epi32(sum, w.c[c], inputs(x + 32 + 4 * c));
    return sum;
  }
#else
  template <int bits>
  static I plane(const W& w, const int8_t* x, int first, int count) {
    const I ones = _mm256_set1_epi16(1);
    I sum = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) {
      I v = inputs(x + 4 * c), two;
      if constexpr (bits == 8) {  // signed again: |w| <= 128 times 127, twice, fits
        I sw = _mm256_xor_si256(w.c[c], _mm256_set1_epi8(-128));
        two = _mm256_maddubs_epi16(_mm256_abs_epi8(sw), _mm256_sign_epi8(v, sw));
      } else {  // at most 63 times 127, twice two of them
        two = _mm256_maddubs_epi16(w.c[c], v);
        ++c;
        two = _mm256_add_epi16(two, _mm256_maddubs_epi16(w.c[c], inputs(x + 4 * c)));
      }
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(two, ones));
    }
    return sum;
  }
  template <int bits, int zero>
  static I dot(const W& w, const int8_t* x, int first, int count, int32_t) {
    return _mm256_add_epi32(_mm256_slli_epi32(plane<bits>(w, x, first, count), 4),
                            plane<bits>(w, x + 32, first, count));
  }
#endif
};

}  // namespace
}  // namespace kvasir::model::cpu
