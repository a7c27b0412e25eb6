// Sixteen lanes of AVX-512 with VNNI: a group is one vector. AMX's kernels begin with the same ones.
#pragma once

#include <immintrin.h>

#include "model/cpu/kernels.h"

namespace kvasir::model::cpu {
namespace {

struct V {
  static constexpr int N = 16, kTile = 16;
  using F = __m512;
  using I = __m512i;
  struct W {
    __m512i c[8];
  };
  static F load_f(const float* p) { return _mm512_loadu_ps(p); }
  static void store_f(float* p, F f) { _mm512_storeu_ps(p, f); }
  static F load_f16(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_bf16(const uint8_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static F set_f(float f) { return _mm512_set1_ps(f); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static I load_i(const int32_t* p) { return _mm512_loadu_si512(p); }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static W load4(const uint8_t* p) {
    W w;
    const I low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      I v = _mm512_loadu_si512(p + 64 * c);
      w.c[c] = _mm512_and_si512(v, low);
      w.c[c + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
    }
    return w;
  }
  static W load8(const uint8_t* p) {
    W w;
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) w.c[c] = _mm512_loadu_si512(p + 64 * c);
    return w;
  }
  static I inputs(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
  }
  template <int bits>
  static I dot(const W& w, const int8_t* x, int first, int count, int32_t minus128) {
    I sum = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) sum = _mm512_dpbusd_epi32(sum, w.c[c], inputs(x + 4 * c));
    sum = _mm512_slli_epi32(sum, 4);
    if constexpr (bits == 8) sum = _mm512_add_epi32(sum, _mm512_set1_epi32(minus128));
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) sum = _mm512_dpbusd_epi32(sum, w.c[c], inputs(x + 32 + 4 * c));
    return sum;
  }
  // As kernels_impl.h has it for one element at a time.
  static void quantize(const float* x, int64_t cols, bool halves, int8_t* q, QuantBlock* blocks) {
    constexpr float kRange = 2039.0f;
    const I magnitude = _mm512_set1_epi32(0x7fffffff), half = _mm512_set1_epi32(8);
    for (int64_t b = 0; b < cols / 32; ++b, x += 32, q += 64) {
      F f[2] = {load_f(x), load_f(x + 16)};
      I most = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(f[0]), magnitude),
                                _mm512_and_si512(_mm512_castps_si512(f[1]), magnitude));
      float max = __builtin_bit_cast(float, _mm512_reduce_max_epu32(most));
      float d = max / kRange, inverse = max > 0.0f ? kRange / max : 0.0f;
      int32_t sums[2];
      for (int h = 0; h < 2; ++h) {
        F shifted = add(mul(f[h], set_f(inverse)), set_f(12582912.0f));
        I v = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4b400000));
        I high = _mm512_srai_epi32(_mm512_add_epi32(v, half), 4);
        I low = _mm512_sub_epi32(v, _mm512_slli_epi32(high, 4));
        __m128i bytes_high = _mm512_cvtepi32_epi8(high), bytes_low = _mm512_cvtepi32_epi8(low);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * h), bytes_high);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 32 + 16 * h), bytes_low);
        sums[h] = _mm512_reduce_add_epi32(
            _mm512_add_epi32(_mm512_slli_epi32(_mm512_cvtepi8_epi32(bytes_high), 4), _mm512_cvtepi8_epi32(bytes_low)));
      }
      int32_t sum = sums[0] + sums[1];
      blocks[b] = {d, {d * float(halves ? sums[0] : sum), halves ? d * float(sums[1]) : 0.0f}, -128 * sum};
    }
  }
};

}  // namespace
}  // namespace kvasir::model::cpu
