// Online softmax over one tile.
#pragma once

#include "attention/cpu/read.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

constexpr float kNone = -__builtin_inff();
constexpr float kLog2e = 1.44269504088896341f;

// 2^t for t <= 0 (and a little above); below -125 it is 0. t = n + r with |r| <= 1/2: adding 1.5 * 2^23 rounds,
// and leaves n in the low bits, from where it goes into the exponent. Within 1.7e-7, and 2^0 is 1. What is undefined
// stays so: a maximum overlooks it, and a row is not to lose a key by that.
inline V exp2_v(V t) {
  const V magic = set1(12582912.0f);
  V shifted = add(t, magic), r = sub(t, sub(shifted, magic));
  V p = set1(1.326472731307149e-3f);
  p = fma_v(p, r, set1(9.671512991189957e-3f));
  p = fma_v(p, r, set1(5.550733581185341e-2f));
  p = fma_v(p, r, set1(2.402224242687225e-1f));
  p = fma_v(p, r, set1(6.931470036506653e-1f));
  p = fma_v(p, r, set1(1.0f));
  return zero_below(t, set1(-125.0f), add_exponent(p, shifted));
}
inline V exp_v(V x) { return exp2_v(mul(x, set1(kLog2e))); }

inline V tanh_v(V x) {
  V a = min_v(abs_v(x), set1(10.0f)), x2 = mul(x, x);
  V small = fma_v(x2, set1(62.0f / 2835), set1(-17.0f / 315));
  small = fma_v(small, x2, set1(2.0f / 15));
  small = fma_v(small, x2, set1(-1.0f / 3));
  small = fma_v(mul(small, x2), x, x);
  V large = sub(set1(1.0f), div_v(set1(2.0f), add(exp_v(add(a, a)), set1(1.0f))));
  large = select_ge(x, zero(), large, sub(zero(), large));
  return select_ge(a, set1(0.25f), large, small);
}

inline V biased(V x, int j, const SoftmaxRow& p, float softcap, bool whole) {
  if (softcap > 0) x = mul(set1(softcap), tanh_v(div_v(x, set1(softcap))));
  V at = add(iota(), set1(float(j)));
  if (p.slope != 0) x = add(x, mul(set1(p.slope), add(at, set1(p.offset))));
  if (p.mask) x = add(x, load(p.mask + j));
  if (whole) return x;
  V none = set1(kNone), lo = set1(float(p.lo)), hi = set1(float(p.hi)), sinks = set1(float(p.sink_end));
  return select_ge(at, hi, none, select_ge(at, lo, x, select_ge(at, sinks, none, x)));
}

inline bool all_visible(const SoftmaxRow& p) { return p.lo <= 0 && p.hi >= kTile; }
inline bool biases(const SoftmaxRow& p, float softcap) { return softcap > 0 || p.slope != 0 || p.mask; }

#if KVASIR_SIMD_FOLDS
// The same for one row, whose lanes are folded where they are: nothing goes through memory.
inline void softmax_row(float* s, const SoftmaxRow& p, float scale, float softcap, float* m, float* l,
                        float* correction) {
  constexpr int kVectors = kTile / W;
  const bool whole = all_visible(p), plain = whole && !biases(p, softcap);
  V x[kVectors], top = set1(kNone), sum = zero();
  for (int i = 0; i < kVectors; ++i) x[i] = mul(load(s + i * W), set1(scale));
  if (!plain)
    for (int i = 0; i < kVectors; ++i) x[i] = biased(x[i], i * W, p, softcap, whole);
  for (int i = 0; i < kVectors; ++i) top = max_v(top, x[i]);
  const V lowest = set1(-3.402823466e38f), before = set1(*m), high = max_v(before, fold_row(top, max_v));
  const V from = select_ge(high, lowest, high, zero());
  const V fix = select_ge(high, lowest, exp_v(sub(before, from)), set1(1.0f));
  for (int i = 0; i < kVectors; ++i) {
    x[i] = exp_v(sub(x[i], from));
    store(s + i * W, x[i]);
    sum = add(sum, x[i]);
  }
  *l = first(fma_v(set1(*l), fix, fold_row(sum, add)));
  *m = first(high);
  *correction = first(fix);
}

// R rows that see the whole tile, with nothing added: maxima and sums stay in registers, and scores are read twice
// rather than stored between.
template <int R>
[[gnu::noinline]] void softmax_plain(float* s, float scale, float* m, float* l, float* correction) {
  constexpr int kVectors = kTile / W;
  const V by = set1(scale);
  V x[W];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    V top = set1(kNone);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) top = max_v(top, mul(load(s + r * kTile + i * W), by));
    x[r] = top;
  }
#pragma GCC unroll 16
  for (int r = R; r < W; ++r) x[r] = zero();
  const V lowest = set1(-3.402823466e38f);
  const V before = load_first(R, m), high = max_v(before, fold(x, max_v));
  const V from = select_ge(high, lowest, high, zero());  // 0 while nothing is visible
  const V fix = select_ge(high, lowest, exp_v(sub(before, from)), set1(1.0f));
  alignas(64) float of_row[W];
  store(of_row, from);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const V down = set1(of_row[r]);
    V sum = zero();
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const V e = exp_v(sub(mul(load(s + r * kTile + i * W), by), down));
      store(s + r * kTile + i * W, e);
      sum = add(sum, e);
    }
    x[r] = sum;
  }
  store_first(R, l, fma_v(load_first(R, l), fix, fold(x, add)));
  store_first(R, m, high);
  store_first(R, correction, fix);
}
#endif

// Up to W rows together: their maxima and sums are found across rows, and the corrections are one vector.
inline void softmax_rows(float* s, int rows, const SoftmaxRow* params, float scale, float softcap, float* m, float* l,
                         float* correction) {
  constexpr int kVectors = kTile / W;
  alignas(64) float lanes[W * W], of_row[W];
  for (int r = rows; r < W; ++r) store(lanes + r * W, zero());
  for (int r = 0; r < rows; ++r) {
    const SoftmaxRow& p = params[r];
    const bool whole = all_visible(p), plain = whole && !biases(p, softcap);
    V x[kVectors], top = set1(kNone);
    for (int i = 0; i < kVectors; ++i) x[i] = mul(load(s + r * kTile + i * W), set1(scale));
    if (!plain)
      for (int i = 0; i < kVectors; ++i) x[i] = biased(x[i], i * W, p, softcap, whole);
    for (int i = 0; i < kVectors; ++i) {
      top = max_v(top, x[i]);
      store(s + r * kTile + i * W, x[i]);
    }
    store(lanes + r * W, top);
  }
  const V lowest = set1(-3.402823466e38f);
  const V before = load_first(rows, m), high = max_v(before, max_rows(lanes));
  const V from = select_ge(high, lowest, high, zero());  // 0 while nothing is visible
  const V fix = select_ge(high, lowest, exp_v(sub(before, from)), set1(1.0f));
  store(of_row, from);
  for (int r = 0; r < rows; ++r) {
    const V down = set1(of_row[r]);
    V sum = zero();
    for (int i = 0; i < kVectors; ++i) {
      const V x = exp_v(sub(load(s + r * kTile + i * W), down));
      store(s + r * kTile + i * W, x);
      sum = add(sum, x);
    }
    store(lanes + r * W, sum);
  }
  store_first(rows, l, fma_v(load_first(rows, l), fix, sum_rows(lanes)));
  store_first(rows, m, high);
  store_first(rows, correction, fix);
}

void softmax(float* s, int rows, const SoftmaxRow* params, float scale, float softcap, float* m, float* l,
             float* correction) {
#if KVASIR_SIMD_FOLDS
  if (rows <= 2) {
    for (int r = 0; r < rows; ++r) softmax_row(s + r * kTile, params[r], scale, softcap, m + r, l + r, correction + r);
    return;
  }
  bool plain = rows <= kFewRows;
  for (int r = 0; r < rows && plain; ++r) plain = all_visible(params[r]) && !biases(params[r], softcap);
  if (plain)
    return by_few_rows(rows, [&](auto count) { softmax_plain<decltype(count)::value>(s, scale, m, l, correction); });
#endif
  for (int r = 0; r < rows; r += W)
    softmax_rows(s + r * kTile, rows - r < W ? rows - r : W, params + r, scale, softcap, m + r, l + r, correction + r);
}

void merge(float* M, float* L, float* O, float m, float l, const float* o, int n) {
  if (m == kNone) return;
  if (*M == kNone) {
    for (int d = 0; d < n; d += W) store(O + d, load(o + d));
    *M = m, *L = l;
    return;
  }
  float high = *M > m ? *M : m;
  float a = first(exp_v(set1(*M - high))), b = first(exp_v(set1(m - high)));
  for (int d = 0; d < n; d += W) store(O + d, add(mul(load(O + d), set1(a)), mul(load(o + d), set1(b))));
  *L = *L * a + l * b;
  *M = high;
}

}  // namespace
}  // namespace kvasir::attention::cpu
