// Rows of a product's left side as integers of 12 bits in two planes, with the sums that packings take off or add.
#pragma once

#include "model/cpu/blocks.h"
#include "model/cpu/row_kernels.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

// The greatest magnitude of a row; as integers, magnitudes compare the same and NaN is the greatest.
inline float magnitude(const float* x, int64_t cols) {
  uint32_t most = 0;
  for (int64_t i = 0; i < cols; ++i) {
    uint32_t a = bits_of(x[i]) & 0x7fffffffu;
    most = a > most ? a : most;
  }
  return float_of(most);
}

// The greatest integer of a row. Two rows in three bytes (pairs_avx2.h) allow 15 * 127 - 120, two planes alone would
// 2039; an even one leaves half of the greatest number whole.
constexpr int kActivationRange = 1784;

// 12 bits of 32 inputs in two planes. Adding 1.5 * 2^23 rounds half to even into the low bits.
inline void quantize_block(const float* x, float inverse, int8_t* high, int8_t* low) {
  for (int j = 0; j < 32; ++j) {
    int32_t v = int32_t(bits_of(fma1(x[j], inverse, 12582912.0f)) - 0x4b400000u), up = (v + 8) >> 4;
    high[j] = int8_t(up), low[j] = int8_t(v - 16 * up);
  }
}

// Of 32 inputs' planes: the sums of either half of the high one, then of the low one.
inline void plane_sums(const int8_t* high, const int8_t* low, int32_t* sums) {
  for (int h = 0; h < 2; ++h) {
    sums[h] = sums[2 + h] = 0;
    for (int j = 16 * h; j < 16 * h + 16; ++j) sums[h] += high[j], sums[2 + h] += low[j];
  }
}

// Where a row's block goes: its planes, and its sums `stride` apart from those of the next row or half.
struct BlockPlace {
  int8_t *high, *low;
  int64_t sum, stride;
};

inline void put_sums(const PackingInfo& info, const BlockPlace& at, const int32_t* sums, const QuantRows& to) {
  auto value = [&](int h) { return 16 * sums[h] + sums[2 + h]; };
  auto put_planes = [&](int64_t place, int32_t high, int32_t low) {
    int32_t* p = to.planes + 4 * place;
    p[0] = -8 * high, p[1] = -8 * low, p[2] = int32_t(uint32_t(high) << 16), p[3] = int32_t(uint32_t(low) << 16);
  };
  if (info.of_rows && info.halves)
    put_planes(at.sum, sums[0], sums[2]), put_planes(at.sum + at.stride, sums[1], sums[3]);
  else if (info.of_rows)
    put_planes(at.sum, sums[0] + sums[1], sums[2] + sums[3]);
  else if (info.zero != 0)
    to.offsets[at.sum] = -info.zero * (value(0) + value(1));
  else if (info.halves)
    to.sums[at.sum] = float(value(0)), to.sums[at.sum + at.stride] = float(value(1));
  else
    to.sums[at.sum] = float(value(0) + value(1));
}

// Each block of a row goes to place(b); done(b, where, its plane_sums).
template <class Own, class Place, class Done>
inline void quantize_to(const float* x, const QuantRows& to, int64_t row, const Place& place, const Done& done) {
  constexpr float kRange = kActivationRange;
  float max, inverse;
  if constexpr (requires { &Own::magnitude; })
    max = Own::magnitude(x, to.cols);
  else
    max = magnitude(x, to.cols);
  inverse = max > 1e-30f ? kRange / max : 0.0f;
  to.d[row] = max / kRange;
  for (int64_t b = 0; b < to.cols / 32; ++b) {
    const BlockPlace at = place(b);
    int32_t made[4];
    if constexpr (requires { &Own::quantize_block; })
      Own::quantize_block(x + 32 * b, inverse, at.high, at.low);
    else
      quantize_block(x + 32 * b, inverse, at.high, at.low);
    if constexpr (requires { &Own::plane_sums; })
      Own::plane_sums(at.high, at.low, made);
    else
      plane_sums(at.high, at.low, made);
    done(b, at, made);
  }
}

void quantize(const float* x, Packing packing, const QuantRows& to, int64_t row) {
  const PackingInfo info = packing_info(packing);
  const int64_t blocks = to.cols / 32, parts = info.halves ? 2 : 1;
  quantize_to<Blocks>(
      x, to, row,
      [&](int64_t b) {
        int8_t* q = to.q + 2 * row * to.cols + 64 * b;
        return BlockPlace{q, q + 32, (row * blocks + b) * parts, 1};
      },
      [&](int64_t, const BlockPlace& at, const int32_t* sums) { put_sums(info, at, sums, to); });
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
