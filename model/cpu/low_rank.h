// Products by the two thin factors of a low-rank adapter. A lane is an output; its sum is four sums of every fourth
// input, so that the latency of one addition does not bound it, and is the same whichever rows it is computed beside.
#pragma once

#include "model/cpu/kernels.h"
#include "simd/simd.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

template <bool kHalf>
inline simd::V load_factor(const uint8_t* p) {
  if constexpr (kHalf)
    return simd::load_bf16(p);
  else
    return simd::load(reinterpret_cast<const float*>(p));
}

template <bool kHalf, int kRows>
inline void low_rank_rows(const Factor& f, int64_t column, int64_t n, const float* const* x, float* const* y) {
  constexpr int kChains = 4;
  constexpr int64_t kBytes = kHalf ? 2 : 4, kStep = kGroup * kBytes;
  for (int64_t at = column - column % simd::W; at < column + n; at += simd::W) {
    const uint8_t* p = f.data + (at / kGroup * f.depth * kGroup + at % kGroup) * kBytes;
    simd::V sums[kRows][kChains];
    for (int t = 0; t < kRows; ++t)
      for (int c = 0; c < kChains; ++c) sums[t][c] = simd::zero();
    int64_t d = 0;
    for (; d + kChains <= f.depth; d += kChains)
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c, p += kStep) {
        const simd::V w = load_factor<kHalf>(p);
        for (int t = 0; t < kRows; ++t) sums[t][c] = simd::fused(simd::set1(x[t][d + c]), w, sums[t][c]);
      }
    for (; d < f.depth; ++d, p += kStep) {
      const simd::V w = load_factor<kHalf>(p);
      for (int t = 0; t < kRows; ++t) sums[t][0] = simd::fused(simd::set1(x[t][d]), w, sums[t][0]);
    }
    const int64_t i = at - column;
    for (int t = 0; t < kRows; ++t) {
      const simd::V sum = simd::add(simd::add(sums[t][0], sums[t][1]), simd::add(sums[t][2], sums[t][3]));
      if (i >= 0 && i + simd::W <= n) {
        simd::store(y[t] + i, simd::add(simd::load(y[t] + i), sum));
        continue;
      }
      float lanes[simd::W];
      simd::store(lanes, sum);
      for (int64_t l = i < 0 ? -i : 0; l < simd::W && i + l < n; ++l) y[t][i + l] += lanes[l];
    }
  }
}

void low_rank(const Factor& f, int64_t column, int64_t n, const float* const* x, int rows, float* const* y) {
  if (f.half)
    rows == 1 ? low_rank_rows<true, 1>(f, column, n, x, y) : low_rank_rows<true, 2>(f, column, n, x, y);
  else
    rows == 1 ? low_rank_rows<false, 1>(f, column, n, x, y) : low_rank_rows<false, 2>(f, column, n, x, y);
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
