// Sixteen lanes of AVX-512 (F, BW, DQ, VL); with VBMI where the unit is compiled for it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/dtype.h"
#include "simd/transpose16.h"

namespace kvasir::simd {
namespace {

constexpr int W = 16;
constexpr int kRegisters = 32;
#define KVASIR_SIMD_HALF_COLUMNS 1

using V = __m512;
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
// Kept in a register: the compiler would rather read it again for each use.
inline V hold(V x) {
  asm("" : "+v"(x));
  return x;
}
inline __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1); }
inline V load_first(int n, const float* p) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store_first(int n, float* p, V x) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline V zero() { return _mm512_setzero_ps(); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div_v(V a, V b) { return _mm512_div_ps(a, b); }
inline V fma_v(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V fused(V a, V b, V c) { return fma_v(a, b, c); }
#define KVASIR_SIMD_FMA_BROADCASTS 1
// *a * b + c: the product reads and broadcasts a itself.
inline V fma_at(const float* a, V b, V c) {
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(b), "m"(*a));
  return c;
}
inline V max_v(V a, V b) { return _mm512_max_ps(a, b); }
inline V min_v(V a, V b) { return _mm512_min_ps(a, b); }
inline V abs_v(V a) { return _mm512_abs_ps(a); }
// x * 2^n, n in the low bits of what exp2_v rounded.
inline V add_exponent(V x, V n) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}
inline V two_halves(float low, float high) {
  return _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(low), _mm512_set1_ps(high));
}
inline V zero_below(V a, V limit, V x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, limit, _CMP_NLT_UQ), x); }
inline V select_ge(V a, V b, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), no, yes);
}
inline V iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline float first(V a) { return _mm512_cvtss_f32(a); }
// The steps in which 16 vectors become one whose lane i is x[i]'s lanes folded, halves first: sixteen to
// eight, then to four, two, one. x in kFoldOrder, the first eight with the last eight, lands where it belongs.
constexpr int kFoldOrder[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
template <class F>
inline V fold_halves(V a, V b, const F& both) {
  return both(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}
template <class F>
inline V fold_fours(V a, V b, const F& both) {
  return both(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
template <class F>
inline V fold_twos(V x, V y, const F& both) {
  const __m512d a = _mm512_castps_pd(x), b = _mm512_castps_pd(y);
  return both(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}
template <class F>
inline V fold_ones(V a, V b, const F& both) {
  return both(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
template <class F>
inline V fold(const V (&x)[16], const F& both) {
  V y[8], z[4], w[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) y[i] = fold_halves(x[kFoldOrder[i]], x[kFoldOrder[i + 8]], both);
  for (int i = 0; i < 4; ++i) z[i] = fold_fours(y[i], y[i + 4], both);
  for (int i = 0; i < 2; ++i) w[i] = fold_twos(z[i], z[i + 2], both);
  return fold_ones(w[0], w[1], both);
}
// Lane i is the 16 floats of row i folded by `both`.
template <class F>
inline V fold_rows(const float* rows, const F& both) {
  V x[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = load(rows + i * 16);
  return fold(x, both);
}
inline V add_halves(V a, V b) { return fold_halves(a, b, add); }
inline V add_fours(V a, V b) { return fold_fours(a, b, add); }
inline V add_twos(V a, V b) { return fold_twos(a, b, add); }
inline V add_ones(V a, V b) { return fold_ones(a, b, add); }
// Four by four, in each four lanes.
inline void transpose_fours(V* x) {
  const V a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpacklo_ps(x[2], x[3]);
  const V c = _mm512_unpackhi_ps(x[0], x[1]), d = _mm512_unpackhi_ps(x[2], x[3]);
  x[0] = _mm512_shuffle_ps(a, b, 0x44), x[1] = _mm512_shuffle_ps(a, b, 0xee);
  x[2] = _mm512_shuffle_ps(c, d, 0x44), x[3] = _mm512_shuffle_ps(c, d, 0xee);
}
// Every second four lanes of a, then those of b.
inline V even_fours(V a, V b) { return _mm512_shuffle_f32x4(a, b, 0x88); }
inline V odd_fours(V a, V b) { return _mm512_shuffle_f32x4(a, b, 0xdd); }

#define KVASIR_SIMD_FOLDS 1
// One row's lanes folded as fold_rows does it, in every lane.
template <class F>
inline V fold_row(V x, const F& both) {
  x = both(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  x = both(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  x = both(x, _mm512_permute_ps(x, 0x4e));
  x = both(x, _mm512_permute_ps(x, 0xb1));
  return _mm512_broadcastss_ps(_mm512_castps512_ps128(x));
}

inline V load_f16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline V load_bf16(const uint8_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline V load_i8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// By a function: a variable would be initialized when the program starts, on processors without these instructions,
// too.
inline V nibbles() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1); }
// A table of sixteen floats looks at the low four bits of each lane only.
inline V look_up_i4(const uint8_t* p, V table) {
#if defined(__AVX512VBMI__)
  int64_t word;
  __builtin_memcpy(&word, p, 8);
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
  const __m512i q = _mm512_multishift_epi64_epi8(shifts, _mm512_set1_epi64(word));
#else
  __m512i q = _mm512_broadcastd_epi32(_mm_loadu_si32(p));
  q = _mm512_mask_broadcastd_epi32(q, 0xff00, _mm_loadu_si32(p + 4));
  q = _mm512_srlv_epi32(q, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
#endif
  return _mm512_permutexvar_ps(q, table);
}
inline V load_i4(const uint8_t* p) { return look_up_i4(p, nibbles()); }
#define KVASIR_SIMD_NIBBLE_TABLE 1
inline V nibbles_times(V scale) { return mul(nibbles(), scale); }
// E4M3 as float16 bits: exponent and mantissa move up by 7, the sign to the top; that is the value
// times 2^-8, exactly, subnormals included. NaN (0x7f) is put back.
inline V load_e4m3(const uint8_t* p) {
  __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m256i low = _mm256_and_si256(b, _mm256_set1_epi16(0x7f));
  __m256i sign = _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(0x80)), 8);
  __m256i half = _mm256_or_si256(_mm256_slli_epi16(low, 7), sign);
  __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(low, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, nan)), _mm512_set1_ps(256.0f));
}
inline void store_f16(uint8_t* p, V x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bf16(uint8_t* p, V x) {
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet)));
}

using Words = __m512i;
inline Words load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Words load_some(const uint8_t* p, int bytes) { return _mm512_maskz_loadu_epi8((uint64_t(1) << bytes) - 1, p); }
inline __m256i load_half_words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i load_half_some(const uint8_t* p, int bytes) {
  return _mm256_maskz_loadu_epi8(uint32_t((uint64_t(1) << bytes) - 1), p);
}

template <DType kType, int kElement>
inline V element_of(Words w) {
  if constexpr (kType == DType::f32) return _mm512_castsi512_ps(w);
  if constexpr (kType == DType::bf16)
    return _mm512_castsi512_ps(kElement == 0 ? _mm512_slli_epi32(w, 16)
                                             : _mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000))));
  if constexpr (kType == DType::i8)
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w, 24 - 8 * kElement), 24));
  if constexpr (kType == DType::i4) return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * kElement), nibbles());
}

// 32 FP8 elements as float16 times 2^-8.
inline Words halves_of_e4m3(__m256i bytes) {
  __m512i b = _mm512_cvtepu8_epi16(bytes), low = _mm512_and_si512(b, _mm512_set1_epi16(0x7f));
  __m512i sign = _mm512_slli_epi16(_mm512_and_si512(b, _mm512_set1_epi16(0x80)), 8);
  __m512i half = _mm512_or_si512(_mm512_slli_epi16(low, 7), sign);
  return _mm512_mask_mov_epi16(half, _mm512_cmpeq_epi16_mask(low, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7e00));
}

inline void store_words(uint32_t* p, Words w) { _mm512_storeu_si512(p, w); }
inline Words load_half_column(const uint16_t* p) {
  return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline V half_column(Words w) { return _mm512_cvtph_ps(_mm512_castsi512_si256(w)); }

// 16 rows of 32 float16 as 32 columns of 16.
inline void transpose_halves_to(const Words r[16], uint16_t* out) {
  __m512i t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi16(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int h = 0; h < 2; ++h) {
      u[i + 2 * h] = _mm512_unpacklo_epi32(t[i + h], t[i + 2 + h]);
      u[i + 2 * h + 1] = _mm512_unpackhi_epi32(t[i + h], t[i + 2 + h]);
    }
  for (int i = 0; i < 16; i += 8)  // now lane l of t[i + e] is element 8 l + e of eight keys
    for (int e = 0; e < 4; ++e) {
      t[i + 2 * e] = _mm512_unpacklo_epi64(u[i + e], u[i + 4 + e]);
      t[i + 2 * e + 1] = _mm512_unpackhi_epi64(u[i + e], u[i + 4 + e]);
    }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int e = 0; e < 8; ++e)
    for (int h = 0; h < 2; ++h) {
      const __m512i two = _mm512_permutex2var_epi64(t[e], h ? high : low, t[8 + e]);
      auto* to = reinterpret_cast<__m256i*>(out + (e + 16 * h) * W);
      auto* next = reinterpret_cast<__m256i*>(out + (e + 16 * h + 8) * W);
      _mm256_storeu_si256(to, _mm512_castsi512_si256(two));
      _mm256_storeu_si256(next, _mm512_extracti64x4_epi64(two, 1));
    }
}

}  // namespace
}  // namespace kvasir::simd
