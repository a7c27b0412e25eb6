#include <cuda_bf16.h>

#include <algorithm>

#include "model/cuda/activations.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/kernels.h"

namespace kvasir::model::cuda {
namespace {

constexpr int kThreads = 256, kPickThreads = 1024;

// Of all threads of a block of whole warps.
__device__ float block_sum(float v) {
  __shared__ float parts[32];
  for (int s = 16; s > 0; s /= 2) v += __shfl_xor_sync(~0u, v, s);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f;
  for (int s = 16; s > 0; s /= 2) v += __shfl_xor_sync(~0u, v, s);
  return v;
}

__global__ void embed(const int32_t* tokens, const __nv_bfloat16* table, float scale, float* out, int64_t cols) {
  const __nv_bfloat16* row = table + int64_t(tokens[blockIdx.x]) * cols;
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x)
    out[blockIdx.x * cols + i] = scale * __bfloat162float(row[i]);
}

// kWide elements of a row, read and written at once.
template <class T, int kWide>
struct alignas(sizeof(T) * kWide) Wide {
  T x[kWide];
};

__device__ void put(float v, bool add, float& out) { out = add ? out + v : v; }
__device__ void put(float v, bool, __nv_bfloat16& out) { out = __float2bfloat16_rn(v); }

// One block a row; blockIdx.y counts the parts of a row that are normed apart (heads).
template <class Out, int kWide>
__global__ void norm(const float* in, int64_t in_stride, const float* weight, float eps, bool add, Out* out,
                     int64_t out_stride, int64_t cols) {
  let_next_kernel_start();
  wait_for_kernel_ahead();
  const auto* from = reinterpret_cast<const Wide<float, kWide>*>(in + blockIdx.x * in_stride + blockIdx.y * cols);
  const auto* scale = reinterpret_cast<const Wide<float, kWide>*>(weight);
  auto* to = reinterpret_cast<Wide<Out, kWide>*>(out + blockIdx.x * out_stride + blockIdx.y * cols);
  float sum = 0;
  for (int64_t i = threadIdx.x; i < cols / kWide; i += blockDim.x) {
    const Wide<float, kWide> v = from[i];
    for (float x : v.x) sum += x * x;
  }
  const float r = rsqrtf(block_sum(sum) / float(cols) + eps);
  for (int64_t i = threadIdx.x; i < cols / kWide; i += blockDim.x) {
    const Wide<float, kWide> v = from[i], w = scale[i];
    Wide<Out, kWide> y;
    if (add) y = to[i];
    for (int k = 0; k < kWide; ++k) put(v.x[k] * r * w.x[k], add, y.x[k]);
    to[i] = y;
  }
}

template <class Out>
void norm_of(const float* in, int64_t stride, const float* weight, float eps, bool add, Out* out, dim3 grid,
             int64_t cols, cudaStream_t stream) {
  const int64_t wide = cols % 4 == 0 && stride % 4 == 0 ? 4 : 1;
  const int threads = int(std::min<int64_t>(kThreads, (cols / wide + 31) / 32 * 32));
  auto kernel = wide == 4 ? norm<Out, 4> : norm<Out, 1>;
  launch_early(kernel, grid, threads, stream, in, stride, weight, eps, add, out, stride, cols);
}

template <bool kGelu>
__global__ void glu(const float* in, __nv_bfloat16* out, int64_t cols) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= cols) return;
  const float* row = in + int64_t(blockIdx.y) * 2 * cols;
  out[int64_t(blockIdx.y) * cols + i] = __float2bfloat16_rn((kGelu ? gelu_tanh(row[i]) : silu(row[i])) * row[cols + i]);
}

__global__ void to_bf16(const float* in, __nv_bfloat16* out, int64_t count) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = __float2bfloat16_rn(in[i]);
}

__global__ void take_rows(const float* in, const int32_t* which, float* out, int64_t cols) {
  const float* row = in + int64_t(which[blockIdx.x]) * cols;
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x) out[blockIdx.x * cols + i] = row[i];
}

// The greatest so far, where it is, and the sum of exp(x - greatest).
struct Best {
  float value, sum;
  int32_t at;
  __device__ void join(const Best& o) {
    const float most = fmaxf(value, o.value);
    sum =
        (value == most ? sum : sum * __expf(value - most)) + (o.value == most ? o.sum : o.sum * __expf(o.value - most));
    at = value == o.value ? min(at, o.at) : value > o.value ? at : o.at;
    value = most;
  }
  __device__ Best from(int lanes) const {
    return {__shfl_xor_sync(~0u, value, lanes), __shfl_xor_sync(~0u, sum, lanes), __shfl_xor_sync(~0u, at, lanes)};
  }
};

__global__ void __launch_bounds__(kPickThreads) greatest(const float* logits, Greatest* out, int64_t cols) {
  __shared__ Best parts[kPickThreads / 32];
  const float* row = logits + blockIdx.x * cols;
  constexpr float kLeast = -3.402823466e38f;
  Best best{kLeast, 0, INT32_MAX};
  bool bad = false;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < cols; i += kPickThreads) {
    const float x = row[i];
    bad |= !isfinite(x);
    best.join({x, 1, int32_t(i)});
  }
  bad = __syncthreads_or(bad);
  for (int s = 16; s > 0; s /= 2) best.join(best.from(s));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = parts[threadIdx.x];
  for (int s = 16; s > 0; s /= 2) best.join(best.from(s));
  if (threadIdx.x == 0) out[blockIdx.x] = {best.at, -logf(best.sum), bad};
}

unsigned blocks(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

}  // namespace

void launch_embed(const int32_t* tokens, const void* table, float scale, float* out, int64_t rows, int64_t cols,
                  cudaStream_t stream) {
  embed<<<unsigned(rows), kThreads, 0, stream>>>(tokens, static_cast<const __nv_bfloat16*>(table), scale, out, cols);
}

void launch_norm(const float* in, const float* weight, float eps, void* out, int64_t rows, int64_t cols,
                 cudaStream_t stream) {
  norm_of(in, cols, weight, eps, false, static_cast<__nv_bfloat16*>(out), unsigned(rows), cols, stream);
}

void launch_add_norm(const float* in, const float* weight, float eps, float* out, int64_t rows, int64_t cols,
                     cudaStream_t stream) {
  norm_of(in, cols, weight, eps, true, out, unsigned(rows), cols, stream);
}

void launch_head_norm(float* x, int64_t stride, int64_t first, int64_t heads, int64_t size, const float* weight,
                      float eps, int64_t rows, cudaStream_t stream) {
  x += first * size;
  norm_of(x, stride, weight, eps, false, x, dim3(unsigned(rows), unsigned(heads)), size, stream);
}

void launch_glu(bool gelu, const float* in, void* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  // Rows go on the grid's y, which ends at 65,535.
  for (int64_t first = 0; first < rows; first += 65535) {
    dim3 grid{blocks(cols), unsigned(rows - first < 65535 ? rows - first : 65535)};
    auto kernel = gelu ? glu<true> : glu<false>;
    kernel<<<grid, kThreads, 0, stream>>>(in + first * 2 * cols, static_cast<__nv_bfloat16*>(out) + first * cols, cols);
  }
}

void launch_to_bf16(const float* in, void* out, int64_t count, cudaStream_t stream) {
  to_bf16<<<blocks(count), kThreads, 0, stream>>>(in, static_cast<__nv_bfloat16*>(out), count);
}

void launch_take_rows(const float* in, const int32_t* which, float* out, int64_t rows, int64_t cols,
                      cudaStream_t stream) {
  take_rows<<<unsigned(rows), kThreads, 0, stream>>>(in, which, out, cols);
}

void launch_greatest(const float* logits, Greatest* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  greatest<<<unsigned(rows), kPickThreads, 0, stream>>>(logits, out, cols);
}

}  // namespace kvasir::model::cuda
