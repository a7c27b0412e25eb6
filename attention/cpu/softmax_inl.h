// Online softmax over one tile. Included by kernels_inl.h only.

constexpr float kNone = -__builtin_inff();
constexpr float kLog2e = 1.44269504088896341f;

// 2^t for t <= 0 (and a little above); below -125 it is 0. t = n + r with |r| <= 1/2: adding 1.5 * 2^23 rounds,
// and leaves n in the low bits, from where it goes into the exponent.
inline V exp2_v(V t) {
  const V magic = set1(12582912.0f);
  V shifted = add(t, magic), r = sub(t, sub(shifted, magic));
  V p = set1(1.535336188319500e-4f);
  p = fma_v(p, r, set1(1.339887440266574e-3f));
  p = fma_v(p, r, set1(9.618437357674640e-3f));
  p = fma_v(p, r, set1(5.550332471162809e-2f));
  p = fma_v(p, r, set1(2.402264791363012e-1f));
  p = fma_v(p, r, set1(6.931472028550421e-1f));
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

void softmax(float* s, int rows, const SoftmaxRow* params, float scale, float softcap, float* m, float* l,
             float* correction) {
  constexpr int kVectors = kTile / W;
  for (int r = 0; r < rows; ++r, s += kTile) {
    const SoftmaxRow& p = params[r];
    const bool whole = p.lo <= 0 && p.hi >= kTile, plain = whole && softcap <= 0 && p.slope == 0 && !p.mask;
    V x[kVectors], top = set1(kNone);
    for (int i = 0; i < kVectors; ++i) x[i] = mul(load(s + i * W), set1(scale));
    if (!plain)
      for (int i = 0; i < kVectors; ++i) x[i] = biased(x[i], i * W, p, softcap, whole);
    for (int i = 0; i < kVectors; ++i) top = max_v(top, x[i]);
    const float before = m[r];
    float high = reduce_max(top);
    if (high < before) high = before;
    if (high == kNone) {  // nothing visible yet
      for (int i = 0; i < kVectors; ++i) store(s + i * W, zero());
      correction[r] = 1.0f;
      continue;
    }
    V sum = zero();
    for (int i = 0; i < kVectors; ++i) {
      x[i] = exp_v(sub(x[i], set1(high)));
      store(s + i * W, x[i]);
      sum = add(sum, x[i]);
    }
    float fix = 1.0f;  // what the exponential gives for an unchanged maximum
    if (before < high) fix = before == kNone ? 0.0f : first(exp_v(set1(before - high)));
    correction[r] = fix;
    l[r] = l[r] * fix + reduce_add(sum);
    m[r] = high;
  }
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
