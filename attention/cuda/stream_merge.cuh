// Where blocks have all keys of one kv head of an item between them: a block's warps leave their results in shared
// memory, where they become one, and the last of the block's mates to be done makes one of theirs.
#pragma once

#include "attention/cuda/epilogue.cuh"
#include "attention/cuda/launch.h"
#include "attention/cuda/softmax.cuh"
#include "attention/cuda/stream_rows.cuh"

namespace kvasir::attention::cuda {

// One warp's result of up to 8 rows, not divided yet. Rows are padded so that lanes of different rows meet different
// banks.
template <int kD>
struct WarpResult {
  struct alignas(16) State {
    float top, sum;
    int token, unused;
  };
  static constexpr int kStride = kD + 4;
  State rows[8];
  float x[8 * kStride];
};

// kN results of one row as one: (log2 of the largest, sum of weights) and two of its elements.
template <int kN>
struct MergedPair {
  float top, sum = 0.0f;
  float2 x{};
  __device__ __forceinline__ MergedPair(const float (&tops)[kN], const float (&sums)[kN], const float2 (&from)[kN]) {
    top = tops[0];
#pragma unroll
    for (int i = 1; i < kN; ++i) top = fmaxf(top, tops[i]);
    const float base = weight_base(top);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float weight = exp2_fast(tops[i] - base);
      sum += sums[i] * weight;
      x.x += from[i].x * weight, x.y += from[i].y * weight;
    }
  }
};

// Every warp has left its WarpResult at the start of its ring (`ring_bytes` apart). `shift`: of the sums' unit, in
// log2.
template <int kD, int kWarps>
__device__ inline void merge_warps(const Shape& s, const Layer& l, const Segment& seg, uint8_t* shared, int ring_bytes,
                                   int kv_head, int blocks, float shift) {
  using Run = WarpResult<kD>;
  constexpr int kMost = kMergedInPlace;
  __syncthreads();
  const int pairs = seg.row_count * (kD / 2);
  auto finish = [&](int r, int d, float top, float sum, float2 x, float factor) {
    const bool masked = no_weight(sum);
    const int head = kv_head * s.group + r % s.group;
    const int64_t row = int64_t(reinterpret_cast<const Run*>(shared)->rows[r].token) * s.heads + head;
    add_sink(l, head, top, masked, true, sum);
    const float f = masked ? 0.0f : factor * s.out_inv_scale / sum;
    store_run<2>(l.out, s.out, row * kD + d, {x.x * f, x.y * f});
    if (l.lse && d == 0) l.lse[row] = log_sum_exp(top, masked, sum);
  };
  auto partial_row = [&](int first_slot, int r) {
    return int64_t(first_slot + r / s.group) * s.heads + kv_head * s.group + r % s.group;
  };
  for (int e = threadIdx.x; e < pairs; e += kWarps * 32) {
    const int r = e / (kD / 2), d = e % (kD / 2) * 2;
    float tops[kWarps], sums[kWarps];
    float2 x[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const Run& run = *reinterpret_cast<const Run*>(shared + w * ring_bytes);
      const float2 weight = *reinterpret_cast<const float2*>(&run.rows[r]);
      tops[w] = weight.x, sums[w] = weight.y;
      x[w] = *reinterpret_cast<const float2*>(&run.x[r * Run::kStride + d]);
    }
    const MergedPair<kWarps> all(tops, sums, x);
    if (blocks == 1) {
      finish(r, d, all.top - shift, all.sum, all.x, l.cache.v_scale);
    } else {
      const bool masked = !(all.sum > 0.0f);
      const float f = masked ? 0.0f : l.cache.v_scale / all.sum;
      const int64_t row = partial_row(seg.slot, r);
      *reinterpret_cast<float2*>(l.partial + row * kD + d) = {all.x.x * f, all.x.y * f};
      if (d == 0) l.partial_lse[row] = masked ? -INFINITY : all.top - shift + log2f(all.sum);
    }
  }
  if (blocks == 1) return;
  int* arrived = l.arrived + int64_t(seg.first_slot) * s.kv_heads + kv_head;
  __shared__ int before;
  __syncthreads();  // what all threads wrote is what the first gives away, and what it is given is theirs
  if (threadIdx.x == 0)
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
  __syncthreads();
  if (before + 1 < blocks) return;
  const int queries = seg.row_count / s.group;
  for (int e = threadIdx.x; e < pairs; e += kWarps * 32) {
    const int r = e / (kD / 2), d = e % (kD / 2) * 2;
    float tops[kMost], sums[kMost];
    float2 x[kMost];
#pragma unroll
    for (int b = 0; b < kMost; ++b) {  // all on the way at once
      const int64_t row = partial_row(seg.first_slot + (b < blocks ? b : 0) * queries, r);
      tops[b] = b < blocks ? __ldcg(l.partial_lse + row) : -INFINITY;
      x[b] = __ldcg(reinterpret_cast<const float2*>(l.partial + row * kD + d));
      sums[b] = tops[b] == -INFINITY ? 0.0f : 1.0f;
    }
    const MergedPair<kMost> all(tops, sums, x);
    finish(r, d, all.top, all.sum, all.x, 1.0f);
  }
  if (threadIdx.x == 0) *arrived = 0;
}

}  // namespace kvasir::attention::cuda
