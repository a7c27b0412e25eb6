#include "attention/cpu/kernels.h"
#include "core/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace kvasir::attention::cpu {
namespace {

constexpr const char* kName = "avx2";
constexpr int W = 8;
constexpr int kColumns = 2, kFewColumns = 4;
template <int N>
struct Count {
  static constexpr int value = N;
};

using V = __m256;
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V x) { _mm256_storeu_ps(p, x); }
inline V set1(float x) { return _mm256_set1_ps(x); }
inline V zero() { return _mm256_setzero_ps(); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V div_v(V a, V b) { return _mm256_div_ps(a, b); }
inline V fma_v(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V max_v(V a, V b) { return _mm256_max_ps(a, b); }
inline V min_v(V a, V b) { return _mm256_min_ps(a, b); }
inline V abs_v(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline V round_v(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V pow2(V n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline V select_ge(V a, V b, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
inline V iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
inline float first(V a) { return _mm256_cvtss_f32(a); }
inline float reduce_max(V a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float reduce_add(V a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
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
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  __m128i b = _mm_cvtsi32_si128(four);
  __m128i low = _mm_and_si128(b, _mm_set1_epi8(15)), high = _mm_and_si128(_mm_srli_epi16(b, 4), _mm_set1_epi8(15));
  __m128i q = _mm_unpacklo_epi8(low, high), eight = _mm_set1_epi8(8);
  q = _mm_sub_epi8(_mm_xor_si128(q, eight), eight);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q));
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
inline float f16_scalar(const uint8_t* p) {
  uint16_t h;
  __builtin_memcpy(&h, p, 2);
  return _cvtsh_ss(h);
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

inline void transpose(V r[8]) {
  V t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

#include "attention/cpu/kernels_inl.h"

}  // namespace

const Kernels* kernels_avx2() {
  return kvasir::cpu().avx2 && kvasir::cpu().fma && kvasir::cpu().f16c ? &kTable : nullptr;
}

}  // namespace kvasir::attention::cpu
#else
namespace kvasir::attention::cpu {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace kvasir::attention::cpu
#endif
