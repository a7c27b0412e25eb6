// Scores of three to eight rows whose lanes are summed without leaving the registers. Sixteen sums, of all rows and two
// or four keys, are folded at once, between the products of the keys after them: where a store takes as long
// as two products, putting sums down and reading them again takes a quarter of a score. They are the sums of
// scores_of_rows (product.h).
#pragma once

#include "attention/cpu/read.h"

#if KVASIR_SIMD_FOLDS
namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

// Others convert with so many operations that sums are the lesser part.
template <int R, class Reader>
constexpr bool folds() {
  return R > 2 && Reader::kPlain;
}

// Elements: the sums of the pass before need three steps, and those of this one a fourth.
constexpr int kLeastFolded = 4 * W;

// `D`: head_dim and q_stride where they are known to the compiler, or 0.
template <int R, int D, class Reader>
[[gnu::noinline]] void folded_scores(const float* q, int q_stride, const Reader keys, int head_dim, int begin, int end,
                                     float* s, Prefetcher& ahead) {
  constexpr int kRows = R <= 4 ? 4 : 8, kKeys = 16 / kRows, kPasses = 16 / kKeys;  // rows with room, keys a pass
  const int steps = (D > 0 ? D : head_dim) / W, stride = D > 0 ? D : q_stride;
  alignas(64) float folded[(kTile / kKeys + 1) * W];  // the pass before the first one leaves something, too
  float* to = folded;
  V halves[8], fours[4], twos[2], left[8];  // of the pass before: what its own last step had no time for, too
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) halves[i] = left[i] = zero();
  auto add_left = [&](int n) __attribute__((always_inline)) {
    halves[2 * n + 1] = hold(add_halves(left[n], left[n + 4]));
  };
  for (int j = begin; j < end; j += W)
    for (int t = 0; t < kPasses; ++t, to += W) {
      const uint8_t* at[kKeys];  // key k of this pass: so that scores end in order
      for (int k = 0; k < kKeys; ++k) at[k] = keys.row(j + t + (kRows == 8 ? t / 4 * 4 : 0) + 4 * k).at;
      V sums[16];
#pragma GCC unroll 16
      for (V& x : sums) x = hold(zero());
      // Products of W elements; between(n) after those of every four sums.
      auto step = [&](int e, auto between) __attribute__((always_inline)) {
        V x[kKeys];
#pragma GCC unroll 4
        for (int k = 0; k < kKeys; ++k) x[k] = hold(Reader::read(at[k], e * W));
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const int r = kRows == 8 ? i / 2 + i % 2 * 4 : i;  // the order in which halves are added
          if (r < R) {
            const V w = hold(load(q + r * stride + e * W));
#pragma GCC unroll 4
            for (int k = 0; k < kKeys; ++k) sums[k * kRows + r] = fma_v(w, x[k], sums[k * kRows + r]);
          }
          if ((i + 1) * kKeys % 4 == 0) between((i + 1) * kKeys / 4 - 1);
        }
      };
      prefetch(ahead);
      step(0, add_left);
      step(
          1, [&](int n) __attribute__((always_inline)) { fours[n] = hold(add_fours(halves[n], halves[n + 4])); });
      prefetch(ahead);
      const auto last_sums = [&](int n) __attribute__((always_inline)) {
        if (n < 2) twos[n] = hold(add_twos(fours[n], fours[n + 2]));
        if (n == 3) store(to, add_ones(twos[0], twos[1]));
      };
      step(2, last_sums);
#pragma GCC unroll 8
      for (int e = 3; e < steps - 1; ++e) {
        if (e % 2 == 0) prefetch(ahead);
        step(e, [](int) {});
      }
      if (steps % 2 == 1) prefetch(ahead);
      step(
          steps - 1, [&](int n) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i)
              if (n < 2 && kFoldOrder[i] % 4 == n)
                halves[i] = hold(add_halves(sums[kFoldOrder[i]], sums[kFoldOrder[i + 8]]));
          });
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) left[n] = sums[kFoldOrder[2 * n + 1]], left[n + 4] = sums[kFoldOrder[2 * n + 9]];
    }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) add_left(n);
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) fours[n] = add_fours(halves[n], halves[n + 4]);
  store(to, add_ones(add_twos(fours[0], fours[2]), add_twos(fours[1], fours[3])));

  // What pass t left has key k's row r in lane k * kRows + r.
  const float* from = folded + W;
  for (int j = begin; j < end; j += W, from += kPasses * W) {
    V x[8];
#pragma GCC unroll 8
    for (int t = 0; t < kPasses; ++t) x[t] = load(from + t * W);
    transpose_fours(x);
    if constexpr (kRows == 8) transpose_fours(x + 4);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      if constexpr (kRows == 4) {
        if (r < R) store(s + r * kTile + j, x[r]);
      } else {
        store(s + r * kTile + j, even_fours(x[r], x[r + 4]));
        if (r + 4 < R) store(s + (r + 4) * kTile + j, odd_fours(x[r], x[r + 4]));
      }
    }
  }
}

template <int R, class Reader>
inline void folded_scores_of_rows(const float* q, int q_stride, const Reader& keys, int head_dim, int begin, int end,
                                  float* s, Prefetcher& ahead) {
  if (head_dim == 128 && q_stride == 128)
    return folded_scores<R, 128>(q, q_stride, keys, head_dim, begin, end, s, ahead);
  if (head_dim == 64 && q_stride == 64) return folded_scores<R, 64>(q, q_stride, keys, head_dim, begin, end, s, ahead);
  folded_scores<R, 0>(q, q_stride, keys, head_dim, begin, end, s, ahead);
}

}  // namespace
}  // namespace kvasir::attention::cpu
#endif
