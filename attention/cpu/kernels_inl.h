// The loops of kernels.h, written once over a vector type V of W floats. Included by one translation
// unit an instruction set, inside an anonymous namespace, after its simd_*.h.

constexpr float kNone = -__builtin_inff();

// ---- functions ------------------------------------------------------------------------------------

inline V exp_v(V x) {  // x <= 88; below -87 it is 0
  V n = round_v(mul(x, set1(1.44269504088896341f)));
  V r = fma_v(n, set1(-0.693359375f), x);
  r = fma_v(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma_v(p, r, set1(1.3981999507e-3f));
  p = fma_v(p, r, set1(8.3334519073e-3f));
  p = fma_v(p, r, set1(4.1665795894e-2f));
  p = fma_v(p, r, set1(1.6666665459e-1f));
  p = fma_v(p, r, set1(5.0000001201e-1f));
  p = add(fma_v(p, mul(r, r), r), set1(1.0f));
  return select_ge(x, set1(-87.0f), mul(p, pow2(n)), zero());
}

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

// ---- reading the cache ----------------------------------------------------------------------------

template <DType kType>
struct Read;
template <>
struct Read<DType::f32> {
  static constexpr int kBits = 32;
  static V at(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
};
template <>
struct Read<DType::f16> {
  static constexpr int kBits = 16;
  static V at(const uint8_t* p) { return load_f16(p); }
};
template <>
struct Read<DType::bf16> {
  static constexpr int kBits = 16;
  static V at(const uint8_t* p) { return load_bf16(p); }
};
template <>
struct Read<DType::i8> {
  static constexpr int kBits = 8;
  static V at(const uint8_t* p) { return load_i8(p); }
};
template <>
struct Read<DType::i4> {
  static constexpr int kBits = 4;
  static V at(const uint8_t* p) { return load_i4(p); }
};
template <>
struct Read<DType::f8_e4m3> {
  static constexpr int kBits = 8;
  static V at(const uint8_t* p) { return load_e4m3(p); }
};

inline float read_scale(const KvRows& k, int row, int group) {
  const uint8_t* at = k.scales[row];
  if (k.scale_dtype == DType::f16) return f16_scalar(at + 2 * group);
  float f;
  __builtin_memcpy(&f, at + 4 * group, 4);
  return f;
}

enum class Scaling { none, tensor, group };

// W elements of row r from d on, dequantized; past head_dim they are 0. Pages lie anywhere, so the
// processor cannot guess the next tile's rows: each read also asks for its like in the tile ahead.
template <DType kType, Scaling kScaling, bool kWhole>
struct RowReader {
  const KvRows& k;
  const uint8_t* const* next;
  const float* table;  // the tile's scales as float32, [kTile][groups]
  int groups;
  RowReader(const KvRows& rows, const float* scales, int n)
      : k(rows), next(rows.ahead ? rows.ahead->row : rows.row), table(scales), groups(n) {}

  V operator()(int r, int d) const {
    using R = Read<kType>;
    V x;
    __builtin_prefetch(next[r] + d * R::kBits / 8);
    if (kWhole || __builtin_expect(d + W <= k.head_dim, 1)) {
      x = R::at(k.row[r] + d * R::kBits / 8);
    } else {
      alignas(64) uint8_t tail[W * 4] = {};
      __builtin_memcpy(tail, k.row[r] + d * R::kBits / 8, size_t((k.head_dim - d) * R::kBits / 8));
      x = R::at(tail);
    }
    if constexpr (kScaling == Scaling::tensor) x = mul(x, set1(k.scale));
    if constexpr (kScaling == Scaling::group) {
      const float* scales = table + r * groups;
      if (k.group >= W) {
        x = mul(x, set1(scales[d >> k.group_shift]));
      } else {
        alignas(64) float lanes[W];
        for (int i = 0; i < W; ++i) lanes[i] = d + i < k.head_dim ? scales[(d + i) >> k.group_shift] : 0.0f;
        x = mul(x, load(lanes));
      }
    }
    return x;
  }
};

template <DType kType, Scaling kScaling, class F>
inline void with_tail(const KvRows& k, const F& f, const float* scales = nullptr, int groups = 0) {
  if (k.head_dim % W == 0)
    f(RowReader<kType, kScaling, true>(k, scales, groups));
  else
    f(RowReader<kType, kScaling, false>(k, scales, groups));
}

// Each scale is read once, not once a vector.
template <DType kType, class F>
inline void with_scales(const KvRows& k, const F& f) {
  alignas(64) float table[kTile * (kMaxHeadDim / 8)];
  const int groups = k.head_dim >> k.group_shift;
  const int begin = k.begin / W * W, end = (k.end + W - 1) / W * W;
  for (int r = begin; r < end; ++r) {
    if (k.ahead) __builtin_prefetch(k.ahead->scales[r]);
    for (int g = 0; g < groups; ++g) table[r * groups + g] = read_scale(k, r, g);
  }
  with_tail<kType, Scaling::group>(k, f, table, groups);
}

template <class F>
inline void with_reader(const KvRows& k, const F& f) {
  if (k.grouped) return k.dtype == DType::i8 ? with_scales<DType::i8>(k, f) : with_scales<DType::i4>(k, f);
  switch (k.dtype) {
    case DType::f32: return with_tail<DType::f32, Scaling::none>(k, f);
    case DType::f16: return with_tail<DType::f16, Scaling::none>(k, f);
    case DType::bf16: return with_tail<DType::bf16, Scaling::none>(k, f);
    case DType::i8: return with_tail<DType::i8, Scaling::tensor>(k, f);
    default: return with_tail<DType::f8_e4m3, Scaling::tensor>(k, f);
  }
}

void pack_keys(const KvRows& k, float* kt) {
  with_reader(k, [&](const auto& read) {
    for (int j = k.begin / W * W; j < k.end; j += W) {
      for (int d = 0; d < k.head_dim; d += W) {
        V r[W];
        for (int i = 0; i < W; ++i) r[i] = read(j + i, d);
        transpose(r);
        int n = k.head_dim - d < W ? k.head_dim - d : W;
        if (n == W)
          for (int i = 0; i < W; ++i) store(kt + (d + i) * kTile + j, r[i]);
        else
          for (int i = 0; i < n; ++i) store(kt + (d + i) * kTile + j, r[i]);
      }
    }
  });
}

void pack_values(const KvRows& k, float* v, int stride) {
  with_reader(k, [&](const auto& read) {
    for (int j = k.begin; j < k.end; ++j) {
      for (int d = 0; d < k.head_dim; d += W) store(v + j * stride + d, read(j, d));
    }
  });
}

// ---- products -------------------------------------------------------------------------------------

struct Packed {
  const float* b;
  int stride;
  V operator()(int k, int n) const { return load(b + k * stride + n); }
};

// c[r][n..] = c * correction (or 0) + sum over k in [k0, k1) of a[r][k] * b(k, n..), in order of k.
template <int R, int C, class B>
inline void product(const float* a, int a_stride, const B& b, int k0, int k1, const float* correction, float* c,
                    int c_stride, int n) {
  V acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i)
      acc[r][i] = correction ? mul(load(c + r * c_stride + n + i * W), set1(correction[r])) : zero();
  for (int k = k0; k < k1; ++k) {
    V x[C];
    for (int i = 0; i < C; ++i) x[i] = b(k, n + i * W);
    for (int r = 0; r < R; ++r) {
      V w = set1(a[r * a_stride + k]);
      for (int i = 0; i < C; ++i) acc[r][i] = fma_v(w, x[i], acc[r][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) store(c + r * c_stride + n + i * W, acc[r][i]);
}

template <int R, class B>
inline void product_columns(const float* a, int a_stride, const B& b, int k0, int k1, const float* correction, float* c,
                            int c_stride, int n0, int n1) {
  constexpr int kWide = R <= 2 ? kFewColumns : kColumns;
  int n = n0;
  for (; n + kWide * W <= n1; n += kWide * W) product<R, kWide>(a, a_stride, b, k0, k1, correction, c, c_stride, n);
  if constexpr (kWide > 4)
    for (; n + 4 * W <= n1; n += 4 * W) product<R, 4>(a, a_stride, b, k0, k1, correction, c, c_stride, n);
  if constexpr (kWide > 2)
    for (; n + 2 * W <= n1; n += 2 * W) product<R, 2>(a, a_stride, b, k0, k1, correction, c, c_stride, n);
  for (; n < n1; n += W) product<R, 1>(a, a_stride, b, k0, k1, correction, c, c_stride, n);
}

template <class B>
inline void product_all(const float* a, int rows, int a_stride, const B& b, int k0, int k1, const float* correction,
                        float* c, int c_stride, int n0, int n1) {
  int r = 0;
  auto go = [&](auto count) {
    constexpr int R = decltype(count)::value;
    product_columns<R>(a + r * a_stride, a_stride, b, k0, k1, correction ? correction + r : nullptr, c + r * c_stride,
                       c_stride, n0, n1);
    r += R;
  };
  while (rows - r >= 6) go(Count<6>{});
  switch (rows - r) {
    case 5: return go(Count<5>{});
    case 4: return go(Count<4>{});
    case 3: return go(Count<3>{});
    case 2: return go(Count<2>{});
    case 1: return go(Count<1>{});
    default: return;
  }
}

void scores(const float* q, int rows, int q_stride, int head_dim, const float* kt, int begin, int end, float* s) {
  product_all(q, rows, q_stride, Packed{kt, kTile}, 0, head_dim, nullptr, s, kTile, begin / W * W,
              (end + W - 1) / W * W);
}

void accumulate(const float* p, int rows, const float* v, int v_stride, int begin, int end, const float* correction,
                float* o, int o_stride) {
  product_all(p, rows, kTile, Packed{v, v_stride}, begin, end, correction, o, o_stride, 0, o_stride);
}

void accumulate_rows(const float* p, int rows, const KvRows& v, const float* correction, float* o, int o_stride) {
  int n = (v.head_dim + W - 1) / W * W;
  with_reader(
      v, [&](const auto& read) { product_all(p, rows, kTile, read, v.begin, v.end, correction, o, o_stride, 0, n); });
}

// ---- softmax --------------------------------------------------------------------------------------

void softmax(float* s, int rows, const SoftmaxRow* params, float scale, float softcap, float* m, float* l,
             float* correction) {
  for (int r = 0; r < rows; ++r, s += kTile) {
    const SoftmaxRow& p = params[r];
    const bool whole = p.lo <= 0 && p.hi >= kTile;
    V top = set1(kNone);
    for (int j = 0; j < kTile; j += W) {
      V x = mul(load(s + j), set1(scale));
      if (softcap > 0) x = mul(set1(softcap), tanh_v(div_v(x, set1(softcap))));
      V at = add(iota(), set1(float(j)));
      if (p.slope != 0) x = add(x, mul(set1(p.slope), add(at, set1(p.offset))));
      if (p.mask) x = add(x, load(p.mask + j));
      if (!whole) {
        V none = set1(kNone), lo = set1(float(p.lo)), hi = set1(float(p.hi)), sinks = set1(float(p.sink_end));
        x = select_ge(at, hi, none, select_ge(at, lo, x, select_ge(at, sinks, none, x)));
      }
      store(s + j, x);
      top = max_v(top, x);
    }
    float high = reduce_max(top);
    if (high < m[r]) high = m[r];
    if (high == kNone) {  // nothing visible yet
      for (int j = 0; j < kTile; j += W) store(s + j, zero());
      correction[r] = 1.0f;
      continue;
    }
    V sum = zero();
    for (int j = 0; j < kTile; j += W) {
      V x = exp_v(sub(load(s + j), set1(high)));
      store(s + j, x);
      sum = add(sum, x);
    }
    float fix = m[r] == kNone ? 0.0f : first(exp_v(set1(m[r] - high)));
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

// ---- conversion -----------------------------------------------------------------------------------

template <DType kType>
inline void widen(const uint8_t* in, int64_t n, float* out) {
  using R = Read<kType>;
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, R::at(in + i * R::kBits / 8));
  if (i < n) {
    alignas(64) uint8_t tail[W * 4] = {};
    alignas(64) float wide[W];
    __builtin_memcpy(tail, in + i * R::kBits / 8, size_t((n - i) * R::kBits / 8));
    store(wide, R::at(tail));
    __builtin_memcpy(out + i, wide, size_t(n - i) * 4);
  }
}

void to_f32(const void* in, DType type, int64_t n, float* out) {
  const uint8_t* p = static_cast<const uint8_t*>(in);
  if (type == DType::f16) return widen<DType::f16>(p, n, out);
  if (type == DType::bf16) return widen<DType::bf16>(p, n, out);
  __builtin_memcpy(out, in, size_t(n) * 4);
}

void from_f32(const float* in, DType type, int64_t n, void* out) {
  if (type == DType::f32) {
    __builtin_memcpy(out, in, size_t(n) * 4);
    return;
  }
  uint8_t* p = static_cast<uint8_t*>(out);
  auto narrow = [&](V x, uint8_t* at) { type == DType::f16 ? store_f16(at, x) : store_bf16(at, x); };
  int64_t i = 0;
  for (; i + W <= n; i += W) narrow(load(in + i), p + 2 * i);
  if (i < n) {
    alignas(64) float wide[W] = {};
    alignas(64) uint8_t tail[W * 2];
    __builtin_memcpy(wide, in + i, size_t(n - i) * 4);
    narrow(load(wide), tail);
    __builtin_memcpy(p + 2 * i, tail, size_t(n - i) * 2);
  }
}

constexpr Kernels kTable = {
    kName, W, pack_keys, pack_values, scores, softmax, accumulate, accumulate_rows, merge, to_f32, from_f32,
};
