// Eight lanes of AVX2, with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/dtype.h"

namespace kvasir::simd {
namespace {

constexpr int W = 8;
constexpr int kRegisters = 16;
#define KVASIR_SIMD_HALF_COLUMNS 1

using V = __m256;
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V x) { _mm256_storeu_ps(p, x); }
// Kept in a register: the compiler would rather read it again for each use.
inline V hold(V x) {
  asm("" : "+x"(x));
  return x;
}
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline V load_first(int n, const float* p) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store_first(int n, float* p, V x) { _mm256_maskstore_ps(p, first_lanes(n), x); }
inline V set1(float x) { return _mm256_set1_ps(x); }
inline V zero() { return _mm256_setzero_ps(); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V div_v(V a, V b) { return _mm256_div_ps(a, b); }
inline V fma_v(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V fused(V a, V b, V c) { return fma_v(a, b, c); }
inline V max_v(V a, V b) { return _mm256_max_ps(a, b); }
inline V min_v(V a, V b) { return _mm256_min_ps(a, b); }
inline V abs_v(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
// x * 2^n, n in the low bits of what exp2_v rounded.
inline V add_exponent(V x, V n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
inline V two_halves(float low, float) { return set1(low); }  // no vector holds two groups
inline V zero_below(V a, V limit, V x) { return _mm256_and_ps(_mm256_cmp_ps(a, limit, _CMP_NLT_UQ), x); }
inline V select_ge(V a, V b, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
inline V iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
inline float first(V a) { return _mm256_cvtss_f32(a); }

// Lane i is the 8 floats of row i folded by `both`, halves first. (What is folded may change places: a blend,
// which any port does, and one shuffle instead of two.)
template <class F>
inline V fold_rows(const float* rows, const F& both) {
  V y[4], z[2];
  for (int i = 0; i < 4; ++i) {
    const V a = load(rows + i * 8), b = load(rows + (i + 4) * 8);
    y[i] = both(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
  }
  for (int i = 0; i < 2; ++i)  // rows i and i + 2
    z[i] = both(_mm256_blend_ps(y[i], y[i + 2], 0xcc), _mm256_shuffle_ps(y[i], y[i + 2], 0x4e));
  const V even = _mm256_blend_ps(z[0], z[1], 0xaa), odd = _mm256_blend_ps(z[1], z[0], 0xaa);
  return both(even, _mm256_permute_ps(odd, 0xb1));
}

inline V load_f16(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline V load_bf16(const uint8_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline V load_i8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline V load_i4(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  __m256i q = _mm256_sllv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0));
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(q, 28));
}
// E4M3 as float16 bits: exponent and mantissa move up by 7, the sign to the top; that is the value
// times 2^-8, exactly, subnormals included. NaN (0x7f) is put back.
inline V load_e4m3(const uint8_t* p) {
  __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  __m128i low = _mm_and_si128(b, _mm_set1_epi16(0x7f));
  __m128i sign = _mm_slli_epi16(_mm_and_si128(b, _mm_set1_epi16(0x80)), 8);
  __m128i half = _mm_or_si128(_mm_slli_epi16(low, 7), sign);
  __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(low, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00));
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, nan)), _mm256_set1_ps(256.0f));
}
inline void store_f16(uint8_t* p, V x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bf16(uint8_t* p, V x) {
  __m256i u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
  __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  __m256i w = _mm256_blendv_epi8(rounded, quiet, nan);
  __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

using Words = __m256i;
inline Words load_words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Words load_some(const uint8_t* p, int bytes) {
  alignas(32) uint8_t part[32] = {};
  __builtin_memcpy(part, p, size_t(bytes));
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(part));
}
inline __m128i load_half_words(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m128i load_half_some(const uint8_t* p, int bytes) {
  alignas(16) uint8_t part[16] = {};
  __builtin_memcpy(part, p, size_t(bytes));
  return _mm_load_si128(reinterpret_cast<const __m128i*>(part));
}

template <DType kType, int kElement>
inline V element_of(Words w) {
  if constexpr (kType == DType::f32) return _mm256_castsi256_ps(w);
  if constexpr (kType == DType::bf16)
    return _mm256_castsi256_ps(kElement == 0 ? _mm256_slli_epi32(w, 16)
                                             : _mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000))));
  if constexpr (kType == DType::i8)
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * kElement), 24));
  if constexpr (kType == DType::i4)
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 28 - 4 * kElement), 28));
}

inline void transpose(Words r[8]) {
  Words t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

// 16 FP8 elements as float16 times 2^-8.
inline Words halves_of_e4m3(__m128i bytes) {
  __m256i b = _mm256_cvtepu8_epi16(bytes), low = _mm256_and_si256(b, _mm256_set1_epi16(0x7f));
  __m256i sign = _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(0x80)), 8);
  __m256i half = _mm256_or_si256(_mm256_slli_epi16(low, 7), sign);
  __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(low, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
  return _mm256_or_si256(half, nan);
}

inline void store_words(uint32_t* p, Words w) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w); }
inline Words load_half_column(const uint16_t* p) {
  return _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline V half_column(Words w) { return _mm256_cvtph_ps(_mm256_castsi256_si128(w)); }

// 8 rows of 16 float16 as 16 columns of 8.
inline void transpose_halves_to(const Words r[8], uint16_t* out) {
  Words t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi16(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi16(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int h = 0; h < 2; ++h) {
      u[i + 2 * h] = _mm256_unpacklo_epi32(t[i + h], t[i + 2 + h]);
      u[i + 2 * h + 1] = _mm256_unpackhi_epi32(t[i + h], t[i + 2 + h]);
    }
  for (int e = 0; e < 8; ++e) {  // lane l of it is element 8 l + e of the eight keys
    const Words two =
        e % 2 ? _mm256_unpackhi_epi64(u[e / 2], u[4 + e / 2]) : _mm256_unpacklo_epi64(u[e / 2], u[4 + e / 2]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + e * W), _mm256_castsi256_si128(two));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (e + 8) * W), _mm256_extracti128_si256(two, 1));
  }
}

}  // namespace
}  // namespace kvasir::simd
