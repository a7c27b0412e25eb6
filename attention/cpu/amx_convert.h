// What the cache holds as bfloat16 parts that add up to it exactly: three for float32, one for
// bfloat16 and FP8, whose scale waits for the sums. Pairs of parts stand together, as the matrix unit wants them:
// of two elements of a key, or of one element of two keys.
#pragma once

#include <immintrin.h>

#include "attention/cpu/kernels.h"

namespace kvasir::attention::cpu {
namespace {

constexpr int parts_of(DType type) { return type == DType::f32 ? 3 : 1; }
constexpr int bits_of(DType type) { return type == DType::f32 ? 32 : type == DType::bf16 ? 16 : 8; }
// Which elements of 32 stand where: slot 2i and 2i + 1 are a pair.
constexpr int element_of_slot(DType type, int slot) {
  if (type == DType::bf16 || type == DType::f8_e4m3) return slot;
  return slot / 2 + slot % 2 * 16;
}

inline __m512i upper() { return _mm512_set1_epi32(int(0xffff0000)); }
inline __m512 top_half(__m512 x) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), upper())); }
// The upper halves of a and b: a's below b's.
inline __m512i pair(__m512 a, __m512 b) {
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b), upper(),
                                   0xf8 /* a | (b & c) */);
}

template <int kParts>
inline void split(__m512 a, __m512 b, __m512i* out) {
  for (int i = 0; i < kParts; ++i) {
    out[i] = pair(a, b);
    if (i + 1 == kParts) return;
    a = _mm512_sub_ps(a, top_half(a));
    b = _mm512_sub_ps(b, top_half(b));
  }
}

inline __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// FP8 in words. Its exponent moves up; what is below 2^-6 is looked up, and NaN put back.
inline __m512i e4m3_words(__m512i b) {
  alignas(64) static constexpr uint16_t kSmall[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
                                                      0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
                                                      0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
                                                      0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i low = _mm512_and_si512(b, _mm512_set1_epi16(0x7f));
  __m512i x = _mm512_add_epi16(_mm512_slli_epi16(low, 4), _mm512_set1_epi16(0x3c00));
  x = _mm512_mask_permutexvar_epi16(x, _mm512_cmplt_epu16_mask(low, _mm512_set1_epi16(8)), low,
                                    _mm512_load_si512(kSmall));
  x = _mm512_mask_mov_epi16(x, _mm512_cmpeq_epi16_mask(low, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7fc0));
  return _mm512_ternarylogic_epi32(x, _mm512_slli_epi16(b, 8), _mm512_set1_epi16(int16_t(0x8000)), 0xf8);
}

// Elements [32 c, 32 c + 32) of one key, in the order of element_of_slot.
template <DType T>
inline void key_parts(const uint8_t* row, int c, __m512i* out) {
  const uint8_t* p = row + c * 4 * bits_of(T);
  if constexpr (T == DType::bf16) {
    out[0] = _mm512_loadu_si512(p);
  } else if constexpr (T == DType::f8_e4m3) {
    out[0] = e4m3_words(_mm512_cvtepu8_epi16(load32(p)));
  } else {
    split<parts_of(T)>(_mm512_loadu_ps(p), _mm512_loadu_ps(p + 2 * bits_of(T)), out);
  }
}

// Elements [16 d, 16 d + 16) of two keys.
template <DType T>
inline void value_parts(const uint8_t* row0, const uint8_t* row1, int d, __m512i* out) {
  const uint8_t *p = row0 + d * 2 * bits_of(T), *q = row1 + d * 2 * bits_of(T);
  if constexpr (T == DType::bf16) {
    out[0] = _mm512_or_si512(_mm512_cvtepu16_epi32(load32(p)), _mm512_slli_epi32(_mm512_cvtepu16_epi32(load32(q)), 16));
  } else if constexpr (T == DType::f8_e4m3) {
    const __m128i a = load16(p), b = load16(q);
    out[0] = e4m3_words(_mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b))));
  } else {
    split<parts_of(T)>(_mm512_loadu_ps(p), _mm512_loadu_ps(q), out);
  }
}

}  // namespace
}  // namespace kvasir::attention::cpu
