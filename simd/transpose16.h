// Sixteen rows of sixteen 32-bit words, transposed.
#pragma once

#include <immintrin.h>

namespace kvasir::simd {
namespace {

inline void transpose(__m512i t[16]) {
  __m512i u[16];
  for (int i = 0; i < 16; i += 2) {
    u[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
    u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    t[i] = _mm512_unpacklo_epi64(u[i], u[i + 2]);
    t[i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 2]);
    t[i + 2] = _mm512_unpacklo_epi64(u[i + 1], u[i + 3]);
    t[i + 3] = _mm512_unpackhi_epi64(u[i + 1], u[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    u[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
    u[i + 4] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    u[i + 8] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    u[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(u[i], u[i + 8], 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(u[i], u[i + 8], 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(u[i + 4], u[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(u[i + 4], u[i + 12], 0xdd);
  }
}

}  // namespace
}  // namespace kvasir::simd
