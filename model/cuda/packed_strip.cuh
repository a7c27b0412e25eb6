// Packed weights (packing.h) as bfloat16 in registers, for matrix instructions that take their first operand there.
//
// A lane has rows g and g + 8 of a strip of sixteen features; of sixteen elements of k the instruction wants pairs 2 *
// t and 2 * t + 8 of each, and the lane's packed words hold others, which lie one behind another. So the contracted
// index is permuted, for weights and input alike: packed_pair() says where a pair of the input goes.
#pragma once

#include <cuda_fp8.h>

#include "attention/cuda/mma.cuh"
#include "model/cuda/packed_words.cuh"
#include "model/cuda/packing.h"

namespace kvasir::model::cuda {

// Of pair `p` of 64 elements in a row of the input: its place among those 32 pairs.
template <Packing kPacking>
__device__ inline int packed_pair(int p) {
  if constexpr (kPacking == Packing::q6)  // [group of 16][half][t] of [group of 16][t][half]
    return p / 8 * 8 + p % 2 * 4 + p % 8 / 2;
  else  // [group of 32][pair][t] of [group of 32][t][pair]
    return p / 16 * 16 + p % 4 * 4 + p % 16 / 4;
}

// d * q + m of a pair, from a word of 1024 + q: in float16, as d and m are stored, and rounded to bfloat16 once. The
// largest scale is 2^14 (weight.cc); a hundred and twenty-eighth of it leaves room for every q.
constexpr float kStripUnit = 128;
__device__ inline uint32_t widened(uint32_t word, __half2 d, __half2 m) {
  const __half2 q = __hadd2(reinterpret_cast<const __half2&>(word), __float2half2_rn(-1024));
  const float2 y = __half22float2(__hfma2(q, d, m));
  return attention::cuda::Brain::pack(y.x, y.y);
}
__device__ inline uint32_t widened(uint32_t word, uint32_t scale) {
  const __half2 s = __hmul2(reinterpret_cast<const __half2&>(scale), __float2half2_rn(1 / kStripUnit));
  return widened(word, __low2half2(s), __high2half2(s));
}
constexpr uint32_t kThousands = 0x64006400u;  // twice 1024, as float16

// A lane's part of a strip, 128 elements of k. widen(): the registers of both sixteens of group j of 32, of each rows g
// and g + 8 by turns.
template <Packing kPacking>
struct PackedStrip {
  static_assert(is_nibbles(kPacking));
  static constexpr int kBlock = block_bytes(kPacking), kScales = kBlockRows * quant_bytes(kPacking);
  uint4 q[2];
  const uint8_t* scales;

  __device__ void read(const uint8_t* strip, int lane) {
    q[0] = at16(strip + lane * 16), q[1] = at16(strip + kBlock + lane * 16);
    scales = strip + kScales + lane / 4 * scale_bytes(kPacking);
  }
  __device__ void widen(int j, uint32_t* a) const {
    const uint32_t thousands = in_register(kThousands);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = kPacking == Packing::q4 ? j * 4 : 0;
      const uint32_t scale = *reinterpret_cast<const uint32_t*>(scales + h * kBlock + at);
      const uint32_t w = word_of(q[h], j);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[2 * i + h] = widened(low_nibbles(w, 4 * i, thousands), scale);
    }
  }
};

template <>
struct PackedStrip<Packing::q6> {
  static constexpr int kBlock = block_bytes(Packing::q6), kScales = kBlockRows * quant_bytes(Packing::q6);
  uint4 q[2];
  uint2 bits[2];
  const uint8_t* scales;

  __device__ void read(const uint8_t* strip, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      q[h] = at16(strip + h * kBlock + lane * 16);
      bits[h] = at8(strip + h * kBlock + kBlockRows * 64 + lane * 8);
    }
    scales = strip + kScales + lane / 4 * scale_bytes(Packing::q6);
  }
  __device__ void widen(int j, uint32_t* a) const {
    const uint32_t thousands = in_register(kThousands);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t w = word_of(q[h], j), two = j / 2 == 0 ? bits[h].x : bits[h].y;
      const uint2 halves = at8(scales + h * kBlock + j * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int from = j % 2 * 8 + i * 2;  // to bits 4 and 20
        const uint32_t high = (from < 4 ? two << (4 - from) : two >> (from - 4)) & 0x00300030u;
        a[i / 2 * 4 + i % 2 * 2 + h] = widened(low_nibbles(w, 4 * i, thousands) | high, i < 2 ? halves.x : halves.y);
      }
    }
  }
};

template <>
struct PackedStrip<Packing::q8> {
  static constexpr int kBlock = block_bytes(Packing::q8), kScales = kBlockRows * quant_bytes(Packing::q8);
  uint4 q[2][2];  // of 64 elements, rows g or g + 8
  const uint8_t* scales;

  __device__ void read(const uint8_t* strip, int lane) {
#pragma unroll
    for (int plane = 0; plane < 2; ++plane)
#pragma unroll
      for (int h = 0; h < 2; ++h) q[plane][h] = at16(strip + h * kBlock + plane * kBlockRows * 64 + lane * 16);
    scales = strip + kScales + lane / 4 * scale_bytes(Packing::q8);
  }
  __device__ void widen(int j, uint32_t* a) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4& four = q[j / 2][h];
      const __half2 d = __hmul2(__half2half2(*reinterpret_cast<const __half*>(scales + h * kBlock + j * 2)),
                                __float2half2_rn(1 / kStripUnit));
      const __half2 m = __hmul2(d, __float2half2_rn(-128));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = i / 2 == 0 ? (j % 2 ? four.z : four.x) : (j % 2 ? four.w : four.y);
        a[2 * i + h] = widened(__byte_perm(word, 0x64646464u, i % 2 ? 0x4342 : 0x4140), d, m);
      }
    }
  }
};

template <>
struct PackedStrip<Packing::e4m3> {
  static constexpr int kBlock = block_bytes(Packing::e4m3), kScales = kBlockRows * quant_bytes(Packing::e4m3);
  uint4 q[2][2];  // of 64 elements, rows g or g + 8
  float d[2];

  __device__ void read(const uint8_t* strip, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int plane = 0; plane < 2; ++plane)
        q[plane][h] = at16(strip + h * kBlock + plane * kBlockRows * 64 + lane * 16);
      d[h] = *reinterpret_cast<const float*>(strip + h * kBlock + kScales + lane / 4 * 4) * (1 / kStripUnit);
    }
  }
  __device__ void widen(int j, uint32_t* a) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4& four = q[j / 2][h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = i / 2 == 0 ? (j % 2 ? four.z : four.x) : (j % 2 ? four.w : four.y);
        const __half2_raw two = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(word >> i % 2 * 16), __NV_E4M3);
        const float2 y = __half22float2(__half2(two));
        a[2 * i + h] = attention::cuda::Brain::pack(d[h] * y.x, d[h] * y.y);
      }
    }
  }
};

}  // namespace kvasir::model::cuda
