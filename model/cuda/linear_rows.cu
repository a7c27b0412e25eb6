// Before the delta rule and behind it, row by row: the convolution, and the gated norm.
#include <cuda_bf16.h>

#include <algorithm>

#include "model/cuda/delta_rule.h"
#include "model/cuda/early.cuh"
#include "model/cuda/warp_sums.cuh"

namespace kvasir::model::cuda {
namespace {

constexpr int kWarps = 8, kRowsEach = 8;

__device__ float sum_of_squares(float4 x) { return warp_sum(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w); }
__device__ float4 times(float4 x, float by) { return {x.x * by, x.y * by, x.z * by, x.w * by}; }
__device__ float4 add_product(float4 w, float4 x, float4 to) {
  return {fmaf(w.x, x.x, to.x), fmaf(w.y, x.y, to.y), fmaf(w.z, x.z, to.z), fmaf(w.w, x.w, to.w)};
}
__device__ float silu(float x) { return x / (1.0f + expf(-x)); }

// What the states fade by in rows [row, end), as a logarithm, and the betas.
__device__ void fades(const DeltaStep& s, int64_t row, int64_t end) {
  const int heads = s.shape.value_heads;
  for (; row < end; ++row)
    for (int h = int(threadIdx.x); h < heads; h += kWarps * 32) {
      const float beta = s.betas[row * 2 * heads + h], alpha = s.betas[row * 2 * heads + heads + h] + s.bias[h];
      const float softplus = alpha > 20 ? alpha : log1pf(expf(alpha));
      s.fades[row * heads + h] = {-s.decay[h] * softplus, 1.0f / (1.0f + expf(-beta))};
    }
}

// A warp has one head's channels, four a lane, and takes `each` rows one after another: what a row shares with the next
// one stays in registers. The last blocks of a row of them make the gates.
__global__ void __launch_bounds__(kWarps * 32) convolution(const __grid_constant__ DeltaStep s, int each) {
  let_next_kernel_start();
  const LinearShape& c = s.shape;
  const int64_t channels = c.channels, in_cols = channels + c.values;
  const int64_t begin = int64_t(blockIdx.y) * each, end = min(begin + each, s.rows);
  const int heads = 2 * c.key_heads + c.value_heads, lane = threadIdx.x % 32;
  if (blockIdx.x + 1 == gridDim.x) {
    wait_for_previous_kernel();
    fades(s, begin, end);
    return;
  }
  const int head = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
  if (head >= heads) return;
  const bool value = head >= 2 * c.key_heads;
  const int dim = value ? c.value_dim : c.key_dim;
  const bool there = lane * 4 < dim;
  const int64_t at = (value ? 2 * c.keys + int64_t(head - 2 * c.key_heads) * dim : int64_t(head) * dim) + lane * 4;
  const float length = head < c.key_heads ? rsqrtf(float(dim)) : 1.0f;
  const float4 none = {0, 0, 0, 0};
  auto four = [&](const float* p) { return there ? *reinterpret_cast<const float4*>(p + at) : none; };
  float4 weight[kTaps], x[kTaps];
#pragma unroll
  for (int j = 0; j < kTaps; ++j) weight[j] = four(s.conv + j * channels);
  wait_for_previous_kernel();
  StateRows of;
  int32_t sequence = -1;
  for (int64_t row = begin; row < end; ++row) {
    const int32_t now = s.sequence_of[row];
    if (now != sequence) {
      sequence = now, of = s.of[sequence];
      const int before = int(row) - of.first;  // of this sequence, in this step
#pragma unroll
      for (int j = 0; j < kTaps - 1; ++j) {
        const int from = before - (kTaps - 1) + j;
        const float* tail = s.slots + of.slot * s.slot_stride + (kTaps - 1 + from) * channels;
        x[j] =
            of.slot < 0 || (from < 0 && of.fresh) ? none : four(from < 0 ? tail : s.in + (of.first + from) * in_cols);
      }
    }
    if (of.slot < 0) continue;
    x[kTaps - 1] = four(s.in + row * in_cols);
    float4 y = {weight[0].x * x[0].x, weight[0].y * x[0].y, weight[0].z * x[0].z, weight[0].w * x[0].w};
#pragma unroll
    for (int j = 1; j < kTaps; ++j) y = add_product(weight[j], x[j], y);
#pragma unroll
    for (int j = 1; j < kTaps; ++j) x[j - 1] = x[j];
    y = {silu(y.x), silu(y.y), silu(y.z), silu(y.w)};
    if (!value) y = times(y, length * rsqrtf(sum_of_squares(y) + 1e-6f));
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(y.x, y.y), __floats2bfloat162_rn(y.z, y.w)};
    if (there)
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(s.mixed) + row * channels + at) =
          *reinterpret_cast<const uint2*>(pairs);
  }
}

// The inputs of a sequence's last rows, which the next step's convolution reads: four channels a thread.
__device__ void keep_tail(const DeltaStep& s, const StateRows& of, int64_t channel) {
  const LinearShape& c = s.shape;
  if (of.slot < 0 || channel >= c.channels) return;
  float* tail = s.slots + of.slot * s.slot_stride + channel;
  float4 x[kTaps - 1];
#pragma unroll
  for (int j = 0; j < kTaps - 1; ++j) {
    const int from = of.count - (kTaps - 1) + j;
    const float* row = from >= 0 ? s.in + (of.first + from) * (c.channels + c.values) + channel
                                 : tail + (kTaps - 1 + from) * c.channels;
    x[j] = from < 0 && of.fresh ? float4{0, 0, 0, 0} : *reinterpret_cast<const float4*>(row);
  }
#pragma unroll
  for (int j = 0; j < kTaps - 1; ++j) *reinterpret_cast<float4*>(tail + j * c.channels) = x[j];
}

// A warp has a value head of a row. Blocks past those keep what the next step's convolution reads, `for_tail` of them
// a sequence.
__global__ void __launch_bounds__(kWarps * 32)
    gated_norm(const __grid_constant__ DeltaStep s, int blocks, int for_tail) {
  let_next_kernel_start();
  const LinearShape& c = s.shape;
  if (const int block = int(blockIdx.x) - blocks; block >= 0) {
    wait_for_previous_kernel();
    keep_tail(s, s.of[block / for_tail], (int64_t(block % for_tail) * kWarps * 32 + threadIdx.x) * 4);
    return;
  }
  const int64_t piece = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, row = piece / c.value_heads;
  const int head = int(piece % c.value_heads), at = int(threadIdx.x % 32) * 4;
  const bool there = at < c.value_dim;
  const float4 none = {0, 0, 0, 0};
  const float4 weight = there ? *reinterpret_cast<const float4*>(s.norm + at) : none;
  wait_for_previous_kernel();
  if (row >= s.rows) return;
  const bool used = s.of[s.sequence_of[row]].slot >= 0;
  const int64_t col = int64_t(head) * c.value_dim + at;
  float4 x = none, gate = none;
  if (there && used) {
    x = *reinterpret_cast<const float4*>(s.had + row * c.values + col);
    gate = *reinterpret_cast<const float4*>(s.in + row * (c.channels + c.values) + c.channels + col);
  }
  const float by = rsqrtf(sum_of_squares(x) / float(c.value_dim) + s.eps);
  if (!there) return;
  __nv_bfloat162 y[2] = {__floats2bfloat162_rn(x.x * by * weight.x * silu(gate.x), x.y * by * weight.y * silu(gate.y)),
                         __floats2bfloat162_rn(x.z * by * weight.z * silu(gate.z), x.w * by * weight.w * silu(gate.w))};
  *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(s.out) + row * c.values + col) =
      *reinterpret_cast<const uint2*>(y);
}

__global__ void __launch_bounds__(256) sigmoid_gates(const float* gate, __nv_bfloat162* in_out, int64_t pairs) {
  let_next_kernel_start();
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  wait_for_previous_kernel();
  if (i >= pairs) return;
  const float2 g = reinterpret_cast<const float2*>(gate)[i], x = __bfloat1622float2(in_out[i]);
  in_out[i] = __floats2bfloat162_rn(x.x / (1.0f + expf(-g.x)), x.y / (1.0f + expf(-g.y)));
}

unsigned blocks(int64_t n, int64_t each) { return unsigned((n + each - 1) / each); }

}  // namespace

void launch_convolution(const DeltaStep& s, cudaStream_t stream) {
  // Of few rows, each its own warps: then the device is not full.
  const int each = s.singles == s.rows || s.rows <= 64 ? 1 : kRowsEach;
  const int heads = 2 * s.shape.key_heads + s.shape.value_heads;
  launch_early(convolution, dim3(blocks(heads, kWarps) + 1, blocks(s.rows, each)), kWarps * 32, stream, s, each);
}

void launch_gated_norm(const DeltaStep& s, cudaStream_t stream) {
  const unsigned norms = blocks(s.rows * s.shape.value_heads, kWarps), tails = blocks(s.shape.channels, kWarps * 128);
  launch_early(gated_norm, dim3(norms + unsigned(s.sequences) * tails), kWarps * 32, stream, s, int(norms), int(tails));
}

void launch_sigmoid_gates(const float* gate, void* in_out, int64_t count, cudaStream_t stream) {
  launch_early(sigmoid_gates, dim3(blocks(count / 2, 256)), 256, stream, gate, static_cast<__nv_bfloat162*>(in_out),
               count / 2);
}

}  // namespace kvasir::model::cuda
