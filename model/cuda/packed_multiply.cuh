// What a warp multiplies of packed weights at a time (a stage of packed_kernel.cuh): multiply(), for each packing.
//
// Sixteen features' integers are the first operand of the matrix unit, eight rows of the input the second. Integers are
// made bfloat16 by their bits alone: 128 + q, whose d and m are shifted to match.
#pragma once

#include "attention/cuda/mma.cuh"
#include "model/cuda/packed_words.cuh"
#include "model/cuda/packing.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::Brain;

constexpr uint32_t kOnes = 0x3f803f80u;   // a pair of 1
constexpr uint32_t kMagic = 0x43004300u;  // twice 128

__device__ uint32_t pair_add(uint32_t a, uint32_t b) {
  const __nv_bfloat162 y =
      __hadd2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(y);
}

// sum += scale * part + offset * total, of rows g (low) and g + 8 (high) of the weights.
template <int kWide>
__device__ void add_scaled(float (&sum)[kWide][4], const float (&part)[kWide][4], const float (&total)[kWide][4],
                           float2 low, float2 high) {
#pragma unroll
  for (int w = 0; w < kWide; ++w)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 s = i < 2 ? low : high;
      sum[w][i] = fmaf(s.x, part[w][i], fmaf(s.y, total[w][i], sum[w][i]));
    }
}
// The same without an offset.
template <int kWide>
__device__ void add_scaled(float (&sum)[kWide][4], const float (&part)[kWide][4], float low, float high) {
#pragma unroll
  for (int w = 0; w < kWide; ++w)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[w][i] = fmaf(i < 2 ? low : high, part[w][i], sum[w][i]);
}
template <int kWide>
__device__ void add(float (&to)[kWide][4], const float (&from)[kWide][4]) {
#pragma unroll
  for (int w = 0; w < kWide; ++w)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[w][i] += from[w][i];
}

// What stands for 128 + q: d and m of q become those of it.
__device__ float2 shifted(uint32_t halves) {
  float2 s = pair_of(halves);
  s.y = fmaf(-128.0f, s.x, s.y);
  return s;
}

// A stage as a lane sees it.
template <Packing kPacking, int kWide, bool kTotals>
struct Stage {
  const uint8_t *weights, *in;  // in: row g of the input; its other rows `stride` bytes apart
  int stride;
  const float* totals;  // sums of x by group, of rows 2 * tid and 2 * tid + 1, where they are there (kTotals)
  int lane, g, tid;
  uint32_t magic;

  // Of feature group t, its features 0 to 7 or 8 to 15.
  __device__ const uint8_t* block(int t, int half) const { return weights + (t * 2 + half) * block_bytes(kPacking); }
  __device__ uint4 integers(int t, int half, int plane = 0) const {
    return at16(block(t, half) + plane * kBlockRows * 64 + lane * 16);
  }
  __device__ const uint8_t* scales(int t, int half) const {
    return block(t, half) + kBlockRows * quant_bytes(kPacking) + g * scale_bytes(kPacking);
  }

  // Of a group, of two rows of the input: by the matrix unit where nobody has them.
  __device__ void add_total(float (&total)[4], int group, int w, uint32_t x0, uint32_t x1) const {
    if constexpr (kTotals) {
      const float2 t = *reinterpret_cast<const float2*>(totals + (group * kWide + w) * 8);
      total[0] = total[2] = t.x, total[1] = total[3] = t.y;
    } else {
      const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
      Brain::mma(total, ones, x0, x1);
    }
  }
};

// Thirty-two elements of sixteen features as 128 + q, sixteen for each product.
struct NibblePairs {
  uint32_t first[4], second[4];
  __device__ NibblePairs(const uint4 (&q)[2], int group, uint32_t magic) {
    const uint32_t low = word_of(q[0], group), high = word_of(q[1], group);
#pragma unroll
    for (int i = 0; i < 4; ++i) first[i] = low_nibbles(i % 2 ? high : low, i / 2 * 4, magic);
#pragma unroll
    for (int i = 0; i < 4; ++i) second[i] = low_nibbles(i % 2 ? high : low, 8 + i / 2 * 4, magic);
  }
};

// All 128 elements have one d and m.
template <int kWide, int kTall, bool kTotals>
__device__ void multiply(const Stage<Packing::q4_128, kWide, kTotals>& s, float (&sum)[kTall][kWide][4]) {
  // Where few warps are there, sums of their own by turns: a product that waits for the one before it would leave the
  // matrix unit idle.
  constexpr int kApart = kTotals ? 1 : kTall * kWide >= 4 ? 2 : 4;
  uint4 q[kTall][2];
  float part[kApart][kTall][kWide][4] = {}, total[2][kWide][4] = {};
#pragma unroll
  for (int t = 0; t < kTall; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) q[t][h] = s.integers(t, h);
  if constexpr (kTotals)
#pragma unroll
    for (int w = 0; w < kWide; ++w) s.add_total(total[0][w], 0, w, 0, 0);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint4 x[kWide];
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
      x[w] = at16(s.in + w * 8 * s.stride + j * 64 + s.tid * 16);
      if (!kTotals) s.add_total(total[0][w], 0, w, x[w].x, x[w].y), s.add_total(total[1][w], 0, w, x[w].z, x[w].w);
    }
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      const NibblePairs a(q[t], j, s.magic);
#pragma unroll
      for (int w = 0; w < kWide; ++w) {
        Brain::mma(part[2 * j % kApart][t][w], a.first, x[w].x, x[w].y);
        Brain::mma(part[(2 * j + 1) % kApart][t][w], a.second, x[w].z, x[w].w);
      }
    }
  }
  add(total[0], total[1]);
#pragma unroll
  for (int t = 0; t < kTall; ++t)
#pragma unroll
    for (int a = 1; a < kApart; ++a) add(part[0][t], part[a][t]);
#pragma unroll
  for (int t = 0; t < kTall; ++t) {
    auto scale = [&](int h) { return shifted(*reinterpret_cast<const uint32_t*>(s.scales(t, h))); };
    add_scaled(sum[t], part[0][t], total[0], scale(0), scale(1));
  }
}

template <int kWide, int kTall, bool kTotals>
__device__ void multiply(const Stage<Packing::q4, kWide, kTotals>& s, float (&sum)[kTall][kWide][4]) {
  uint4 q[kTall][2], scales[kTall][2];
#pragma unroll
  for (int t = 0; t < kTall; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) q[t][h] = s.integers(t, h), scales[t][h] = at16(s.scales(t, h));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint4 x[kWide];
    float total[kWide][4] = {};
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
      x[w] = at16(s.in + w * 8 * s.stride + j * 64 + s.tid * 16);
      s.add_total(total[w], j, w, x[w].x, x[w].y);
      if (!kTotals) s.add_total(total[w], j, w, x[w].z, x[w].w);
    }
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      const NibblePairs a(q[t], j, s.magic);
      float part[kWide][4] = {};
#pragma unroll
      for (int w = 0; w < kWide; ++w) {
        Brain::mma(part[w], a.first, x[w].x, x[w].y);
        Brain::mma(part[w], a.second, x[w].z, x[w].w);
      }
      add_scaled(sum[t], part, total, shifted(word_of(scales[t][0], j)), shifted(word_of(scales[t][1], j)));
    }
  }
}

template <int kWide, int kTall, bool kTotals>
__device__ void multiply(const Stage<Packing::q6, kWide, kTotals>& s, float (&sum)[kTall][kWide][4]) {
#pragma unroll
  for (int jj = 0; jj < 4; ++jj) {  // two groups of 16
    uint2 x[kWide][2];
    float total[2][kWide][4] = {};
#pragma unroll
    for (int w = 0; w < kWide; ++w)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        x[w][h] = at8(s.in + w * 8 * s.stride + (jj * 2 + h) * 32 + s.tid * 8);
        s.add_total(total[h][w], jj * 2 + h, w, x[w][h].x, x[w][h].y);
      }
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      uint32_t a[2][4];  // pairs of rows g and g + 8
      uint2 scales[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint8_t* b = s.block(t, h);
        const uint32_t q = *reinterpret_cast<const uint32_t*>(b + s.lane * 16 + jj * 4);
        const uint32_t bits = *reinterpret_cast<const uint32_t*>(b + kBlockRows * 64 + s.lane * 8 + jj / 2 * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int from = jj % 2 * 8 + i * 2;  // to bits 4 and 20
          a[h][i] =
              low_nibbles(q, 4 * i, s.magic) | ((from < 4 ? bits << (4 - from) : bits >> (from - 4)) & 0x00300030u);
        }
        scales[h] = at8(b + kBlockRows * quant_bytes(Packing::q6) + s.g * scale_bytes(Packing::q6) + jj * 8);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pairs[4] = {a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1]};
        float part[kWide][4] = {};
#pragma unroll
        for (int w = 0; w < kWide; ++w) Brain::mma(part[w], pairs, x[w][h].x, x[w][h].y);
        add_scaled(sum[t], part, total[h], shifted(h ? scales[0].y : scales[0].x),
                   shifted(h ? scales[1].y : scales[1].x));
      }
    }
  }
}

template <int kWide, int kTall, bool kTotals>
__device__ void multiply(const Stage<Packing::e4m3, kWide, kTotals>& s, float (&sum)[kTall][kWide][4]) {
  float part[2][kTall][kWide][4] = {};  // of each half of the elements: a product does not wait for the one before it
#pragma unroll
  for (int plane = 0; plane < 2; ++plane)
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      const uint4 low = s.integers(t, 0, plane), high = s.integers(t, 1, plane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t a[4];
        widen_bytes(word_of(low, i), a[0], a[2]);
        widen_bytes(word_of(high, i), a[1], a[3]);
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          const uint2 x = at8(s.in + w * 8 * s.stride + (plane * 2 + i / 2) * 64 + s.tid * 16 + i % 2 * 8);
          Brain::mma(part[plane][t][w], a, x.x, x.y);
        }
      }
    }
#pragma unroll
  for (int t = 0; t < kTall; ++t) {
    const float d[2] = {*reinterpret_cast<const float*>(s.scales(t, 0)),
                        *reinterpret_cast<const float*>(s.scales(t, 1))};
#pragma unroll
    for (int w = 0; w < kWide; ++w)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[t][w][i] = fmaf(d[i / 2], part[0][t][w][i] + part[1][t][w][i], sum[t][w][i]);
  }
}

// Two of four bytes, as signed numbers: the low bits with 128, less 128 or twice that.
__device__ uint32_t widen_signed(uint32_t four, bool upper, uint32_t magic) {
  const uint32_t two = __byte_perm(four, 0, upper ? 0x4342 : 0x4140);
  uint32_t low_bits, less;
  asm("lop3.b32 %0, %1, 0x007f007f, %2, 0xea;" : "=r"(low_bits) : "r"(two), "r"(magic));
  asm("lop3.b32 %0, %1, 0x00800080, %2, 0x6a;" : "=r"(less) : "r"(two), "r"(magic ^ 0x80808080u));
  return pair_add(low_bits, less);
}

template <int kWide, int kTall, bool kTotals>
__device__ void multiply(const Stage<Packing::q8, kWide, kTotals>& s, float (&sum)[kTall][kWide][4]) {
#pragma unroll
  for (int plane = 0; plane < 2; ++plane)
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      uint4 q[2];
      float2 scales[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        q[h] = s.integers(t, h, plane);
        scales[h] = pair_of(*reinterpret_cast<const uint32_t*>(s.scales(t, h) + plane * 4));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float part[kWide][4] = {};
        uint4 x[kWide];
#pragma unroll
        for (int w = 0; w < kWide; ++w) x[w] = at16(s.in + w * 8 * s.stride + (plane * 2 + j) * 64 + s.tid * 16);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t low = word_of(q[0], j * 2 + e), high = word_of(q[1], j * 2 + e);
          const uint32_t a[4] = {widen_signed(low, false, s.magic), widen_signed(high, false, s.magic),
                                 widen_signed(low, true, s.magic), widen_signed(high, true, s.magic)};
#pragma unroll
          for (int w = 0; w < kWide; ++w) Brain::mma(part[w], a, e ? x[w].z : x[w].x, e ? x[w].w : x[w].y);
        }
        add_scaled(sum[t], part, j ? scales[0].y : scales[0].x, j ? scales[1].y : scales[1].x);
      }
    }
}

// A stage's products. `in` is where row g's elements of it lie, rows `stride` bytes apart; `totals` the sums of x by
// group, of row 2 * tid, where they are there (kTotals).
template <Packing kPacking, int kWide, int kTall, bool kTotals>
__device__ void multiply(const uint8_t* weights, const uint8_t* in, int stride, const float* totals,
                         float (&sum)[kTall][kWide][4]) {
  const int lane = threadIdx.x % 32;
  multiply(Stage<kPacking, kWide, kTotals>{weights, in, stride, totals, lane, lane / 4, lane % 4, in_register(kMagic)},
           sum);
}

}  // namespace
}  // namespace kvasir::model::cuda
