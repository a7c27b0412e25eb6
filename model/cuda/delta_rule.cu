// The gated delta rule of one row a sequence: a decode. A warp has 8 columns of a head's state, which nobody else
// needs, in its registers: it reads them once and writes them once, and lanes share the sums over a column's rows. With
// S the state, g what it fades by, d the change: d = beta (v - g S'k), and of S + k d' the output is g S'q + (q.k) d.
#include <cuda_bf16.h>

#include "model/cuda/delta_rule.h"
#include "model/cuda/delta_state.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/warp_sums.cuh"

namespace kvasir::model::cuda {
namespace {

constexpr int kWarps = kStateColumns / kColumns;

__device__ float from_lane(float x, int apart) { return __shfl_xor_sync(kAll, x, apart); }

// Four elements from `at`.
__device__ void take_four(const void* mixed, int64_t at, bool there, float* x) {
  uint2 raw = {0, 0};
  if (there) raw = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(mixed) + at);
  x[0] = __uint_as_float(raw.x << 16), x[1] = __uint_as_float(raw.x & 0xffff0000u);
  x[2] = __uint_as_float(raw.y << 16), x[3] = __uint_as_float(raw.y & 0xffff0000u);
}

template <int kDim>
__global__ void __launch_bounds__(kWarps * 32) delta_row(const __grid_constant__ DeltaStep s) {
  constexpr int kHeld = kDim / 16;
  let_next_kernel_start();
  const LinearShape& c = s.shape;
  const int head = int(blockIdx.x), column = int(blockIdx.z) * kStateColumns + int(threadIdx.x) / 32 * kColumns;
  const StateRows of = s.of[blockIdx.y];
  if (of.slot < 0 || column >= c.value_dim) return;
  const StateLane lane(int(threadIdx.x) % 32);
  auto* state = reinterpret_cast<float4*>(state_columns<kDim>(s, of.slot, head, column)) + int(threadIdx.x) % 32;
  float4 held[kHeld] = {};
  // Nobody writes a state in a step but this.
  if (!of.fresh)
#pragma unroll
    for (int r = 0; r < kHeld; ++r) held[r] = state[r * 32];
  wait_for_previous_kernel();

  const int64_t row = int64_t(of.first) * c.channels, first = key_head_of(c, head) * int64_t(c.key_dim);
  const int own = column + lane.quad * 4 + lane.own;
  float q[kHeld], k[kHeld];
#pragma unroll
  for (int r = 0; r < kHeld; r += 4) {
    const int at = r * 16 + lane.of_row * 4;
    take_four(s.mixed, row + first + at, at < c.key_dim, q + r);
    take_four(s.mixed, row + c.keys + first + at, at < c.key_dim, k + r);
  }
  const float v = __bfloat162float(
      static_cast<const __nv_bfloat16*>(s.mixed)[row + 2 * c.keys + int64_t(head) * c.value_dim + own]);
  const float2 fades = s.fades[int64_t(of.first) * c.value_heads + head];
  const float fade = expf(fades.x);
  float had[2][4] = {}, both = 0;  // of k S and q S; q.k
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
    const float of_row[4] = {held[r].x, held[r].y, held[r].z, held[r].w};
    both = fmaf(q[r], k[r], both);
#pragma unroll
    for (int x = 0; x < 4; ++x)
      had[0][x] = fmaf(k[r], of_row[x], had[0][x]), had[1][x] = fmaf(q[r], of_row[x], had[1][x]);
  }
  // Shuffles stay in the order they are written in: all sums take a step together.
  both += from_lane(both, StateLane::kHigh);
#pragma unroll
  for (auto& x : had) x[0] += from_lane(x[2], StateLane::kHigh), x[1] += from_lane(x[3], StateLane::kHigh);
  both += from_lane(both, StateLane::kLow);
#pragma unroll
  for (auto& x : had) x[0] += from_lane(x[1], StateLane::kLow);
#pragma unroll
  for (int apart = 8; apart < 32; apart *= 2) {
    both += from_lane(both, apart);
#pragma unroll
    for (auto& x : had) x[0] += from_lane(x[0], apart);
  }
  const float change = fades.y * (v - fade * had[0][0]);
  if (int(threadIdx.x) % 32 < 8)  // four lanes have the same column
    s.had[int64_t(of.first) * c.values + int64_t(head) * c.value_dim + own] = fmaf(fade, had[1][0], both * change);
  const float4 changes = {change, from_lane(change, StateLane::kLow), from_lane(change, StateLane::kHigh),
                          from_lane(change, StateLane::kHigh | StateLane::kLow)};
#pragma unroll
  for (int r = 0; r < kHeld; ++r)
    state[r * 32] = {fmaf(k[r], changes.x, fade * held[r].x), fmaf(k[r], changes.y, fade * held[r].y),
                     fmaf(k[r], changes.z, fade * held[r].z), fmaf(k[r], changes.w, fade * held[r].w)};
}

}  // namespace

void launch_delta_rows(const DeltaStep& s, cudaStream_t stream) {
  const LinearShape& c = s.shape;
  const dim3 grid(unsigned(c.value_heads), unsigned(s.singles),
                  unsigned((c.value_dim + kStateColumns - 1) / kStateColumns));
  launch_early(state_rows(c.key_dim) == kFewDim ? delta_row<kFewDim> : delta_row<kMostDim>, grid, kWarps * 32, stream,
               s);
}

}  // namespace kvasir::model::cuda
