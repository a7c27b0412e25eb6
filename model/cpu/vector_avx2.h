// Eight lanes of AVX2; AVX-VNNI replaces three integer instructions by one when `kVnni`.
#pragma once

#include <immintrin.h>

#include "model/cpu/kernels.h"

namespace kvasir::model::cpu {
namespace {

struct V {
  static constexpr int N = 8, kTile = 4;
  using F = __m256;
  using I = __m256i;
  struct W {
    __m256i c[8];
  };
  static F load_f(const float* p) { return _mm256_loadu_ps(p); }
  static void store_f(float* p, F f) { _mm256_storeu_ps(p, f); }
  static F load_f16(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load_bf16(const uint8_t* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static F set_f(float f) { return _mm256_set1_ps(f); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static I load_i(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
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
  static I inputs(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
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
  // One plane; products of at most 4 bits are added in 16 bits: 16 times 15 * 128 fit.
  template <int bits>
  static I plane(const W& w, const int8_t* x, int first, int count) {
    const I ones = _mm256_set1_epi16(1);
    if constexpr (bits == 4) {
      I sum = _mm256_maddubs_epi16(w.c[first], inputs(x + 4 * first));
#pragma GCC unroll 8
      for (int c = first + 1; c < first + count; ++c)
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w.c[c], inputs(x + 4 * c)));
      return _mm256_madd_epi16(sum, ones);
    } else {
      I sum = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int c = first; c < first + count; ++c) {
        I v = inputs(x + 4 * c), two;
        if constexpr (bits == 8) {  // signed again: |w| <= 128 times 127, twice, fits
          I sw = _mm256_xor_si256(w.c[c], _mm256_set1_epi8(-128));
          two = _mm256_maddubs_epi16(_mm256_abs_epi8(sw), _mm256_sign_epi8(v, sw));
        } else {
          two = _mm256_maddubs_epi16(w.c[c], v);
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(two, ones));
      }
      return sum;
    }
  }
  template <int bits, int zero>
  static I dot(const W& w, const int8_t* x, int first, int count, int32_t offset) {
    I sum =
        _mm256_add_epi32(_mm256_slli_epi32(plane<bits>(w, x, first, count), 4), plane<bits>(w, x + 32, first, count));
    if constexpr (zero != 0 && bits == 4) sum = _mm256_add_epi32(sum, _mm256_set1_epi32(offset));
    return sum;
  }
#endif
};

}  // namespace
}  // namespace kvasir::model::cpu
