#include <cuda_bf16.h>

#include "model/cuda/kernels.h"

namespace kvasir::model::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float block_sum(float v) {
  __shared__ float parts[kThreads / 32];
  for (int s = 16; s > 0; s /= 2) v += __shfl_xor_sync(~0u, v, s);
  __syncthreads();  // the parts of an earlier sum have been read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < kThreads / 32 ? parts[threadIdx.x % 32] : 0.0f;
  for (int s = 16; s > 0; s /= 2) v += __shfl_xor_sync(~0u, v, s);
  return v;
}

__global__ void embed(const int32_t* tokens, const __nv_bfloat16* table, float scale, float* out, int64_t cols) {
  const __nv_bfloat16* row = table + int64_t(tokens[blockIdx.x]) * cols;
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x)
    out[blockIdx.x * cols + i] = scale * __bfloat162float(row[i]);
}

// One block a row; blockIdx.y counts the parts of a row that are normed apart (heads).
__global__ void norm(const float* in, int64_t in_stride, const float* weight, float eps, bool add, float* out,
                     int64_t out_stride, int64_t cols) {
  in += blockIdx.x * in_stride + blockIdx.y * cols;
  out += blockIdx.x * out_stride + blockIdx.y * cols;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x) sum += in[i] * in[i];
  float r = rsqrtf(block_sum(sum) / float(cols) + eps);
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x) {
    float v = in[i] * r * weight[i];
    out[i] = add ? out[i] + v : v;
  }
}

template <bool kGelu>
__global__ void glu(const float* in, float* out, int64_t cols) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= cols) return;
  const float* row = in + int64_t(blockIdx.y) * 2 * cols;
  float g = row[i], f;
  if (kGelu)
    f = 0.5f * g * (1.0f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g)));
  else
    f = g / (1.0f + __expf(-g));
  out[int64_t(blockIdx.y) * cols + i] = f * row[cols + i];
}

__global__ void to_bf16(const float* in, __nv_bfloat16* out, int64_t count) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = __float2bfloat16_rn(in[i]);
}
__global__ void from_bf16(const __nv_bfloat16* in, float* out, int64_t count) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = __bfloat162float(in[i]);
}

__global__ void take_rows(const float* in, const int32_t* which, float* out, int64_t cols) {
  const float* row = in + int64_t(which[blockIdx.x]) * cols;
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x) out[blockIdx.x * cols + i] = row[i];
}

unsigned blocks(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

}  // namespace

void launch_embed(const int32_t* tokens, const void* table, float scale, float* out, int64_t rows, int64_t cols,
                  cudaStream_t stream) {
  embed<<<unsigned(rows), kThreads, 0, stream>>>(tokens, static_cast<const __nv_bfloat16*>(table), scale, out, cols);
}

void launch_norm(const float* in, int64_t in_stride, const float* weight, float eps, bool add, float* out,
                 int64_t out_stride, int64_t rows, int64_t cols, cudaStream_t stream) {
  norm<<<unsigned(rows), kThreads, 0, stream>>>(in, in_stride, weight, eps, add, out, out_stride, cols);
}

void launch_head_norm(float* x, int64_t stride, int64_t first, int64_t heads, int64_t size, const float* weight,
                      float eps, int64_t rows, cudaStream_t stream) {
  dim3 grid{unsigned(rows), unsigned(heads)};
  norm<<<grid, kThreads, 0, stream>>>(x + first * size, stride, weight, eps, false, x + first * size, stride, size);
}

void launch_glu(bool gelu, const float* in, float* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  // Rows go on the grid's y, which ends at 65,535.
  for (int64_t first = 0; first < rows; first += 65535) {
    dim3 grid{blocks(cols), unsigned(rows - first < 65535 ? rows - first : 65535)};
    auto kernel = gelu ? glu<true> : glu<false>;
    kernel<<<grid, kThreads, 0, stream>>>(in + first * 2 * cols, out + first * cols, cols);
  }
}

void launch_to_bf16(const float* in, void* out, int64_t count, cudaStream_t stream) {
  to_bf16<<<blocks(count), kThreads, 0, stream>>>(in, static_cast<__nv_bfloat16*>(out), count);
}
void launch_from_bf16(const void* in, float* out, int64_t count, cudaStream_t stream) {
  from_bf16<<<blocks(count), kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(in), out, count);
}

void launch_take_rows(const float* in, const int32_t* which, float* out, int64_t rows, int64_t cols,
                      cudaStream_t stream) {
  take_rows<<<unsigned(rows), kThreads, 0, stream>>>(in, which, out, cols);
}

}  // namespace kvasir::model::cuda
