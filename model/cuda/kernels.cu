#include <cuda_bf16.h>

#include <algorithm>

#include "model/cuda/activations.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/kernels.h"

namespace kvasir::model::cuda {
namespace {

constexpr int kThreads = 256, kPickThreads = 1024, kMostNormThreads = 1024;

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

__global__ void embed(const int32_t* tokens, const int32_t* before, const __nv_bfloat16* table, float scale, float* out,
                      int64_t cols) {
  const int32_t named = tokens[blockIdx.x];
  const __nv_bfloat16* row = table + int64_t(named < 0 ? before[-1 - named] : named) * cols;
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x)
    out[blockIdx.x * cols + i] = scale * __bfloat162float(row[i]);
}

// kWide elements of a row, read and written at once.
template <class T, int kWide>
struct alignas(sizeof(T) * kWide < 16 ? sizeof(T) * kWide : 16) Wide {
  T x[kWide];
};

__device__ void put(float v, bool add, float& out) { out = add ? out + v : v; }
__device__ void put(float v, bool, __nv_bfloat16& out) { out = __float2bfloat16_rn(v); }

// One block a row; blockIdx.y counts the parts of a row that are normed apart (heads). What a thread has of a row stays
// in registers, but for very long rows.
template <class Out, int kWide>
__global__ void __launch_bounds__(kMostNormThreads)
    norm(const float* in, int64_t in_stride, const float* weight, float eps, bool add, Out* out, int64_t out_stride,
         int64_t cols) {
  constexpr int kHeld = 4;
  let_next_kernel_start();
  const auto* from = reinterpret_cast<const Wide<float, kWide>*>(in + blockIdx.x * in_stride + blockIdx.y * cols);
  const auto* scale = reinterpret_cast<const Wide<float, kWide>*>(weight);
  auto* to = reinterpret_cast<Wide<Out, kWide>*>(out + blockIdx.x * out_stride + blockIdx.y * cols);
  const int64_t pieces = cols / kWide, rest = int64_t(kHeld) * blockDim.x;
  Wide<float, kWide> x[kHeld] = {}, w[kHeld] = {};
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (const int64_t i = threadIdx.x + int64_t(h) * blockDim.x; i < pieces) w[h] = scale[i];
  wait_for_previous_kernel();
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (const int64_t i = threadIdx.x + int64_t(h) * blockDim.x; i < pieces) x[h] = from[i];
  float sum = 0;
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    for (float v : x[h].x) sum += v * v;
  for (int64_t i = threadIdx.x + rest; i < pieces; i += blockDim.x)
    for (float v : from[i].x) sum += v * v;
  const float r = rsqrtf(block_sum(sum) / float(cols) + eps);
  auto give = [&](int64_t i, const Wide<float, kWide>& v, const Wide<float, kWide>& by) {
    Wide<Out, kWide> y;
    if (add) y = to[i];
    for (int k = 0; k < kWide; ++k) put(v.x[k] * r * by.x[k], add, y.x[k]);
    to[i] = y;
  };
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (const int64_t i = threadIdx.x + int64_t(h) * blockDim.x; i < pieces) give(i, x[h], w[h]);
  for (int64_t i = threadIdx.x + rest; i < pieces; i += blockDim.x) give(i, from[i], scale[i]);
}

template <class Out>
void norm_of(const float* in, int64_t stride, const float* weight, float eps, bool add, Out* out, int64_t out_stride,
             dim3 grid, int64_t cols, bool invariant, cudaStream_t stream) {
  const int64_t wide = cols % 4 == 0 && stride % 4 == 0 && out_stride % 4 == 0 ? 4 : 1;
  // Few rows leave the device idle: then a row is not to wait for its own threads.
  const int64_t most = invariant || grid.x * grid.y <= 2 * 132 ? kMostNormThreads : kThreads;
  const int threads = int(std::min<int64_t>(most, (cols / wide + 31) / 32 * 32));
  auto kernel = wide == 4 ? norm<Out, 4> : norm<Out, 1>;
  launch_early(kernel, grid, threads, stream, in, stride, weight, eps, add, out, out_stride, cols);
}

// A warp a head, whichever row it is of.
constexpr int kHeadWarps = 8;
__global__ void __launch_bounds__(kHeadWarps * 32)
    qk_norm(const float* in, int64_t q_heads, const float* q, int64_t kv_heads, const float* k, int size, float eps,
            __nv_bfloat16* out, int64_t count) {
  constexpr int kHeld = int(kMostHead) / 128;
  let_next_kernel_start();
  const int64_t head = int64_t(blockIdx.x) * kHeadWarps + threadIdx.x / 32, of_row = head % (q_heads + 2 * kv_heads);
  const int lane = threadIdx.x % 32;
  wait_for_previous_kernel();
  if (head >= count) return;
  const float* weight = of_row < q_heads ? q : of_row < q_heads + kv_heads ? k : nullptr;
  const auto* from = reinterpret_cast<const Wide<float, 4>*>(in + head * size);
  Wide<float, 4> x[kHeld] = {};
  float sum = 0;
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (const int i = h * 32 + lane; i * 4 < size) {
      x[h] = from[i];
      for (float v : x[h].x) sum += v * v;
    }
  for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
  const float r = rsqrtf(sum / float(size) + eps);
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (const int i = h * 32 + lane; i * 4 < size) {
      Wide<__nv_bfloat16, 4> y;
      for (int e = 0; e < 4; ++e) put(weight ? x[h].x[e] * r * weight[i * 4 + e] : x[h].x[e], false, y.x[e]);
      reinterpret_cast<Wide<__nv_bfloat16, 4>*>(out + head * size)[i] = y;
    }
}

__device__ float wide(float x) { return x; }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

// A thread makes kWide elements; blocks stride over the rows.
template <class In, int kWide>
__global__ void __launch_bounds__(kThreads)
    glu(bool gelu, const In* in, __nv_bfloat16* out, int64_t rows, int64_t cols) {
  let_next_kernel_start();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  wait_for_previous_kernel();
  if (i >= cols / kWide) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const auto* from = reinterpret_cast<const Wide<In, kWide>*>(in + row * 2 * cols);
    const Wide<In, kWide> g = from[i], u = from[cols / kWide + i];
    Wide<__nv_bfloat16, kWide> y;
    for (int k = 0; k < kWide; ++k) {
      const float x = wide(g.x[k]);
      y.x[k] = __float2bfloat16_rn((gelu ? gelu_tanh(x) : silu(x)) * wide(u.x[k]));
    }
    reinterpret_cast<Wide<__nv_bfloat16, kWide>*>(out + row * cols)[i] = y;
  }
}

template <class In>
void glu_of(bool gelu, const void* in, void* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  const int64_t at_once = cols % 8 == 0 ? 8 : 1;
  const dim3 grid(unsigned((cols / at_once + kThreads - 1) / kThreads), unsigned(std::min<int64_t>(rows, 65535)));
  launch_early(at_once == 8 ? glu<In, 8> : glu<In, 1>, grid, kThreads, stream, gelu, static_cast<const In*>(in),
               static_cast<__nv_bfloat16*>(out), rows, cols);
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
struct BestToken {
  float value, sum;
  int32_t at;
  __device__ void join(const BestToken& o) {
    const float most = fmaxf(value, o.value);
    sum =
        (value == most ? sum : sum * __expf(value - most)) + (o.value == most ? o.sum : o.sum * __expf(o.value - most));
    at = value == o.value ? min(at, o.at) : value > o.value ? at : o.at;
    value = most;
  }
  __device__ BestToken from(int lanes) const {
    return {__shfl_xor_sync(~0u, value, lanes), __shfl_xor_sync(~0u, sum, lanes), __shfl_xor_sync(~0u, at, lanes)};
  }
};

__global__ void __launch_bounds__(kPickThreads)
    greatest(const float* logits, DeviceDraw* out, int32_t* tokens, int64_t cols, const int32_t* which) {
  __shared__ BestToken parts[kPickThreads / 32];
  const float* row = logits + (which ? int64_t(which[blockIdx.x]) : int64_t(blockIdx.x)) * cols;
  constexpr float kLeast = -3.402823466e38f;
  BestToken best{kLeast, 0, INT32_MAX};
  bool bad = false;
  constexpr int kAtOnce = 8;  // whose exponentials wait for one greatest
  for (int64_t first = threadIdx.x; first < cols; first += kAtOnce * kPickThreads) {
    float x[kAtOnce];
    float most = best.value;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t i = first + k * kPickThreads;
      x[k] = i < cols ? row[i] : kLeast;
      bad |= !isfinite(x[k]);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) most = fmaxf(most, x[k]);
    if (most > best.value || best.at == INT32_MAX) {
      best.sum *= __expf(best.value - most);
      best.value = most;
#pragma unroll
      for (int k = kAtOnce - 1; k >= 0; --k)
        if (x[k] == most && first + k * kPickThreads < cols) best.at = int32_t(first + k * kPickThreads);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k * kPickThreads < cols) best.sum += __expf(x[k] - most);
  }
  bad = __syncthreads_or(bad);
  for (int s = 16; s > 0; s /= 2) best.join(best.from(s));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = parts[threadIdx.x];
  for (int s = 16; s > 0; s /= 2) best.join(best.from(s));
  if (threadIdx.x != 0) return;
  out[blockIdx.x] = {best.at, -logf(best.sum), bad, best.value == kLeast};
  tokens[blockIdx.x] = bad ? 0 : best.at;
}

unsigned blocks(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

}  // namespace

void launch_embed(const int32_t* tokens, const int32_t* before, const void* table, float scale, float* out,
                  int64_t rows, int64_t cols, cudaStream_t stream) {
  embed<<<unsigned(rows), kThreads, 0, stream>>>(tokens, before, static_cast<const __nv_bfloat16*>(table), scale, out,
                                                 cols);
}

void launch_norm(const float* in, const float* weight, float eps, void* out, int64_t rows, int64_t cols,
                 cudaStream_t stream, bool invariant, int64_t out_stride) {
  norm_of(in, cols, weight, eps, false, static_cast<__nv_bfloat16*>(out), out_stride > 0 ? out_stride : cols,
          unsigned(rows), cols, invariant, stream);
}

void launch_add_norm(const float* in, const float* weight, float eps, float* out, int64_t rows, int64_t cols,
                     cudaStream_t stream, bool invariant) {
  norm_of(in, cols, weight, eps, true, out, cols, unsigned(rows), cols, invariant, stream);
}

void launch_head_norm(float* x, int64_t stride, int64_t heads, int64_t size, const float* weight, float eps,
                      int64_t rows, cudaStream_t stream, bool invariant) {
  norm_of(x, stride, weight, eps, false, x, stride, dim3(unsigned(rows), unsigned(heads)), size, invariant, stream);
}

void launch_qk_norm(const float* in, int64_t q_heads, const float* q, int64_t kv_heads, const float* k, int64_t size,
                    float eps, void* out, int64_t rows, cudaStream_t stream) {
  const int64_t count = rows * (q_heads + 2 * kv_heads);
  launch_early(qk_norm, unsigned((count + kHeadWarps - 1) / kHeadWarps), kHeadWarps * 32, stream, in, q_heads, q,
               kv_heads, k, int(size), eps, static_cast<__nv_bfloat16*>(out), count);
}

void launch_glu(bool gelu, const void* in, bool half, void* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  (half ? glu_of<__nv_bfloat16> : glu_of<float>)(gelu, in, out, rows, cols, stream);
}

void launch_to_bf16(const float* in, void* out, int64_t count, cudaStream_t stream) {
  to_bf16<<<blocks(count), kThreads, 0, stream>>>(in, static_cast<__nv_bfloat16*>(out), count);
}

void launch_take_rows(const float* in, const int32_t* which, float* out, int64_t rows, int64_t cols,
                      cudaStream_t stream) {
  take_rows<<<unsigned(rows), kThreads, 0, stream>>>(in, which, out, cols);
}

void launch_greatest(const float* logits, DeviceDraw* out, int32_t* tokens, int64_t rows, int64_t cols,
                     cudaStream_t stream, const int32_t* which) {
  greatest<<<unsigned(rows), kPickThreads, 0, stream>>>(logits, out, tokens, cols, which);
}

}  // namespace kvasir::model::cuda
