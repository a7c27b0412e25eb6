// Included once by each instruction set's translation unit, after it has defined V in an unnamed
// namespace: N lanes, F (floats), I (32-bit integers) and
//   load_f, store_f, load_f16, load_bf16, set_f, fma, add, to_float
//   W: the integers of a block of 32 inputs of N rows; load4 (nibbles), load8 (bytes)
//   dot<bits>(W, x, first, count, minus128): the sum over chunks [first, first + count) of 4 inputs
// Nothing here may use a library function that another unit could share: the linker would keep one copy.
// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

constexpr int kParts = kGroup / V::N;

template <Packing P>
struct Scales {
  V::F d[2], m[2];
  void load(const uint8_t* p, int part) {
    constexpr bool wide = P != Packing::n4_zero && P != Packing::n4_min && P != Packing::n8_zero;
    constexpr int size = wide ? 4 : 2;
    constexpr int halves = packing_info(P).halves ? 2 : 1;
    for (int h = 0; h < halves; ++h) {
      const uint8_t *pd = p + (32 * h + part * V::N) * size, *pm = pd + 16 * size;
      if constexpr (wide) {
        d[h] = V::load_f(reinterpret_cast<const float*>(pd)), m[h] = V::load_f(reinterpret_cast<const float*>(pm));
      } else {
        d[h] = V::load_f16(pd);
        if constexpr (P == Packing::n4_min) m[h] = V::load_f16(pm);
        if constexpr (P == Packing::n4_zero) m[h] = V::mul(d[h], V::set_f(-8.0f));
        if constexpr (P == Packing::n8_zero) m[h] = V::mul(d[h], V::set_f(-128.0f));
      }
    }
  }
};

template <Packing P>
inline V::W load_block(const uint8_t* q, int part) {
  if constexpr (packing_info(P).quant_bytes == 256)
    return V::load4(q + part * V::N * 4);
  else
    return V::load8(q + part * V::N * 4);
}

template <Packing P, int T>
inline void integer_tile(const uint8_t* quants, const uint8_t* scales, int64_t blocks, int part, const int8_t* x,
                         int64_t x_stride, const QuantBlock* xb, V::F* sums) {
  constexpr PackingInfo info = packing_info(P);
  constexpr int bits = info.quant_bytes == 256 ? 4 : P == Packing::n8_zero ? 8 : 6;
  V::F acc[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) acc[t] = V::set_f(0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    // The same block of the next group: the hardware does not look beyond a page by itself.
    int64_t ahead = blocks * (info.quant_bytes + info.scale_bytes);
#pragma GCC unroll 8
    for (int i = 0; i < info.quant_bytes; i += 64) __builtin_prefetch(quants + b * info.quant_bytes + ahead + i);
#pragma GCC unroll 8
    for (int i = 0; i < info.scale_bytes; i += 64) __builtin_prefetch(scales + b * info.scale_bytes + ahead + i);
    V::W w = load_block<P>(quants + b * info.quant_bytes, part);
    Scales<P> s;
    s.load(scales + b * info.scale_bytes, part);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const int8_t* xt = x + 2 * (t * x_stride + 32 * b);
      const QuantBlock& k = xb[t * (x_stride / 32) + b];
      V::F d = V::set_f(k.d);
      if constexpr (info.halves) {
        acc[t] = V::fma(V::mul(s.d[0], d), V::to_float(V::template dot<bits>(w, xt, 0, 4, 0)), acc[t]);
        acc[t] = V::fma(s.m[0], V::set_f(k.sum[0]), acc[t]);
        acc[t] = V::fma(V::mul(s.d[1], d), V::to_float(V::template dot<bits>(w, xt, 4, 4, 0)), acc[t]);
        acc[t] = V::fma(s.m[1], V::set_f(k.sum[1]), acc[t]);
      } else {
        acc[t] = V::fma(V::mul(s.d[0], d), V::to_float(V::template dot<bits>(w, xt, 0, 8, k.minus128)), acc[t]);
        if constexpr (P != Packing::n8_zero) acc[t] = V::fma(s.m[0], V::set_f(k.sum[0]), acc[t]);
      }
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) sums[t] = acc[t];
}

inline void store_lanes(V::F value, int part, float* y, int valid, bool add) {
  float* p = y + part * V::N;
  int lanes = valid - part * V::N;
  if (lanes >= V::N) {
    V::store_f(p, add ? V::add(V::load_f(p), value) : value);
  } else {
    float buffer[V::N];
    V::store_f(buffer, value);
    for (int i = 0; i < lanes; ++i) p[i] = add ? p[i] + buffer[i] : buffer[i];
  }
}

template <Packing P>
void integer_rows(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
                  int64_t y_stride, int valid, bool add) {
  const uint8_t *quants = m.quants(group), *scales = m.scales(group);
  for (int64_t t = 0; t < rows;) {
    const int8_t* xt = x.q + 2 * (first + t) * x.cols;
    const QuantBlock* xb = x.blocks + (first + t) * (x.cols / 32);
    int64_t left = rows - t;
    V::F sums[16];
    int done = 1;
    for (int part = 0; part < kParts; ++part) {
      auto run = [&]<int T>() {
        integer_tile<P, T>(quants, scales, m.blocks, part, xt, x.cols, xb, sums);
        done = T;
      };
      if (V::kTile >= 16 && left >= 16)
        run.template operator()<V::kTile >= 16 ? 16 : 1>();
      else if (V::kTile >= 8 && left >= 8)
        run.template operator()<V::kTile >= 8 ? 8 : 1>();
      else if (V::kTile >= 4 && left >= 4)
        run.template operator()<V::kTile >= 4 ? 4 : 1>();
      else if (V::kTile >= 2 && left >= 2)
        run.template operator()<V::kTile >= 2 ? 2 : 1>();
      else
        run.template operator()<1>();
      for (int i = 0; i < done; ++i) store_lanes(sums[i], part, y + (t + i) * y_stride, valid, add);
    }
    t += done;
  }
}

// f.operator()<P>() for the packing of a matrix.
template <class F>
inline void with_packing(Packing packing, const F& f) {
  switch (packing) {
#define KVASIR_PACKING(P) \
  case Packing::P: return f.template operator()<Packing::P>()
    KVASIR_PACKING(n4_zero);
    KVASIR_PACKING(n4_min);
    KVASIR_PACKING(n4_wide);
    KVASIR_PACKING(n4_halves);
    KVASIR_PACKING(n8_zero);
    KVASIR_PACKING(n8_wide);
    KVASIR_PACKING(n8_halves);
    KVASIR_PACKING(f32);
    KVASIR_PACKING(f16);
    KVASIR_PACKING(bf16);
#undef KVASIR_PACKING
  }
}

void integer(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first, int64_t rows,
             float* y, int64_t y_stride, bool add) {
  with_packing(m.packing, [&]<Packing P>() {
    if constexpr (packing_info(P).quantized)
      for (int64_t g = 0; g < groups; ++g)
        integer_rows<P>(m, group + g, x, first, rows, y + g * kGroup, y_stride, m.valid(group + g), add);
  });
}

// A block of 32 inputs x 16 rows as floats.
template <Packing P>
void expand(const uint8_t* q, const uint8_t* scales, float (*w)[kGroup]) {
  if constexpr (!packing_info(P).quantized) {
    constexpr int size = P == Packing::f32 ? 4 : 2;
    for (int k = 0; k < 32; ++k)
      for (int part = 0; part < kParts; ++part) {
        const uint8_t* p = q + (16 * k + part * V::N) * size;
        V::F v = P == Packing::f32   ? V::load_f(reinterpret_cast<const float*>(p))
                 : P == Packing::f16 ? V::load_f16(p)
                                     : V::load_bf16(p);
        V::store_f(w[k] + part * V::N, v);
      }
  } else {
    constexpr bool nibbles = packing_info(P).quant_bytes == 256;
    for (int part = 0; part < kParts; ++part) {
      Scales<P> s;
      s.load(scales, part);
      for (int k = 0; k < 32; ++k) {
        int32_t values[V::N];
        for (int i = 0; i < V::N; ++i) {
          int r = part * V::N + i;
          values[i] = nibbles ? (q[64 * (k % 16 / 4) + 4 * r + k % 4] >> (k < 16 ? 0 : 4)) & 15
                              : q[64 * (k / 4) + 4 * r + k % 4];
        }
        int h = packing_info(P).halves ? k / 16 : 0;
        V::store_f(w[k] + part * V::N, V::fma(s.d[h], V::to_float(V::load_i(values)), s.m[h]));
      }
    }
  }
}

// Four running sums a block, so that a long row is not one chain of additions.
inline void float_block(const float (*w)[kGroup], const float* x, int part, float* sums) {
  V::F a[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) a[j] = V::mul(V::load_f(w[j] + part * V::N), V::set_f(x[j]));
#pragma GCC unroll 7
  for (int k = 4; k < 32; k += 4)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) a[j] = V::fma(V::load_f(w[k + j] + part * V::N), V::set_f(x[k + j]), a[j]);
  float* p = sums + part * V::N;
  V::store_f(p, V::add(V::load_f(p), V::add(V::add(a[0], a[1]), V::add(a[2], a[3]))));
}

template <Packing P>
void float_rows(const PackedMatrix& m, int64_t group, const float* x, int64_t x_stride, int64_t rows, float* y,
                int64_t y_stride, int valid, bool add) {
  constexpr int kTokens = 32;
  constexpr PackingInfo info = packing_info(P);
  alignas(64) float w[32][kGroup];
  alignas(64) float sums[kTokens][kGroup];
  for (int64_t t0 = 0; t0 < rows; t0 += kTokens) {
    int n = int(rows - t0 < kTokens ? rows - t0 : kTokens);
    for (int t = 0; t < n; ++t)
      for (int r = 0; r < kGroup; ++r) sums[t][r] = 0.0f;
    for (int64_t b = 0; b < m.blocks; ++b) {
      expand<P>(m.quants(group) + b * info.quant_bytes, m.scales(group) + b * info.scale_bytes, w);
      for (int t = 0; t < n; ++t)
        for (int part = 0; part < kParts; ++part) float_block(w, x + (t0 + t) * x_stride + 32 * b, part, sums[t]);
    }
    for (int t = 0; t < n; ++t)
      for (int part = 0; part < kParts; ++part)
        store_lanes(V::load_f(sums[t] + part * V::N), part, y + (t0 + t) * y_stride, valid, add);
  }
}

void floating(const PackedMatrix& m, int64_t group, int64_t groups, const float* x, int64_t x_stride, int64_t rows,
              float* y, int64_t y_stride, bool add) {
  with_packing(m.packing, [&]<Packing P>() {
    for (int64_t g = 0; g < groups; ++g)
      float_rows<P>(m, group + g, x, x_stride, rows, y + g * kGroup, y_stride, m.valid(group + g), add);
  });
}

inline uint32_t bits_of(float f) { return __builtin_bit_cast(uint32_t, f); }
inline float float_of(uint32_t u) { return __builtin_bit_cast(float, u); }
inline float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

void quantize(const float* x, int64_t cols, bool halves, int8_t* q, QuantBlock* blocks) {
  for (int64_t b = 0; b < cols / 32; ++b, x += 32, q += 64) {
    uint32_t most = 0;  // as integers, magnitudes compare the same and NaN is the greatest
    for (int j = 0; j < 32; ++j) {
      uint32_t a = bits_of(x[j]) & 0x7fffffffu;
      most = a > most ? a : most;
    }
    constexpr float kRange = 2039.0f;  // 16 * 127 + 7
    float max = float_of(most), d = max / kRange, inverse = max > 0.0f ? kRange / max : 0.0f;
    int32_t sums[2] = {0, 0};
    for (int h = 0; h < 2; ++h)
      for (int j = 0; j < 16; ++j) {  // adding 1.5 * 2^23 rounds half to even into the low bits
        int32_t v = int32_t(bits_of(x[16 * h + j] * inverse + 12582912.0f) - 0x4b400000u);
        int32_t high = (v + 8) >> 4, low = v - 16 * high;
        q[16 * h + j] = int8_t(high), q[32 + 16 * h + j] = int8_t(low);
        sums[h] += 16 * int32_t(int8_t(high)) + int32_t(int8_t(low));
      }
    QuantBlock& out = blocks[b];
    out.d = d;
    out.minus128 = -128 * (sums[0] + sums[1]);
    out.sum[0] = halves ? d * float(sums[0]) : d * float(sums[0] + sums[1]);
    out.sum[1] = halves ? d * float(sums[1]) : 0.0f;
  }
}

void norm(const float* x, const float* weight, int64_t cols, float eps, bool add, float* out) {
  float lanes[16] = {};
  int64_t whole = cols & ~int64_t(15);
  for (int64_t i = 0; i < whole; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] = fma1(x[i + j], x[i + j], lanes[j]);
  for (int64_t i = whole; i < cols; ++i) lanes[i - whole] = fma1(x[i], x[i], lanes[i - whole]);
  for (int step = 8; step > 0; step /= 2)
    for (int j = 0; j < step; ++j) lanes[j] += lanes[j + step];
  float scale = 1.0f / __builtin_sqrtf(lanes[0] / float(cols) + eps);
  if (add)
    for (int64_t i = 0; i < cols; ++i) out[i] = out[i] + x[i] * scale * weight[i];
  else
    for (int64_t i = 0; i < cols; ++i) out[i] = x[i] * scale * weight[i];
}

// exp to about 1 ulp for x in [-87, 88]; below, 0 within 1e-38. NaN stays NaN.
inline float exp1(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  float shifted = fma1(x, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f;
  float f = fma1(n, -0.693145752f, x);
  f = fma1(n, -1.42860677e-6f, f);
  float p = 1.98412698e-4f;
  p = fma1(p, f, 1.38888889e-3f);
  p = fma1(p, f, 8.33333333e-3f);
  p = fma1(p, f, 4.16666667e-2f);
  p = fma1(p, f, 1.66666667e-1f);
  p = fma1(p, f, 0.5f);
  p = fma1(p, f, 1.0f);
  p = fma1(p, f, 1.0f);
  return p * float_of((bits_of(shifted) - 0x4b400000u + 127u) << 23);
}

void silu(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + exp1(-gate[i])) * up[i];
}

// x * (1 + tanh(u)) / 2 == x / (1 + exp(-2u)), u = sqrt(2/pi) * (x + 0.044715 x^3)
void gelu(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    float x = gate[i], u2 = 1.59576912f * x * fma1(0.044715f * x, x, 1.0f);
    out[i] = x / (1.0f + exp1(-u2)) * up[i];
  }
}

void softmax_sums(const float* x, int64_t n, float* max, float* sum) {
  float most[16], lanes[16] = {};
  uint32_t bad[16] = {};
  for (int j = 0; j < 16; ++j) most[j] = -__builtin_inff();
  int64_t whole = n & ~int64_t(15);
  for (int64_t i = 0; i < whole; i += 16)
    for (int j = 0; j < 16; ++j) {
      float v = x[i + j];
      most[j] = v > most[j] ? v : most[j];
      bad[j] |= uint32_t((bits_of(v) & 0x7f800000u) == 0x7f800000u);
    }
  for (int64_t i = whole; i < n; ++i) {
    most[0] = x[i] > most[0] ? x[i] : most[0];
    bad[0] |= uint32_t((bits_of(x[i]) & 0x7f800000u) == 0x7f800000u);
  }
  float m = most[0];
  uint32_t any = 0;
  for (int j = 0; j < 16; ++j) m = most[j] > m ? most[j] : m, any |= bad[j];
  for (int64_t i = 0; i < whole; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] += exp1(x[i + j] - m);
  for (int64_t i = whole; i < n; ++i) lanes[i - whole] += exp1(x[i] - m);
  for (int step = 8; step > 0; step /= 2)
    for (int j = 0; j < step; ++j) lanes[j] += lanes[j + step];
  *max = m;
  *sum = any ? __builtin_nanf("") : lanes[0];
}

void exponentials(const float* x, int64_t n, float shift, float scale, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    float v = (x[i] - shift) * scale, e = exp1(v);
    out[i] = v < -87.0f ? 0.0f : e;
  }
}

template <class Own>
void quantize_row(const float* x, bool halves, const QuantRows& to, int64_t row) {
  int8_t* q = to.q + 2 * row * to.cols;
  QuantBlock* blocks = to.blocks + row * (to.cols / 32);
  if constexpr (requires { &Own::quantize; })
    Own::quantize(x, to.cols, halves, q, blocks);
  else
    quantize(x, to.cols, halves, q, blocks);
}

constexpr Kernels make_kernels(const char* name) {
  return {name, quantize_row<V>, integer, floating, norm, silu, gelu, softmax_sums, exponentials};
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
