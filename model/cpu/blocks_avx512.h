// Sixteen lanes of AVX-512 with VNNI: a group is one vector. AMX's kernels begin with the same ones.
#pragma once

#include <immintrin.h>

#include <utility>

#include "model/cpu/kernels.h"
#include "simd/avx512.h"

namespace kvasir::model::cpu {
namespace {

struct Blocks {
  static constexpr int kTile = 16, kAhead = 1, kLocality = 2;
  static constexpr bool kMakesBlocks = true;
  using I = __m512i;
  struct W {
    __m512i c[8];
  };
  static I load_i(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store_i(uint8_t* p, I a) { _mm512_storeu_si512(p, a); }
  static I all(int32_t v) { return _mm512_set1_epi32(v); }
  static I bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I rounded(simd::V v) { return _mm512_cvtps_epi32(v); }
  static simd::V as_float(I a) { return _mm512_castsi512_ps(a); }
  // E4M3 of 16 rows, two neighbours of each, times 2^-8; codes of no numbers are taken for those they would be.
  static void two_e4m3(const uint8_t* p, simd::V* first, simd::V* second) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                  mask = _mm256_set1_epi16(int16_t(0xbf80));
    *first = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 1), mask));
    *second = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(v, 1), mask));
  }
  static I look_up(const uint8_t* values, I codes) {
    const __m128i of = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(of), codes);
  }
  static simd::V to_float(I a) { return _mm512_cvtepi32_ps(a); }
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
  template <int bits, int zero>
  static I dot(const W& w, const int8_t* x, int first, int count, int32_t offset) {
    I sum = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) sum = _mm512_dpbusd_epi32(sum, w.c[c], inputs(x + 4 * c));
    sum = _mm512_slli_epi32(sum, 4);
    if constexpr (zero != 0) sum = _mm512_add_epi32(sum, _mm512_set1_epi32(offset));
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) sum = _mm512_dpbusd_epi32(sum, w.c[c], inputs(x + 32 + 4 * c));
    return sum;
  }
  using Pair = I;
  static I zero_i() { return _mm512_setzero_si512(); }
  static I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
  static I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I and_i(I a, int32_t mask) { return _mm512_and_si512(a, _mm512_set1_epi32(mask)); }
  template <int n>
  static I left(I a) {
    return _mm512_slli_epi32(a, n);
  }
  template <int n>
  static I right(I a) {
    return _mm512_srai_epi32(a, n);
  }
  template <Packing P>
  static Pair load_pair(const uint8_t* p, int half, int) {
    if constexpr (packing_info(P).zero != 0)
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    else
      return _mm512_loadu_si512(p + 64 * half);
  }
  // Weights less 8 keep a plane's sum within 16 bits, so that D times it and M times the inputs' sum are one
  // instruction.
  template <bool zero>
  static I scaled(I sum, int32_t upper, Pair pair, I to) {
    if constexpr (!zero)
      sum = _mm512_ternarylogic_epi32(sum, _mm512_set1_epi32(0xffff), _mm512_set1_epi32(upper), 0xea);  // (a & b) | c
    return _mm512_dpwssd_epi32(to, sum, pair);
  }
  template <bool zero>
  static I plane_products(const W& w, const int8_t* x, int first, int count, int32_t offset, int32_t upper, Pair pair,
                          I to) {
    I sum = _mm512_set1_epi32(offset);
#pragma GCC unroll 8
    for (int c = first; c < first + count; ++c) sum = _mm512_dpbusd_epi32(sum, w.c[c], inputs(x + 4 * c));
    return scaled<zero>(sum, upper, pair, to);
  }
  template <bool zero>
  static void add_products(const W& w, const int8_t* x, int first, int count, const int32_t* sums, Pair pair, I& high,
                           I& low) {
    high = plane_products<zero>(w, x, first, count, sums[0], sums[2], pair, high);
    low = plane_products<zero>(w, x + 32, first, count, sums[1], sums[3], pair, low);
  }
  // As block_kernels.h has them for one element at a time.
  static float magnitude(const float* x, int64_t cols) {
    const I mask = _mm512_set1_epi32(0x7fffffff);
    I most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t i = 0; i < cols; i += 32)
      for (int h = 0; h < 2; ++h)
        most[h] = _mm512_max_epu32(most[h], _mm512_and_si512(_mm512_loadu_si512(x + i + 16 * h), mask));
    return __builtin_bit_cast(float, _mm512_reduce_max_epu32(_mm512_max_epu32(most[0], most[1])));
  }
  static int32_t total(__m256i v) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
  // 32 inputs as integers of 16 bits.
  static I quantize_words(const float* x, float inverse) {
    const simd::V magic = simd::set1(12582912.0f), by = simd::set1(inverse);
    const I bias = _mm512_castps_si512(magic), in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    I a = _mm512_sub_epi32(_mm512_castps_si512(simd::fused(simd::load(x), by, magic)), bias);
    I b = _mm512_sub_epi32(_mm512_castps_si512(simd::fused(simd::load(x + 16), by, magic)), bias);
    return _mm512_permutexvar_epi64(in_order, _mm512_packs_epi32(a, b));
  }
  static void quantize_block(const float* x, float inverse, int8_t* high, int8_t* low) {
    const I v = quantize_words(x, inverse);
    I up = _mm512_add_epi16(v, _mm512_set1_epi16(8));
    I rest = _mm512_sub_epi16(_mm512_and_si512(up, _mm512_set1_epi16(15)), _mm512_set1_epi16(8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_cvtepi16_epi8(_mm512_srai_epi16(up, 4)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_cvtepi16_epi8(rest));
  }
  static void plane_sums(const int8_t* high, const int8_t* low, int32_t* sums) {
    auto fours = [](const int8_t* q) {
      return _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1),
                                 _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)));
    };
    __m256i pairs = _mm256_hadd_epi32(fours(high), fours(low));
    __m256i both = _mm256_hadd_epi32(pairs, pairs);  // high, low of the first half; of the second
    __m128i halves = _mm_unpacklo_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), halves);
  }
};

}  // namespace
}  // namespace kvasir::model::cpu
