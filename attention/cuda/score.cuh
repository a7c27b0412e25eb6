// Stage 1 of every attention kernel, between the product with K and the softmax: softcap, ALiBi, additive mask, and
// which keys a row sees (its end, its window, the sinks in front of it). Scores leave it as logarithms to base 2.
#pragma once

#include "attention/cuda/device.cuh"
#include "attention/cuda/mma.cuh"

namespace kvasir::attention::cuda {

// Whether scores go through more than the scale and the window.
__host__ __device__ inline bool transforms_scores(const Shape& s, const Layer& l) {
  return s.softcap > 0.0f || s.slopes || l.mask;
}

// What one query row does to its scores.
struct ScoreRow {
  float scale;          // of a product; with log2(e) in it where there is no softcap
  float slope;          // ALiBi's, with log2(e) in it
  int begin, end, own;  // it sees the sinks and [begin, end), and stands at `own`
  int64_t mask;         // where its additive mask has key 0
};

__device__ __forceinline__ float alibi_slope(const Shape& s, int head) {
  return s.slopes ? s.slopes[head] * kLog2e : 0.0f;
}

// tanh, to float32's precision near enough, times `cap`.
__device__ __forceinline__ float fast_softcapped(float x, float cap) {
  const float z = exp2_fast(x / cap * (2.0f * kLog2e));
  return cap * (1.0f - __fdividef(2.0f, z + 1.0f));
}

// ALiBi and the additive mask of a score that is a logarithm to base 2 already; `masked`: there is such a mask for it.
__device__ __forceinline__ float biased(const Shape& s, const Layer& l, float x, float slope, int distance, bool masked,
                                        int64_t mask_at) {
  x += slope * float(distance);
  if (l.mask && masked) x += load_float(l.mask, s.work, mask_at) * kLog2e;
  return x;
}

// Scaled scores of one row through all of it; key_of(e) is the key of x[e], keys end at `kv_end`.
template <int kN, class KeyOf>
__device__ __forceinline__ void transform_scores(const Shape& s, const Layer& l, const ScoreRow& row, int kv_end,
                                                 float (&x)[kN], KeyOf&& key_of) {
  for (int e = 0; e < kN; ++e) {
    const int j = key_of(e);
    float y = x[e];
    if (s.softcap > 0.0f) y = softcapped(y, s.softcap) * kLog2e;
    x[e] = biased(s, l, y, row.slope, j - row.own, j < kv_end, row.mask + j);
  }
}
template <int kN, class KeyOf>
__device__ __forceinline__ void hide_unseen(int sinks, const ScoreRow& row, int kv_end, float (&x)[kN],
                                            KeyOf&& key_of) {
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    const int j = key_of(e);
    const bool seen = j < min(row.end, kv_end) && (j >= row.begin || j < sinks);
    if (!seen) x[e] = -INFINITY;
  }
}

}  // namespace kvasir::attention::cuda
