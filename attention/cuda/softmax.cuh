// Stage 2 of every attention kernel, the online softmax: a row has a running maximum, a sum of weights and results that
// are rescaled when the maximum moves. Weights are powers of two, of scores that are logarithms to base 2.
#pragma once

#include "attention/cuda/device.cuh"
#include "attention/cuda/mma.cuh"

namespace kvasir::attention::cuda {

// What a stream kernel's weights are larger by, in log2: small ones stay normal numbers in float16.
template <class T>
constexpr float kWeightShift = __is_same(T, Half) ? 10.0f : 0.0f;

// Over the lanes that differ in the bits from kFirst to kLast: <1, 2> are four lanes side by side, which share a row of
// the matrix units' results, <4, 16> the eight that share a column.
template <int kFirst, int kLast>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int o = kFirst; o <= kLast; o <<= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
  return x;
}
template <int kFirst, int kLast>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int o = kFirst; o <= kLast; o <<= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}

template <int kN>
__device__ __forceinline__ float largest(const float (&x)[kN]) {
  float most = x[0];
#pragma unroll
  for (int e = 1; e < kN; ++e) most = fmaxf(most, x[e]);
  return most;
}

// What weights are counted from: a row that has seen no key yet has no maximum.
__device__ __forceinline__ float weight_base(float top, float scale = 1.0f) {
  return top == -INFINITY ? 0.0f : top * scale;
}

// Moves a row's running maximum; gives what its sum and its results so far are rescaled by. `scale`: of the maximum,
// where scores are not scaled yet; `shift`: what weights are larger by, in log2.
__device__ __forceinline__ float move_maximum(float& top, float next, float scale = 1.0f, float shift = 0.0f) {
  const float rescale = exp2_fast(top * scale - shift - (weight_base(next, scale) - shift));
  top = next;
  return rescale;
}

// Weights in place of scores; gives `sum` and all of them.
template <int kN>
__device__ __forceinline__ float weigh_scores(float (&x)[kN], float base, float sum) {
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    x[e] = exp2_fast(x[e] - base);
    sum += x[e];
  }
  return sum;
}

}  // namespace kvasir::attention::cuda
