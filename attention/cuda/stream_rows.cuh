// Rows of q on their way into the matrix units, and rows of results on their way out of them.
#pragma once

#include "attention/cuda/device.cuh"
#include "attention/cuda/mma.cuh"

namespace kvasir::attention::cuda {

// A row of q over the four lanes that share it, bfloat16 to float16: carried with a power of two of its own, so
// that nothing overflows and next to nothing underflows. Gives that power.
template <int kN>
__device__ inline float brain_to_half(uint32_t (&raw)[kN][2]) {
  float big = 0.0f;
#pragma unroll
  for (int i = 0; i < kN * 2; ++i) {
    const uint32_t w = raw[i / 2][i % 2];
    big = fmaxf(big, fmaxf(fabsf(__uint_as_float(w << 16)), fabsf(__uint_as_float(w & 0xffff0000u))));
  }
  big = fmaxf(big, __shfl_xor_sync(0xffffffffu, big, 1));
  big = fmaxf(big, __shfl_xor_sync(0xffffffffu, big, 2));
  const uint32_t exponent = __float_as_uint(big) & 0x7f800000u;
  const float unit = exponent > 0x01000000u && exponent < 0x7e000000u ? __uint_as_float(exponent) : 1.0f;
  const float inverse = 1.0f / unit;
#pragma unroll
  for (int i = 0; i < kN * 2; ++i) {
    uint32_t& w = raw[i / 2][i % 2];
    w = Half::pack(__uint_as_float(w << 16) * inverse, __uint_as_float(w & 0xffff0000u) * inverse);
  }
  return unit;
}

// kN elements side by side, as wide as they go.
template <int kN>
struct Run {
  float x[kN];
};
template <int kN>
__device__ inline void store_run(void* base, DType type, int64_t i, const Run<kN>& v) {
  if (type == DType::f32) {
    float* p = static_cast<float*>(base) + i;
    if constexpr (kN == 2) *reinterpret_cast<float2*>(p) = {v.x[0], v.x[1]};
    if constexpr (kN == 4) *reinterpret_cast<float4*>(p) = {v.x[0], v.x[1], v.x[2], v.x[3]};
  } else if (type == DType::f8_e4m3) {
    for (int k = 0; k < kN; ++k) store_float(base, type, i + k, v.x[k]);
  } else {
    uint32_t w[kN / 2];
#pragma unroll
    for (int k = 0; k < kN / 2; ++k)
      w[k] = type == DType::f16 ? Half::pack(v.x[k * 2], v.x[k * 2 + 1]) : Brain::pack(v.x[k * 2], v.x[k * 2 + 1]);
    uint16_t* p = static_cast<uint16_t*>(base) + i;
    if constexpr (kN == 2) *reinterpret_cast<uint32_t*>(p) = w[0];
    if constexpr (kN == 4) *reinterpret_cast<uint2*>(p) = {w[0], w[1]};
  }
}

// The runs of a tile as one, by the warp whose run was the last of them: eight lanes a row, four rows at once.
// The order is that of the keys, whoever comes last.
template <int kD>
__device__ inline void merge_runs(const Shape& s, const StepView& v, const Layer& l, const Segment& seg, int kv_head,
                                  int lane) {
  constexpr int kVec = kD / 32, kFlight = kD > 128 ? 2 : 4;
  const int queries = seg.row_count / s.group, sub = lane % 8;
  for (int first = 0; first < seg.row_count; first += 4) {
    const int r = first + lane / 8, flat = min(r, seg.row_count - 1), query = flat / s.group;
    const int head = kv_head * s.group + flat % s.group;
    float top = -INFINITY, total = 0.0f;
    float4 acc[kVec] = {};
    for (int run = 0; run < seg.merges; run += kFlight) {
      float lse[kFlight];
      float4 x[kFlight][kVec];
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        const int64_t row = int64_t(seg.first_slot + min(run + u, seg.merges - 1) * queries + query) * s.heads + head;
        lse[u] = run + u < seg.merges ? __ldcg(l.partial_lse + row) : -INFINITY;
        const float4* from = reinterpret_cast<const float4*>(l.partial + row * kD) + sub;
#pragma unroll
        for (int k = 0; k < kVec; ++k) x[u][k] = __ldcg(from + k * 8);
      }
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {  // one by one: a run that sees nothing leaves the bits as they are
        const float next = fmaxf(top, lse[u]), base = next == -INFINITY ? 0.0f : next;
        const float shrink = expf(top - base), weight = expf(lse[u] - base);
        top = next;
        total = total * shrink + weight;
#pragma unroll
        for (int k = 0; k < kVec; ++k) {
          acc[k].x = acc[k].x * shrink + weight * x[u][k].x, acc[k].y = acc[k].y * shrink + weight * x[u][k].y;
          acc[k].z = acc[k].z * shrink + weight * x[u][k].z, acc[k].w = acc[k].w * shrink + weight * x[u][k].w;
        }
      }
    }
    if (r >= seg.row_count) continue;
    const bool masked = top == -INFINITY;
    if (l.sink_logits && !masked) total += expf(l.sink_logits[head] - top);
    const float f = masked ? 0.0f : s.out_inv_scale / total;
    const int64_t row = int64_t(v.rows[seg.tokens + query].token) * s.heads + head;
#pragma unroll
    for (int k = 0; k < kVec; ++k)
      store_run<4>(l.out, s.out, row * kD + (sub + k * 8) * 4,
                   {acc[k].x * f, acc[k].y * f, acc[k].z * f, acc[k].w * f});
    if (l.lse && sub == 0) l.lse[row] = masked ? -INFINITY : top + logf(total);
  }
}

// A run of keys has left its part of the result: the warp that finds it was the last of its item merges them.
template <int kD>
__device__ inline void merge_if_last(const Shape& s, const StepView& v, const Layer& l, const Segment& seg, int kv_head,
                                     int lane) {
  __threadfence();
  __syncwarp();
  int* arrived = l.arrived + int64_t(seg.first_slot) * s.kv_heads + kv_head;
  const int before = __shfl_sync(0xffffffffu, lane == 0 ? atomicAdd(arrived, 1) : 0, 0);
  if (before + 1 < seg.merges) return;
  __threadfence();
  merge_runs<kD>(s, v, l, seg, kv_head, lane);
  if (lane == 0) *arrived = 0;
}

}  // namespace kvasir::attention::cuda
