// What a row's experts gave it added up, and the gate of the expert that all rows share.
#include <cuda_bf16.h>

#include <algorithm>

#include "model/cuda/early.cuh"
#include "model/cuda/expert_tiles.h"
#include "model/cuda/warp_sums.cuh"

namespace kvasir::model::cuda {
namespace {

template <bool kApart>
__global__ void combine(const float* in, Routed routed, int used, void* out, int64_t cols) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.y, col = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  if (col >= cols) return;
  float4 sum = kApart ? float4{0, 0, 0, 0} : *reinterpret_cast<float4*>(static_cast<float*>(out) + row * cols + col);
#pragma unroll 4
  for (int k = 0; k < used; ++k) {
    const int64_t at = row * used + k;
    const int32_t slot = routed.slot_of[at];
    if (slot < 0) continue;
    const float w = routed.weights[at] * (routed.scales ? routed.scales[routed.chosen[at]] : 1.0f);
    const auto x = *reinterpret_cast<const float4*>(in + int64_t(slot) * cols + col);
    sum.x += w * x.x, sum.y += w * x.y, sum.z += w * x.z, sum.w += w * x.w;
  }
  if (!kApart) {
    *reinterpret_cast<float4*>(static_cast<float*>(out) + row * cols + col) = sum;
    return;
  }
  auto* to = reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(out) + row * cols + col);
  to[0] = __floats2bfloat162_rn(sum.x, sum.y), to[1] = __floats2bfloat162_rn(sum.z, sum.w);
}

__device__ float read(const float* x) { return *x; }
__device__ float read(const __nv_bfloat16* x) { return __bfloat162float(*x); }
__device__ void write(float* x, float v) { *x = v; }
__device__ void write(__nv_bfloat16* x, float v) { *x = __float2bfloat16_rn(v); }

template <class T>
__global__ void __launch_bounds__(256)
    sigmoid_gate(const __nv_bfloat16* in, const float* gate, int64_t cols, T* in_out, int64_t out_cols) {
  __shared__ float parts[8];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < cols; i += 256) sum += read(in + row * cols + i) * gate[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (float p : parts) sum += p;
  const float scale = 1 / (1 + expf(-sum));
  for (int64_t i = threadIdx.x; i < out_cols; i += 256) {
    T* x = in_out + row * out_cols + i;
    write(x, read(x) * scale);
  }
}

}  // namespace

void launch_combine(const float* in, const Routed& routed, int32_t used, bool apart, void* out, int64_t rows,
                    int64_t cols, cudaStream_t stream) {
  const int threads = int(std::min<int64_t>(256, (cols / 4 + 31) / 32 * 32));
  const dim3 grid(unsigned((cols / 4 + threads - 1) / threads), unsigned(rows));
  launch_early(apart ? combine<true> : combine<false>, grid, threads, stream, in, routed, used, out, cols);
}

void launch_sigmoid_gate(const void* in, const float* gate, int64_t cols, void* in_out, bool half, int64_t out_cols,
                         int64_t rows, cudaStream_t stream) {
  const auto* from = static_cast<const __nv_bfloat16*>(in);
  if (half)
    launch_early(sigmoid_gate<__nv_bfloat16>, unsigned(rows), 256, stream, from, gate, cols,
                 static_cast<__nv_bfloat16*>(in_out), out_cols);
  else
    launch_early(sigmoid_gate<float>, unsigned(rows), 256, stream, from, gate, cols, static_cast<float*>(in_out),
                 out_cols);
}

}  // namespace kvasir::model::cuda
