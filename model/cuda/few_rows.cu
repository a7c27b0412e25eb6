#include "attention/cuda/mma.cuh"
#include "model/cuda/activations.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/few_rows.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::Brain;

// A block has kTall features, whose k elements its warps have between them, kStep at a time; lane = 4 * g + tid.
// Both operands are read as they lie, 16 bytes a lane: the order of the contracted index is chosen freely.
constexpr int kTall = 16, kStep = 32, kWarps = 8;

struct WeightTile {
  uint4 low, high;  // features g and g + 8
};
__device__ uint4 load16(const __nv_bfloat16* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ uint4 load16_once(const __nv_bfloat16* p) { return __ldcs(reinterpret_cast<const uint4*>(p)); }

__device__ void multiply(float (&sum)[4], const WeightTile& a, const uint4& b) {
  const uint32_t first[4] = {a.low.x, a.high.x, a.low.y, a.high.y}, second[4] = {a.low.z, a.high.z, a.low.w, a.high.w};
  Brain::mma(sum, first, b.x, b.y);
  Brain::mma(sum, second, b.z, b.w);
}

// kWide: groups of eight rows. kParts: 2 where gate and up are multiplied side by side.
template <int kWide, int kParts>
__global__ void __launch_bounds__(kWarps * 32)
    few_rows(const __nv_bfloat16* in, const __nv_bfloat16* weight, void* out, int rows, int64_t n, int k, Form form) {
  constexpr int kAhead = kWide > 1 ? 3 : 4;  // steps of a warp that are under way at once
  let_next_kernel_start();
  __shared__ float sums[kWarps][kParts][kWide * 8][kTall];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tid = lane % 4;
  const int steps = k / kStep;
  const int64_t feature = int64_t(blockIdx.x) * kTall;
  WeightTile tiles[kAhead][kParts];
  auto prefetch = [&](int step, WeightTile(&to)[kParts]) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const __nv_bfloat16* at = weight + (p * n + feature + g) * k + step * kStep + tid * 8;
      to[p] = {load16_once(at), load16_once(at + 8 * int64_t(k))};
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (warp + i * kWarps < steps) prefetch(warp + i * kWarps, tiles[i]);
  wait_for_previous_kernel();

  float sum[kParts][kWide][4] = {};
  for (int first = warp; first < steps; first += kAhead * kWarps) {
    uint4 x[kAhead][kWide] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int w = 0; w < kWide; ++w)
        if (first + i * kWarps < steps && w * 8 + g < rows)
          x[i][w] = load16(in + int64_t(w * 8 + g) * k + (first + i * kWarps) * kStep + tid * 8);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kWarps >= steps) break;
#pragma unroll
      for (int p = 0; p < kParts; ++p)
#pragma unroll
        for (int w = 0; w < kWide; ++w) multiply(sum[p][w], tiles[i][p], x[i][w]);
      if (const int next = first + (kAhead + i) * kWarps; next < steps) prefetch(next, tiles[i]);
    }
  }
#pragma unroll
  for (int p = 0; p < kParts; ++p)
#pragma unroll
    for (int w = 0; w < kWide; ++w)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[warp][p][w * 8 + tid * 2 + i % 2][g + i / 2 * 8] = sum[p][w][i];
  __syncthreads();
  for (int i = threadIdx.x; i < rows * kTall; i += kWarps * 32) {
    const int row = i / kTall, f = i % kTall;
    float y[kParts] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
#pragma unroll
      for (int p = 0; p < kParts; ++p) y[p] += sums[w][p][row][f];
    const int64_t at = int64_t(row) * n + feature + f;
    if (kParts == 2 && form == Form::apart) {
      float* both = static_cast<float*>(out) + int64_t(row) * n + at;
      both[0] = y[0], both[n] = y[kParts - 1];
    } else if constexpr (kParts == 2)
      static_cast<__nv_bfloat16*>(out)[at] =
          __float2bfloat16_rn((form == Form::gelu ? gelu_tanh(y[0]) : silu(y[0])) * y[1]);
    else if (form == Form::bf16)
      static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(y[0]);
    else
      static_cast<float*>(out)[at] = form == Form::added_f32 ? static_cast<float*>(out)[at] + y[0] : y[0];
  }
}

template <int kParts>
auto kernel_for(int64_t rows) {
  return rows <= 8 ? few_rows<1, kParts> : rows <= 16 ? few_rows<2, kParts> : few_rows<4, kParts>;
}

}  // namespace

bool few_rows_takes(int64_t rows, int64_t n, int64_t k, Form form) {
  // Every block reads all rows: where these are long, a library that shares them is faster sooner. And where the
  // weights are many, it is they that take the time, which it knows well how to hide.
  constexpr int64_t kRowElements = 32768, kWeights = 26 << 20;
  const int64_t parts = fuses_gates(form) ? 2 : 1;
  return rows <= 32 && rows * k <= kRowElements && parts * n * k <= kWeights && n % kTall == 0 && k % kStep == 0;
}

void launch_few_rows(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k, Form form,
                     cudaStream_t stream) {
  auto kernel = fuses_gates(form) ? kernel_for<2>(rows) : kernel_for<1>(rows);
  launch_early(kernel, unsigned(n / kTall), kWarps * 32, stream, static_cast<const __nv_bfloat16*>(in),
               static_cast<const __nv_bfloat16*>(weight), out, int(rows), n, int(k), form);
}

}  // namespace kvasir::model::cuda
