// What the matrix unit multiplies for int8 and int4 caches: bytes as they lie.
#pragma once

#include "attention/cpu/amx_tile.h"
#include "attention/cpu/bytes.h"
#include "attention/cpu/prefetch.h"

namespace kvasir::attention::cpu {
namespace {

// ---- the cache ------------------------------------------------------------------------------------

// Sixteen keys for the matrix unit: where their rows begin, and one every how many bytes.
struct KeyBlock {
  const uint8_t* at;
  int64_t step;
};

// Keys [j, j + 16): where they lie if they can be read there, else copied to `room`, 64 bytes for each 64 elements.
template <DType T>
inline KeyBlock key_block(const KvRows& k, int j, uint8_t* room) {
  const int head_dim = k.head_dim;
  if constexpr (T == DType::i8) {
    const int64_t step = k.row[j + 1] - k.row[j];
    if (head_dim >= 64 && in_step(k.row + j, step)) return {k.row[j], step};
  }
  const int64_t step = (head_dim + 63) / 64 * 64;
  for (int d = 0; d < head_dim; d += 64) {
    const __mmask64 there = first_bytes(head_dim - d);
    const __mmask8 there4 = __mmask8(head_dim - d < 64 ? 0x0f : 0xff);
    for (int i = 0; i < 16; ++i) {
      const uint8_t* row = k.row[j + i];
      __m512i x;
      if constexpr (T == DType::i8)
        x = _mm512_maskz_loadu_epi8(there, row + d);
      else
        x = bytes_of_nibbles(_mm256_maskz_loadu_epi32(there4, row + d / 2));
      _mm512_store_si512(room + i * step + d, x);
    }
  }
  return {room, step};
}

// 64 elements of a value, or those 32 that are left; every sixteen of them as one dword of each 128 bits.
template <DType T>
inline __m512i value_row(const uint8_t* row, int d, bool half) {
  if constexpr (T == DType::i8) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, half ? _mm512_maskz_loadu_epi8(first_bytes(32), row + d) : load64(row + d));
  } else {
    alignas(64) static constexpr auto kOrder = [] {
      struct {
        uint8_t at[64];
      } order = {};
      for (int i = 0; i < 64; ++i) {
        const int element = i / 4 % 4 * 16 + i / 16 * 4 + i % 4;
        order.at[i] = uint8_t(element / 2 + element % 2 * 32);
      }
      return order;
    }();
    const uint8_t* at = row + d / 2;
    const __m256i packed = _mm256_maskz_loadu_epi32(half ? 0x0f : 0xff, at);
    return _mm512_permutexvar_epi8(_mm512_load_si512(kOrder.at), bytes_of_nibbles(packed));
  }
}

// Values of four keys together, as the matrix unit wants them: sixteen elements a register, four keys a row of it. The
// keys' order is that of weight_digits.
template <DType T>
inline void value_bytes(const KvRows& v, uint8_t* to, Prefetcher& ahead) {
  for (int quad = v.begin / 4; quad < (v.end + 3) / 4; ++quad) {
    const uint8_t* const* rows = v.row + 4 * quad;
    uint8_t* out = to + (quad % 4 * 4 + quad / 4) * 64;
    for (int d = 0; d < v.head_dim; d += 64) {
      prefetch(ahead);
      const bool half = v.head_dim - d < 64;
      __m512i x[4];
      for (int i = 0; i < 4; ++i) x[i] = value_row<T>(rows[i], d, half);
      const __m512i low0 = _mm512_unpacklo_epi8(x[0], x[1]), low1 = _mm512_unpacklo_epi8(x[2], x[3]);
      const __m512i high0 = _mm512_unpackhi_epi8(x[0], x[1]), high1 = _mm512_unpackhi_epi8(x[2], x[3]);
      uint8_t* at = out + d / 16 * kUnit;
      _mm512_store_si512(at, _mm512_unpacklo_epi16(low0, low1));
      _mm512_store_si512(at + kUnit, _mm512_unpackhi_epi16(low0, low1));
      if (half) continue;
      _mm512_store_si512(at + 2 * kUnit, _mm512_unpacklo_epi16(high0, high1));
      _mm512_store_si512(at + 3 * kUnit, _mm512_unpackhi_epi16(high0, high1));
    }
  }
}

}  // namespace
}  // namespace kvasir::attention::cpu
