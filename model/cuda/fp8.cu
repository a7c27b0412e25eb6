#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "model/cuda/activations.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/fp8.h"

namespace kvasir::model::cuda {
namespace {

constexpr int kThreads = 512, kWide = 8, kHeld = 4;  // elements of a vector; vectors that a thread keeps
constexpr float kMost = 448;                         // of E4M3

template <class Op>
__device__ float block_all(float v, Op op) {
  __shared__ float parts[32];
  for (int s = 16; s > 0; s /= 2) v = op(v, __shfl_xor_sync(~0u, v, s));
  __syncthreads();  // the parts of the reduction before
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f;
  for (int s = 16; s > 0; s /= 2) v = op(v, __shfl_xor_sync(~0u, v, s));
  return v;
}
__device__ float block_most(float v) {
  return block_all(v, [](float a, float b) { return fmaxf(a, b); });
}

struct alignas(16) Half8 {
  __nv_bfloat162 x[4];
};
__device__ float most_of(const Half8& v) {
  float m = 0;
#pragma unroll
  for (__nv_bfloat162 p : v.x) m = fmaxf(m, fmaxf(fabsf(__low2float(p)), fabsf(__high2float(p))));
  return m;
}
__device__ uint2 bytes_of(const Half8& v, float by) {
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = __bfloat1622float2(v.x[i]);
    words[i / 2] |= uint32_t(__nv_cvt_float2_to_fp8x2({f.x * by, f.y * by}, __NV_SATFINITE, __NV_E4M3)) << i % 2 * 16;
  }
  return {words[0], words[1]};
}

// A row of what make(i) gives, eight elements each, in one block: those that are not kept are made twice.
template <class Make>
__device__ void row_to_bytes(uint8_t* out, float* scale, int64_t cols, Make make) {
  const int64_t pieces = cols / kWide;
  Half8 kept[kHeld];
  float most = 0;
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (const int64_t i = threadIdx.x + int64_t(h) * blockDim.x; i < pieces)
      kept[h] = make(i), most = fmaxf(most, most_of(kept[h]));
  const int64_t rest = int64_t(kHeld) * blockDim.x + threadIdx.x;
  for (int64_t i = rest; i < pieces; i += blockDim.x) most = fmaxf(most, most_of(make(i)));
  most = block_most(most);
  const float by = most > 0 ? kMost / most : 0.0f;
  auto* to = reinterpret_cast<uint2*>(out);
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (const int64_t i = threadIdx.x + int64_t(h) * blockDim.x; i < pieces) to[i] = bytes_of(kept[h], by);
  for (int64_t i = rest; i < pieces; i += blockDim.x) to[i] = bytes_of(make(i), by);
  if (threadIdx.x == 0) *scale = most / kMost;
}

__global__ void __launch_bounds__(kThreads)
    to_bytes(const __nv_bfloat16* in, uint8_t* out, float* scales, int64_t cols) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const auto* row = reinterpret_cast<const Half8*>(in + blockIdx.x * cols);
  row_to_bytes(out + blockIdx.x * cols, scales + blockIdx.x, cols, [&](int64_t i) { return row[i]; });
}

__device__ void load_eight(const float* p, int64_t i, float (&v)[kWide]) {
  const float4 a = reinterpret_cast<const float4*>(p)[2 * i], b = reinterpret_cast<const float4*>(p)[2 * i + 1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// Eight sums of a row, which its scale and the columns' turn into what they stand for.
__device__ void scale_eight(const Half8& v, float row, const float (&cols)[kWide], float (&out)[kWide]) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const float2 f = __bfloat1622float2(v.x[p]);
    out[2 * p] = f.x * row * cols[2 * p], out[2 * p + 1] = f.y * row * cols[2 * p + 1];
  }
}

template <bool kScaled>
__global__ void __launch_bounds__(kThreads)
    glu_bytes(bool gelu, const __nv_bfloat16* in, Scales by, uint8_t* out, float* scales, int64_t cols) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const auto* gates = reinterpret_cast<const Half8*>(in + blockIdx.x * 2 * cols);
  const float row = kScaled ? by.in[blockIdx.x] : 1.0f;
  row_to_bytes(out + blockIdx.x * cols, scales + blockIdx.x, cols, [&](int64_t i) {
    const int64_t up = cols / kWide + i;
    float g[kWide], u[kWide], of_gate[kWide], of_up[kWide];
#pragma unroll
    for (int p = 0; p < kWide; ++p) of_gate[p] = of_up[p] = 1.0f;
    if constexpr (kScaled) load_eight(by.weight, i, of_gate), load_eight(by.weight, up, of_up);
    scale_eight(gates[i], row, of_gate, g);
    scale_eight(gates[up], row, of_up, u);
    if constexpr (kScaled)  // as where scales have a kernel of their own: adapters beside a row change nothing of it
#pragma unroll
      for (int p = 0; p < kWide; ++p)
        g[p] = __bfloat162float(__float2bfloat16_rn(g[p])), u[p] = __bfloat162float(__float2bfloat16_rn(u[p]));
    Half8 y;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 a = {g[2 * p], g[2 * p + 1]}, b = {u[2 * p], u[2 * p + 1]};
      y.x[p] =
          __floats2bfloat162_rn((gelu ? gelu_tanh(a.x) : silu(a.x)) * b.x, (gelu ? gelu_tanh(a.y) : silu(a.y)) * b.y);
    }
    return y;
  });
}

// A thread keeps kHeld vectors; rows are no longer than that. With sums x is what they are added to first.
template <bool kAdds>
__global__ void __launch_bounds__(kThreads)
    norm_bytes(const float* sums, Scales by, float* x_rows, const float* weight, float eps, __nv_bfloat16* half,
               uint8_t* out, float* scales, int64_t cols) {
  let_next_kernel_start();
  const int64_t pieces = cols / kWide;
  wait_for_previous_kernel();
  float* row = x_rows + blockIdx.x * cols;
  float x[kHeld][kWide];
  float sum = 0;
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (const int64_t i = threadIdx.x + int64_t(h) * blockDim.x; i < pieces) {
      load_eight(row, i, x[h]);
      if constexpr (kAdds) {
        float added[kWide], of_cols[kWide];
        load_eight(sums + blockIdx.x * cols, i, added), load_eight(by.weight, i, of_cols);
#pragma unroll
        for (int p = 0; p < kWide; ++p) x[h][p] += added[p] * by.in[blockIdx.x] * of_cols[p];
        auto* to = reinterpret_cast<float4*>(row) + 2 * i;
        to[0] = {x[h][0], x[h][1], x[h][2], x[h][3]}, to[1] = {x[h][4], x[h][5], x[h][6], x[h][7]};
      }
      for (float v : x[h]) sum += v * v;
    }
  const float r = rsqrtf(block_all(sum, [](float a, float b) { return a + b; }) / float(cols) + eps);
  row_to_bytes(out + blockIdx.x * cols, scales + blockIdx.x, cols, [&](int64_t i) {
    float w[kWide];
    load_eight(weight, i, w);
    Half8 y;
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
      if (i == threadIdx.x + int64_t(h) * blockDim.x)
#pragma unroll
        for (int p = 0; p < 4; ++p)
          y.x[p] = __floats2bfloat162_rn(x[h][2 * p] * r * w[2 * p], x[h][2 * p + 1] * r * w[2 * p + 1]);
    reinterpret_cast<Half8*>(half + blockIdx.x * cols)[i] = y;
    return y;
  });
}

__global__ void from_bytes(const uint8_t* in, const float* scales, __nv_bfloat16* out, int64_t cols) {
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x) {
    const __half_raw h = __nv_cvt_fp8_to_halfraw(in[blockIdx.x * cols + i], __NV_E4M3);
    out[blockIdx.x * cols + i] = __float2bfloat16_rn(scales[blockIdx.x] * __half2float(__half(h)));
  }
}

// A thread has eight columns of a row.
__global__ void __launch_bounds__(256) scale_half(__nv_bfloat16* in_out, Scales by, int64_t cols) {
  let_next_kernel_start();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i * kWide >= cols) return;
  float w[kWide], y[kWide];
  load_eight(by.weight, i, w);
  wait_for_previous_kernel();
  Half8& at = reinterpret_cast<Half8*>(in_out + blockIdx.y * cols)[i];
  scale_eight(at, by.in[blockIdx.y], w, y);
  Half8 v;
#pragma unroll
  for (int p = 0; p < 4; ++p) v.x[p] = __floats2bfloat162_rn(y[2 * p], y[2 * p + 1]);
  at = v;
}

// Four columns.
__global__ void __launch_bounds__(256) scale(const float* in, Scales by, bool add, float* out, int64_t cols) {
  let_next_kernel_start();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i * 4 >= cols) return;
  const float4 w = reinterpret_cast<const float4*>(by.weight)[i];
  wait_for_previous_kernel();
  const float r = by.in[blockIdx.y];
  const float4 x = reinterpret_cast<const float4*>(in + blockIdx.y * cols)[i];
  float4& to = reinterpret_cast<float4*>(out + blockIdx.y * cols)[i];
  const float4 was = add ? to : float4{};
  to = {was.x + x.x * r * w.x, was.y + x.y * r * w.y, was.z + x.z * r * w.z, was.w + x.w * r * w.w};
}

// Few rows have the device to themselves, many share it.
int threads_for(int64_t cols) { return int(std::clamp<int64_t>((cols / kWide + 31) / 32 * 32, 32, kThreads)); }

}  // namespace

int64_t most_norm_bytes() { return int64_t(kThreads) * kWide * kHeld; }

void launch_to_bytes(const void* in, Bytes out, int64_t rows, int64_t cols, cudaStream_t stream) {
  launch_early(to_bytes, unsigned(rows), threads_for(cols), stream, static_cast<const __nv_bfloat16*>(in),
               static_cast<uint8_t*>(out.elements), out.scales, cols);
}

void launch_glu_bytes(bool gelu, const void* in, Scales by, Bytes out, int64_t rows, int64_t cols,
                      cudaStream_t stream) {
  launch_early(by.in ? glu_bytes<true> : glu_bytes<false>, unsigned(rows), threads_for(cols), stream, gelu,
               static_cast<const __nv_bfloat16*>(in), by, static_cast<uint8_t*>(out.elements), out.scales, cols);
}

void launch_norm_bytes(const float* in, const float* weight, float eps, void* half, Bytes out, int64_t rows,
                       int64_t cols, cudaStream_t stream) {
  launch_early(norm_bytes<false>, unsigned(rows), threads_for(cols), stream, nullptr, Scales(), const_cast<float*>(in),
               weight, eps, static_cast<__nv_bfloat16*>(half), static_cast<uint8_t*>(out.elements), out.scales, cols);
}

void launch_add_norm_bytes(const float* sums, Scales by, float* x, const float* weight, float eps, void* half,
                           Bytes out, int64_t rows, int64_t cols, cudaStream_t stream) {
  launch_early(norm_bytes<true>, unsigned(rows), threads_for(cols), stream, sums, by, x, weight, eps,
               static_cast<__nv_bfloat16*>(half), static_cast<uint8_t*>(out.elements), out.scales, cols);
}

void launch_scale_half(void* in_out, Scales by, int64_t rows, int64_t cols, cudaStream_t stream) {
  launch_early(scale_half, dim3(unsigned((cols / kWide + 255) / 256), unsigned(rows)), 256, stream,
               static_cast<__nv_bfloat16*>(in_out), by, cols);
}

void launch_scale(const float* in, Scales by, bool add, float* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  launch_early(scale, dim3(unsigned((cols / 4 + 255) / 256), unsigned(rows)), 256, stream, in, by, add, out, cols);
}

void launch_from_bytes(Bytes in, void* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  from_bytes<<<unsigned(rows), 256, 0, stream>>>(static_cast<const uint8_t*>(in.elements), in.scales,
                                                 static_cast<__nv_bfloat16*>(out), cols);
}

}  // namespace kvasir::model::cuda
