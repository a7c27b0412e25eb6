// Kernels of linear attention: the convolution in front of it, and the gated delta rule. Lanes are columns of the
// state, each of which is summed in the same order in every instruction set.
#pragma once

#include <cstdint>

#include "model/cpu/kernels.h"
#include "model/cpu/row_kernels.h"
#include "simd/simd.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

void short_convolution(const float* const* x, const float* weight, int64_t stride, int taps, int64_t n, float* out) {
  for (int64_t c = 0; c < n; ++c) out[c] = weight[c] * x[0][c];
  for (int j = 1; j < taps; ++j)
    for (int64_t c = 0; c < n; ++c) out[c] = fma1(weight[j * stride + c], x[j][c], out[c]);
  for (int64_t c = 0; c < n; ++c) out[c] = out[c] / (1.0f + exp1(-out[c]));
}

// kVectors vectors of columns: what all rows do to them, so that they stay in the first-level cache. The sums over keys
// go in two chains, of even and of odd ones.
template <int kVectors>
inline void delta_columns(const DeltaRows& r, int64_t column) {
  using simd::V;
  for (int64_t t = 0; t < r.rows; ++t) {
    const float *q = r.q + t * r.key_dim, *k = r.k + t * r.key_dim;
    float* state = r.state + column;
    V had[2][kVectors], delta[kVectors], out[2][kVectors];
    for (int i = 0; i < kVectors; ++i) had[0][i] = had[1][i] = out[0][i] = out[1][i] = simd::zero();
    for (int64_t j = 0; j < r.key_dim; j += 2, state += 2 * r.value_dim)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c)
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i)
          had[c][i] = simd::fused(simd::set1(k[j + c]), simd::load(state + c * r.value_dim + i * simd::W), had[c][i]);
    const V decay = simd::set1(r.decay[t]), fades = simd::set1(-r.decay[t]), beta = simd::set1(r.beta[t]);
    for (int i = 0; i < kVectors; ++i) {
      const V value = simd::load(r.v + t * r.value_dim + column + i * simd::W);
      delta[i] = simd::mul(beta, simd::fused(fades, simd::add(had[0][i], had[1][i]), value));
    }
    state = r.state + column;
    for (int64_t j = 0; j < r.key_dim; j += 2, state += 2 * r.value_dim)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c)
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          float* at = state + c * r.value_dim + i * simd::W;
          const V s = simd::fused(simd::set1(k[j + c]), delta[i], simd::mul(decay, simd::load(at)));
          simd::store(at, s);
          out[c][i] = simd::fused(simd::set1(q[j + c]), s, out[c][i]);
        }
    for (int i = 0; i < kVectors; ++i)
      simd::store(r.out + t * r.stride + column + i * simd::W, simd::add(out[0][i], out[1][i]));
  }
}

void delta_rule(const DeltaRows& r) {
  int64_t column = 0;
  for (; column + 4 * simd::W <= r.value_dim; column += 4 * simd::W) delta_columns<4>(r, column);
  for (; column < r.value_dim; column += simd::W) delta_columns<1>(r, column);
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
