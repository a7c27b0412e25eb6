// int8 and int4 caches as bytes: the digits that they are multiplied by, nibbles, scales. What works on them gives the
// same sums, so that rows may go either way.
#pragma once

#include <immintrin.h>

#include "attention/cpu/kernels.h"

namespace kvasir::attention::cpu {
namespace {

constexpr int64_t rounded_up(int64_t n) { return (n + 63) / 64 * 64; }
inline __m512i load64(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline __mmask64 first_bytes(int n) { return n >= 64 ? ~__mmask64(0) : (__mmask64(1) << n) - 1; }

// ---- queries and weights as digits ----------------------------------------------------------------
// Numbers of 24 bits, by the largest of them: no further off than float32's own sums are.

constexpr int kDigits = 3;                // bytes with a sign, the lowest first
constexpr float kMostUnits = 8355000.0f;  // three times 127 is a little more: products may round up
constexpr float kSmallestMost = 1e-30f;   // whose reciprocal is finite; what is less than that counts for nothing

// The largest of what was seen, a NaN above all.
struct Largest {
  __m512i bits = _mm512_castps_si512(_mm512_set1_ps(kSmallestMost));
  void see(__m512 x) { bits = _mm512_max_epu32(bits, _mm512_castps_si512(_mm512_abs_ps(x))); }
  float value() const { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int(_mm512_reduce_max_epu32(bits))))); }
};

// Lanes whose lowest three bytes are the digits.
inline __m512i digits_of(__m512 x, __m512 units) {
  const __m512i half = _mm512_set1_epi32(0x808080);
  return _mm512_xor_si512(_mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, units)), half), half);
}

// Elements [0, n) of a row as digits, to[digit * stride + d]; gives what one unit is worth, NaN where the row has one.
inline float query_digits(const float* q, int n, int8_t* to, int stride) {
  Largest largest;
  for (int d = 0; d < n; d += 16) largest.see(_mm512_loadu_ps(q + d));
  const float most = largest.value();
  const __m512 units = _mm512_set1_ps(kMostUnits / most);
  for (int d = 0; d < n; d += 16) {
    const __m512i x = digits_of(_mm512_loadu_ps(q + d), units);
    for (int p = 0; p < kDigits; ++p)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + p * stride + d),
                       _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, uint32_t(8 * p))));
  }
  return most / kMostUnits;
}

// The weights of the tile's 64 keys times their scales as digits, 64 bytes each; gives what one unit is worth.
// Keys stand as value_bytes leaves them: byte 16 l + 4 i + b is key 16 i + 4 l + b.
inline float weight_digits(const float* p, const float* scales, uint8_t* to) {
  __m512 x[4];
  Largest largest;
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_mul_ps(_mm512_loadu_ps(p + 16 * i), _mm512_load_ps(scales + 16 * i));
    largest.see(x[i]);
  }
  const float most = largest.value();
  const __m512 units = _mm512_set1_ps(kMostUnits / most);
  const __m512i apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __m512i w[4];
  for (int i = 0; i < 4; ++i) w[i] = _mm512_shuffle_epi8(digits_of(x[i], units), apart);
  const __m512i low0 = _mm512_unpacklo_epi32(w[0], w[1]), low1 = _mm512_unpacklo_epi32(w[2], w[3]);
  const __m512i high0 = _mm512_unpackhi_epi32(w[0], w[1]), high1 = _mm512_unpackhi_epi32(w[2], w[3]);
  _mm512_store_si512(to, _mm512_unpacklo_epi64(low0, low1));
  _mm512_store_si512(to + 64, _mm512_unpackhi_epi64(low0, low1));
  _mm512_store_si512(to + 128, _mm512_unpacklo_epi64(high0, high1));
  return most / kMostUnits;
}

// ---- the cache ------------------------------------------------------------------------------------

// 64 elements of int4 as bytes, the even ones, then the odd ones: in the upper half, sixteen times what they are.
inline __m512i bytes_of_nibbles(__m256i packed) {
  const __m512i both = _mm512_broadcast_i64x4(packed);
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 0);
  return _mm512_and_si512(_mm512_sllv_epi16(both, shifts), _mm512_set1_epi8(char(0xf0)));
}

// Where element d of 64 stands in a key's bytes.
template <DType T>
inline __m512i element_at_place() {
  alignas(64) uint8_t at[64];
  for (int i = 0; i < 64; ++i) at[i] = uint8_t(T == DType::i8 ? i : i < 32 ? 2 * i : 2 * (i - 32) + 1);
  return _mm512_load_si512(at);
}

// Whether the rows stand one every `step`.
inline bool in_step(const uint8_t* const* rows, int64_t step) {
  const __m512i first = _mm512_set1_epi64(reinterpret_cast<int64_t>(rows[0]));
  const __m512i each = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(step));
  const __m512i low = _mm512_add_epi64(first, each), high = _mm512_add_epi64(low, _mm512_set1_epi64(8 * step));
  return (_mm512_cmpneq_epi64_mask(low, _mm512_loadu_si512(rows)) |
          _mm512_cmpneq_epi64_mask(high, _mm512_loadu_si512(rows + 8))) == 0;
}

// ---- scales ---------------------------------------------------------------------------------------

// Scales of two groups of sixteen keys that stand in words.
inline void two_groups(__m512i words, float* to) {
  _mm512_store_ps(to, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)));
  _mm512_store_ps(to + kTile, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16))));
}

// Scales of the tile's keys as [group][key], those of keys that nobody wants 0. Keys stand in blocks of sixteen.
void collect_scales(const KvRows& k, int groups, float* to) {
  const int begin = k.begin / 16 * 16, end = (k.end + 15) / 16 * 16;
  if (begin > 0 || end < kTile) __builtin_memset(to, 0, size_t(groups * kTile) * 4);
  if (!k.grouped) {
    for (int j = begin; j < end; j += 16) _mm512_store_ps(to + j, _mm512_set1_ps(k.scale));
    return;
  }
  if (k.scale_dtype == DType::f32) {
    for (int g = 0; g < groups; ++g)
      for (int j = begin; j < end; ++j) __builtin_memcpy(to + g * kTile + j, k.scales[j] + 4 * g, 4);
    return;
  }
  for (int j = begin; j < end; j += 16) {
    if (groups == 1 && in_step(k.scales + j, 2)) {
      _mm512_store_ps(to + j, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(k.scales[j]))));
    } else if (groups == 2 && in_step(k.scales + j, 4)) {
      two_groups(load64(k.scales[j]), to + j);
    } else if (groups == 2) {
      alignas(64) uint32_t words[16];
      for (int i = 0; i < 16; ++i) __builtin_memcpy(words + i, k.scales[j + i], 4);
      two_groups(_mm512_load_si512(words), to + j);
    } else {
      alignas(32) uint16_t half[16];
      for (int g = 0; g < groups; ++g) {
        for (int i = 0; i < 16; ++i) __builtin_memcpy(half + i, k.scales[j + i] + 2 * g, 2);
        _mm512_store_ps(to + g * kTile + j, _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<__m256i*>(half))));
      }
    }
  }
}

}  // namespace
}  // namespace kvasir::attention::cpu
