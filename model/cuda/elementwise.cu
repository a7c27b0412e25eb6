#include <cuda_bf16.h>

#include <algorithm>

#include "model/cuda/elementwise.h"

namespace kvasir::model::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float read(const float* x, int64_t i) { return x[i]; }
__device__ float read(const __nv_bfloat16* x, int64_t i) { return __bfloat162float(x[i]); }
__device__ void write(float* x, int64_t i, float v) { x[i] = v; }
__device__ void write(__nv_bfloat16* x, int64_t i, float v) { x[i] = __float2bfloat16_rn(v); }

// Of all kThreads of a block; `parts` is used again by the next call after its first barrier.
__device__ float block_sum(float v, float* parts) {
  for (int s = 16; s > 0; s /= 2) v += __shfl_xor_sync(~0u, v, s);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += parts[w];
  __syncthreads();
  return sum;
}

// One block a row.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    layer_norm(const In* in, const float* weight, const float* bias, float eps, Out* out, int64_t cols) {
  __shared__ float parts[kThreads / 32];
  auto at = [row = in + blockIdx.x * cols](int64_t i) { return read(row, i); };
  float sum = 0, squares = 0;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) sum += at(i);
  const float mean = block_sum(sum, parts) / float(cols);
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) squares += (at(i) - mean) * (at(i) - mean);
  const float scale = rsqrtf(block_sum(squares, parts) / float(cols) + eps);
  for (int64_t i = threadIdx.x; i < cols; i += kThreads)
    write(out, blockIdx.x * cols + i, (at(i) - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f));
}

template <class T>
__global__ void add_bias(T* x, const float* bias, int64_t rows, int64_t cols) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= cols) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
    write(x, row * cols + i, read(x, row * cols + i) + bias[i]);
}

__global__ void add_row(const __nv_bfloat16* table, const int32_t* which, int64_t shift, int64_t last, float* out,
                        int64_t cols) {
  const int64_t of = min(which[blockIdx.x] + shift, last);
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) out[blockIdx.x * cols + i] += read(table, of * cols + i);
}

__device__ float activated(Activation activation, float x) {
  switch (activation) {
    case Activation::silu: return x / (1.0f + __expf(-x));
    case Activation::gelu_tanh: return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Activation::gelu: return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
    case Activation::relu: return fmaxf(x, 0.0f);
    case Activation::relu_squared: return fmaxf(x, 0.0f) * fmaxf(x, 0.0f);
    case Activation::tanh: return tanhf(x);
  }
  return x;
}

template <class In>
__global__ void activate(Activation activation, bool gated, const In* in, __nv_bfloat16* out, int64_t rows,
                         int64_t cols) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= cols) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const In* from = in + row * cols * (gated ? 2 : 1);
    const float y = activated(activation, read(from, i));
    write(out, row * cols + i, gated ? y * read(from, cols + i) : y);
  }
}

__global__ void gate(Activation activation, const float* in, const float* by, int64_t stride, __nv_bfloat16* out,
                     int64_t rows, int64_t cols) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= cols) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
    write(out, row * cols + i, activated(activation, in[row * cols + i]) * by[row * stride + i]);
}

__global__ void add(const float* in, float* out, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) out[i] += in[i];
}

__global__ void scale(float* x, float factor, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) x[i] *= factor;
}

__global__ void softcap(float* x, float cap, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) x[i] = cap * tanhf(x[i] / cap);
}

__global__ void scale_by_position(float* x, const int32_t* positions, float slope, int64_t unit, int64_t cols,
                                  int64_t stride) {
  const float scale = 1.0f + slope * logf(float(1 + positions[blockIdx.x] / unit));
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x) x[blockIdx.x * stride + i] *= scale;
}

// Row i of `in`, or the row from_at[i], times `factor` to row i of `out`, or to_at[i] (-1: to none).
template <class In, class Out>
__global__ void move_rows(const In* in, const int32_t* from_at, int64_t in_stride, float factor, Out* out,
                          const int32_t* to_at, int64_t out_stride, int64_t rows, int64_t cols) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= cols) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const int64_t from = from_at ? from_at[row] : row, to = to_at ? to_at[row] : row;
    if (to >= 0) write(out, to * out_stride + i, read(in, from * in_stride + i) * factor);
  }
}

unsigned blocks(int64_t n) { return unsigned((n + kThreads - 1) / kThreads); }
dim3 grid(int64_t rows, int64_t cols) { return {blocks(cols), unsigned(std::min<int64_t>(rows, 65535))}; }

template <class In, class Out>
void move(const void* in, const int32_t* from_at, int64_t in_stride, float factor, void* out, int64_t first,
          const int32_t* to_at, int64_t out_stride, int64_t rows, int64_t cols, cudaStream_t stream) {
  move_rows<<<grid(rows, cols), kThreads, 0, stream>>>(static_cast<const In*>(in), from_at, in_stride, factor,
                                                       static_cast<Out*>(out) + first, to_at, out_stride, rows, cols);
}

}  // namespace

void launch_layer_norm(const void* in, bool half_in, const float* weight, const float* bias, float eps, void* out,
                       bool half_out, int64_t rows, int64_t cols, cudaStream_t stream) {
  auto launch = [&](auto* from, auto* to) {
    layer_norm<<<unsigned(rows), kThreads, 0, stream>>>(from, weight, bias, eps, to, cols);
  };
  auto of = [&](auto* from) {
    half_out ? launch(from, static_cast<__nv_bfloat16*>(out)) : launch(from, static_cast<float*>(out));
  };
  half_in ? of(static_cast<const __nv_bfloat16*>(in)) : of(static_cast<const float*>(in));
}

void launch_add_bias(void* x, bool half, const float* bias, int64_t rows, int64_t cols, cudaStream_t stream) {
  if (half)
    add_bias<<<grid(rows, cols), kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(x), bias, rows, cols);
  else
    add_bias<<<grid(rows, cols), kThreads, 0, stream>>>(static_cast<float*>(x), bias, rows, cols);
}

void launch_activate(Activation activation, bool gated, const void* in, bool half, void* out, int64_t rows,
                     int64_t cols, cudaStream_t stream) {
  auto* to = static_cast<__nv_bfloat16*>(out);
  if (half)
    activate<<<grid(rows, cols), kThreads, 0, stream>>>(activation, gated, static_cast<const __nv_bfloat16*>(in), to,
                                                        rows, cols);
  else
    activate<<<grid(rows, cols), kThreads, 0, stream>>>(activation, gated, static_cast<const float*>(in), to, rows,
                                                        cols);
}

void launch_gate(Activation activation, const float* in, const float* by, int64_t stride, void* out, int64_t rows,
                 int64_t cols, cudaStream_t stream) {
  gate<<<grid(rows, cols), kThreads, 0, stream>>>(activation, in, by, stride, static_cast<__nv_bfloat16*>(out), rows,
                                                  cols);
}

void launch_add_row(const void* table, const int32_t* which, int64_t shift, int64_t last, float* out, int64_t rows,
                    int64_t cols, cudaStream_t stream) {
  add_row<<<unsigned(rows), kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(table), which, shift, last, out,
                                                   cols);
}

void launch_add(const float* in, float* out, int64_t count, cudaStream_t stream) {
  add<<<blocks(count), kThreads, 0, stream>>>(in, out, count);
}

void launch_scale(float* x, float factor, int64_t count, cudaStream_t stream) {
  scale<<<blocks(count), kThreads, 0, stream>>>(x, factor, count);
}

void launch_keep_states(const void* in, bool half, float factor, const int32_t* at, void* states, int64_t first,
                        int64_t stride, int64_t rows, int64_t cols, cudaStream_t stream) {
  (half ? move<__nv_bfloat16, __nv_bfloat16> : move<float, __nv_bfloat16>)(in, nullptr, cols, factor, states, first, at,
                                                                           stride, rows, cols, stream);
}

void launch_take_states(const void* states, const int32_t* at, int64_t stride, float* out, int64_t rows, int64_t cols,
                        cudaStream_t stream) {
  move<__nv_bfloat16, float>(states, at, stride, 1, out, 0, nullptr, cols, rows, cols, stream);
}

void launch_place(const void* in, bool half, void* out, bool to_half, int64_t first, int64_t stride, int64_t rows,
                  int64_t cols, cudaStream_t stream) {
  auto place = half ? (to_half ? move<__nv_bfloat16, __nv_bfloat16> : move<__nv_bfloat16, float>)
                    : (to_half ? move<float, __nv_bfloat16> : move<float, float>);
  place(in, nullptr, cols, 1, out, first, nullptr, stride, rows, cols, stream);
}

void launch_softcap(float* x, float cap, int64_t count, cudaStream_t stream) {
  softcap<<<blocks(count), kThreads, 0, stream>>>(x, cap, count);
}

void launch_scale_by_position(float* x, const int32_t* positions, float slope, int64_t unit, int64_t rows, int64_t cols,
                              int64_t stride, cudaStream_t stream) {
  scale_by_position<<<unsigned(rows), kThreads, 0, stream>>>(x, positions, slope, unit, cols, stride);
}

}  // namespace kvasir::model::cuda
