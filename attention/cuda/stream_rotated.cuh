// StreamingLLM in the stream kernels: keys are cached as they were before RoPE, and a key stands where it is among
// those that are seen. What matters is how far a key and its query are apart, so the rows of a tile share one count:
// keys of a run have ranks from Segment::ranked_from on, each row the rank of its own key. Rows that see all sinks but
// begin their windows at different keys would count sinks differently: these are a run of their own
// (Planner::add_stream).
#pragma once

#include "attention/cuda/device.cuh"
#include "attention/params.h"

namespace kvasir::attention::cuda {

__device__ __forceinline__ void rotate(float& x, float& y, float2 angle) {
  const float was = x;
  x = was * angle.x - y * angle.y;
  y = y * angle.x + was * angle.y;
}

// The angles of the next tile on their way into the nearest cache: each is read where it is used, one after another.
template <int kD, int kTile>
__device__ __forceinline__ void prefetch_angles(const float2* ranks, int rank, int last_rank, int lane) {
  constexpr int kLines = kTile * kD / 2 * int(sizeof(float2)) / 128;
#pragma unroll
  for (int i = 0; i < kLines; i += 32) {
    const int at = (i + lane) * 16;  // of those that a line has
    const float2* line = ranks + int64_t(min(max(rank + at / (kD / 2), 0), last_rank)) * (kD / 2) + at % (kD / 2);
    asm volatile("prefetch.global.L1 [%0];" ::"l"(line));
  }
}

// Elements 32*kk .. 32*kk+31 of a row and those half a row on, as a lane has them: x[k][reg] is two of them, which
// K::query_dim names. `fp8`: they become E4M3.
template <class K, int kD>
__device__ __forceinline__ void turn_elements(int style, const float2* angles, int kk, int tid, bool brain,
                                              const Layer* fp8, uint32_t (&x)[2][2], uint32_t (&y)[2][2]) {
  constexpr bool kApart = K::kBits == 4;  // a register's two elements are four apart, and neighbours in two registers
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float2 a[2] = {pair_of(x[k][0], brain), pair_of(x[k][1], brain)};
    float2 b[2] = {pair_of(y[k][0], brain), pair_of(y[k][1], brain)};
    if (style == int(RopeStyle::neox)) {
#pragma unroll
      for (int reg = 0; reg < 2; ++reg) {
        const int d0 = K::query_dim(kk, k, reg, 0, tid), d1 = K::query_dim(kk, k, reg, 1, tid);
        float2 first, second;
        if constexpr (kApart) {
          first = __ldg(angles + d0), second = __ldg(angles + d1);
        } else {
          const float4 both = __ldg(reinterpret_cast<const float4*>(angles + d0));
          first = {both.x, both.y}, second = {both.z, both.w};
        }
        rotate(a[reg].x, b[reg].x, first);
        rotate(a[reg].y, b[reg].y, second);
      }
    } else if constexpr (kApart) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = K::query_dim(kk, k, 0, half, tid);
        const float2 near = __ldg(angles + d / 2), far = __ldg(angles + d / 2 + kD / 4);
        half == 0 ? rotate(a[0].x, a[1].x, near) : rotate(a[0].y, a[1].y, near);
        half == 0 ? rotate(b[0].x, b[1].x, far) : rotate(b[0].y, b[1].y, far);
      }
    } else {
#pragma unroll
      for (int reg = 0; reg < 2; ++reg) {
        const int d = K::query_dim(kk, k, reg, 0, tid);
        rotate(a[reg].x, a[reg].y, __ldg(angles + d / 2));
        rotate(b[reg].x, b[reg].y, __ldg(angles + d / 2 + kD / 4));
      }
    }
    if (fp8)
#pragma unroll
      for (int reg = 0; reg < 2; ++reg)
        a[reg] = {as_fp8(*fp8, a[reg].x), as_fp8(*fp8, a[reg].y)},
        b[reg] = {as_fp8(*fp8, b[reg].x), as_fp8(*fp8, b[reg].y)};
#pragma unroll
    for (int reg = 0; reg < 2; ++reg) x[k][reg] = pair_as(a[reg], brain), y[k][reg] = pair_as(b[reg], brain);
  }
}

// A query as load_query() has it, at `rank`; and as E4M3 where queries become that.
template <class K, int kD>
__device__ __forceinline__ void turn_query(const Shape& s, const Layer& l, int rank, int tid,
                                           uint32_t (&q)[kD / 16][2]) {
  const bool brain = s.work == DType::bf16;
  const float2* angles = reinterpret_cast<const float2*>(s.rope_ranks) + int64_t(max(rank, 0)) * (kD / 2);
#pragma unroll
  for (int kk = 0; kk < kD / 64; ++kk) {
    uint32_t x[2][2], y[2][2];
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int reg = 0; reg < 2; ++reg) x[k][reg] = q[kk * 2 + k][reg], y[k][reg] = q[(kk + kD / 64) * 2 + k][reg];
    turn_elements<K, kD>(s.rope_style, angles, kk, tid, brain, l.q_inverse != 0.0f ? &l : nullptr, x, y);
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int reg = 0; reg < 2; ++reg) q[kk * 2 + k][reg] = x[k][reg], q[(kk + kD / 64) * 2 + k][reg] = y[k][reg];
  }
}

}  // namespace kvasir::attention::cuda
