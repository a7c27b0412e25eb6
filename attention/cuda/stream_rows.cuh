// Rows of q on their way into the matrix units, and rows of results on their way out of them.
#pragma once

#include <type_traits>

#include "attention/cuda/device.cuh"
#include "attention/cuda/mma.cuh"

namespace kvasir::attention::cuda {

// A lane's part of a row of q, in the order that a kind of cache wants it; zeros where the row is not `live`.
template <class K, int kN>
__device__ __forceinline__ void load_query(const uint16_t* from, bool live, int tid, uint32_t (&q)[kN][2]) {
#pragma unroll
  for (int k = 0; k < kN; ++k)
#pragma unroll
    for (int reg = 0; reg < 2; ++reg) {
      const int d0 = K::query_dim(k / 2, k % 2, reg, 0, tid), d1 = K::query_dim(k / 2, k % 2, reg, 1, tid);
      if constexpr (K::kBits >= 8)
        q[k][reg] = live ? *reinterpret_cast<const uint32_t*>(from + d0) : 0;
      else
        q[k][reg] = live ? from[d0] | uint32_t(from[d1]) << 16 : 0;
    }
}

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

// A row of q over the four lanes that share it as 16-bit integers of a step of its own, which it gives: of every four
// words, the first two become the upper bytes of eight elements and the others their lower ones, each with a sign.
template <int kN>
__device__ inline float to_bytes(uint32_t (&raw)[kN][2], DType type) {
  auto element = [&](int i, int half) {
    const uint32_t w = raw[i / 2][i % 2];
    if (type == DType::bf16) return __uint_as_float(half ? w & 0xffff0000u : w << 16);
    const __half2& pair = reinterpret_cast<const __half2&>(w);
    return half ? __high2float(pair) : __low2float(pair);
  };
  float big = 0.0f;
#pragma unroll
  for (int i = 0; i < kN * 4; ++i) big = fmaxf(big, fabsf(element(i / 2, i % 2)));
  big = fmaxf(big, __shfl_xor_sync(0xffffffffu, big, 1));
  big = fmaxf(big, __shfl_xor_sync(0xffffffffu, big, 2));
  constexpr float kMost = 127.0f * 256.0f;
  const float steps = big > 1e-30f ? kMost / big : 0.0f;
#pragma unroll
  for (int k = 0; k < kN; k += 2) {
    uint32_t upper[2], lower[2];
#pragma unroll
    for (int four = 0; four < 2; ++four) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)  // the last bits of 1.5 * 2^23 + x are those of the integer x
        x[i] = __float_as_uint(fmaf(element((k + four) * 2 + i / 2, i % 2), steps, 12582912.0f));
      lower[four] = __byte_perm(__byte_perm(x[0], x[1], 0x0040), __byte_perm(x[2], x[3], 0x0040), 0x5410);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] += 128;  // lower bytes are -128 to 127
      upper[four] = __byte_perm(__byte_perm(x[0], x[1], 0x0051), __byte_perm(x[2], x[3], 0x0051), 0x5410);
    }
    raw[k][0] = upper[0], raw[k][1] = upper[1], raw[k + 1][0] = lower[0], raw[k + 1][1] = lower[1];
  }
  return big / kMost;
}

// kN elements side by side, as wide as they go.
template <int kN>
struct RowPiece {
  float x[kN];
};
template <int kN>
__device__ inline void store_run(void* base, DType type, int64_t i, const RowPiece<kN>& v) {
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

// `run` with the type known when compiled: one branch for all of a run's stores, not one for each.
template <class F>
__device__ __forceinline__ void with_type(DType type, F&& run) {
  switch (type) {
    case DType::f32: return run(std::integral_constant<DType, DType::f32>());
    case DType::f16: return run(std::integral_constant<DType, DType::f16>());
    case DType::bf16: return run(std::integral_constant<DType, DType::bf16>());
    default: return run(std::integral_constant<DType, DType::f8_e4m3>());
  }
}

// The runs of a tile as one, by the warp whose run was the last of them: eight lanes a row, four rows at once.
// The order is that of the keys, whoever comes last.
template <int kD>
__device__ inline void merge_runs(const Shape& s, const StepView& v, const Layer& l, const Segment& seg, int kv_head,
                                  int lane) {
  constexpr int kVec = kD / 32, kFlight = kD > 128 ? 4 : 8;
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
        const int64_t row = int64_t(seg.first_slot + (run + u) * queries + query) * s.heads + head;
        lse[u] = run + u < seg.merges ? __ldcg(l.partial_lse + row) : -INFINITY;
        const float4* from = reinterpret_cast<const float4*>(l.partial + row * kD) + sub;
#pragma unroll
        for (int k = 0; k < kVec; ++k)
          x[u][k] = run + u < seg.merges ? __ldcg(from + k * 8) : float4{0.0f, 0.0f, 0.0f, 0.0f};
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
    with_type(s.out, [&](auto type) {
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        store_run<4>(l.out, type.value, row * kD + (sub + k * 8) * 4,
                     {acc[k].x * f, acc[k].y * f, acc[k].z * f, acc[k].w * f});
    });
    if (l.lse && sub == 0) l.lse[row] = masked ? -INFINITY : top + logf(total);
  }
}

// A run of keys has left its part of the result: the warp that finds it was the last of its item merges them.
template <int kD>
__device__ inline void merge_if_last(const Shape& s, const StepView& v, const Layer& l, const Segment& seg, int kv_head,
                                     int lane) {
  int* arrived = l.arrived + int64_t(seg.first_slot) * s.kv_heads + kv_head;
  int before = 0;
  __syncwarp();  // what all lanes wrote is what lane 0 gives away, and what it is given is theirs
  if (lane == 0) asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
  before = __shfl_sync(0xffffffffu, before, 0);
  if (before + 1 < seg.merges) return;
  merge_runs<kD>(s, v, l, seg, kv_head, lane);
  if (lane == 0) *arrived = 0;
}

}  // namespace kvasir::attention::cuda
