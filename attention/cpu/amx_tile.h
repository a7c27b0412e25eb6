// Tile registers of the matrix unit, its instructions, and sums as they leave it.
#pragma once

#include <immintrin.h>

#include "attention/cpu/kernels.h"

namespace kvasir::attention::cpu {
namespace {

constexpr int kUnit = 1024;  // bytes of a register

// The compiler does not know what these read: fence() stands between the stores and them.
template <int kTmm>
inline void tile_load(const uint8_t* p) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(int64_t(64)), "i"(kTmm));
}
// One row every `step` bytes.
template <int kTmm>
inline void tile_load_rows(const uint8_t* p, int64_t step) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(step), "i"(kTmm));
}
inline void fence() { asm volatile("" ::: "memory"); }
template <int kTmm>
inline void tile_store(void* p) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(int64_t(64)), "i"(kTmm) : "memory");
}
template <int kTmm>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTmm));
}
template <int kSum, int kA, int kB>
inline void tile_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}
// Of bytes with signs.
template <int kSum, int kA, int kB>
inline void tile_product_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}
// f for those in [from, to) of the two sums under way.
template <class F>
[[gnu::always_inline]] inline void each_sum(int from, int to, const F& f) {
  if (from <= 0 && 0 < to) f(Count<0>{});
  if (from <= 1 && 1 < to) f(Count<1>{});
}
template <int N, class F>
[[gnu::always_inline]] inline void each_of(const F& f) {  // N of three
  f(Count<0>{});
  if constexpr (N > 1) f(Count<1>{});
  if constexpr (N > 2) f(Count<2>{});
}

// Columns [0, 4) of sixteen rows of sixteen, as four vectors.
[[gnu::always_inline]] inline void transpose_four(const float* at, __m512* out) {
  __m512 t[4];
  for (int i = 0; i < 4; ++i, at += 16) {  // rows i, i + 4, i + 8, i + 12
    t[i] = _mm512_castps128_ps512(_mm_load_ps(at));
    t[i] = _mm512_mask_broadcast_f32x4(t[i], 0x00f0, _mm_load_ps(at + 64));
    t[i] = _mm512_mask_broadcast_f32x4(t[i], 0x0f00, _mm_load_ps(at + 128));
    t[i] = _mm512_mask_broadcast_f32x4(t[i], 0xf000, _mm_load_ps(at + 192));
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(t[0], t[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(t[0], t[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(t[2], t[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(t[2], t[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}

void configure() {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  const Config config;
  asm volatile("ldtilecfg %0" ::"m"(config));
}
void release() { asm volatile("tilerelease"); }

}  // namespace
}  // namespace kvasir::attention::cpu
