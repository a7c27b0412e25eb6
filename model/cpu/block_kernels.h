// Products of weights by tiles of rows, written once over Blocks: the table that an instruction set without more of its
// own has.
#pragma once

#include <type_traits>

#include "model/cpu/delta_kernels.h"
#include "model/cpu/expand.h"
#include "model/cpu/low_rank.h"
#include "model/cpu/quantize_rows.h"
#include "model/cpu/row_kernels.h"
#include "model/cpu/row_sums.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

template <Packing P>
struct BlockScales {
  simd::V d[2], m[2];
  void load(const uint8_t* p, int part) {
    constexpr bool wide = !packing_info(P).f16_scales();
    constexpr int size = wide ? 4 : 2;
    constexpr int halves = packing_info(P).halves ? 2 : 1, zero = packing_info(P).zero;
    for (int h = 0; h < halves; ++h) {
      const uint8_t *pd = p + (32 * h + part * simd::W) * size, *pm = pd + 16 * size;
      if constexpr (wide) {
        d[h] = simd::load(reinterpret_cast<const float*>(pd));
        if constexpr (zero == 0) m[h] = simd::load(reinterpret_cast<const float*>(pm));
      } else {
        d[h] = simd::load_f16(pd);
        if constexpr (zero == 0) m[h] = simd::load_f16(pm);
      }
      if constexpr (zero != 0) m[h] = simd::mul(d[h], simd::set1(-float(zero)));
    }
  }
};

template <Packing P>
inline Blocks::W load_block(const uint8_t* q, int part) {
  if constexpr (packing_info(P).quant_bytes == 256)
    return Blocks::load4(q + part * simd::W * 4);
  else
    return Blocks::load8(q + part * simd::W * 4);
}

// What a block adds to a row's sum: its products with the row's integers at x, less what stands for 0, or with minima
// times the sums of its halves or of all.
template <Packing P>
[[gnu::always_inline]] inline simd::V add_block(const Blocks::W& w, const BlockScales<P>& s, const int8_t* x,
                                                const float* sums, const int32_t* offset, simd::V acc) {
  constexpr PackingInfo info = packing_info(P);
  constexpr int bits = info.zero == 128 ? 8 : 6, parts = info.halves ? 2 : 1, count = 8 / parts;
#pragma GCC unroll 2
  for (int h = 0; h < parts; ++h) {
    const int32_t less = info.zero != 0 ? *offset : 0;
    acc =
        simd::fused(s.d[h], Blocks::to_float(Blocks::template dot<bits, info.zero>(w, x, h * count, count, less)), acc);
    if constexpr (info.zero == 0) acc = simd::fused(s.m[h], simd::set1(sums[h]), acc);
  }
  return acc;
}

// What a row's products with a vector of outputs are while blocks go by.
struct BlockSum {
  simd::V sum = simd::set1(0.0f);
};

// Adds what blocks [begin, end) make, which lie there, to rows' sums.
template <Packing P, int T>
inline void integer_tile(const PackedMatrix& m, const BlockView& view, int part, const QuantRows& x, int64_t row,
                         int64_t begin, int64_t end, BlockSum* sums) {
  constexpr PackingInfo info = packing_info(P);
  const uint8_t *quants = view.quants, *scales = view.scales;
  const int64_t blocks = m.blocks, ahead = Blocks::kAhead * m.group_bytes;
  constexpr int parts = info.halves ? 2 : 1;
  const int8_t* q = x.q + 2 * row * x.cols;
  const float* s_at = x.sums + row * blocks * parts;
  const int32_t* offset_at = x.offsets + row * blocks;
  simd::V acc[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) acc[t] = sums[t].sum;
  for (int64_t b = begin; b < end; ++b, quants += info.quant_bytes, scales += info.scale_bytes) {
    if (view.next)
      view.fetch(b - begin);
    else
      fetch_block(info, quants + ahead, scales + ahead);
    Blocks::W w = load_block<P>(quants, part);
    BlockScales<P> s;
    s.load(scales, part);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const int64_t at = t * blocks + b;
      acc[t] = add_block<P>(w, s, q + 2 * (t * x.cols + 32 * b), s_at + at * parts, offset_at + at, acc[t]);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) sums[t].sum = acc[t];
}

inline void store_lanes(simd::V value, int part, float* y, int valid, bool add) {
  float* p = y + part * simd::W;
  int lanes = valid - part * simd::W;
  if (lanes >= simd::W) {
    simd::store(p, add ? simd::add(simd::load(p), value) : value);
  } else {
    float buffer[simd::W];
    simd::store(buffer, value);
    for (int i = 0; i < lanes; ++i) p[i] = add ? p[i] + buffer[i] : buffer[i];
  }
}

template <Stored S, int c = 0, class W>
[[gnu::always_inline]] inline void make_block(const uint8_t* from, W& w) {
  chunk_of<S, c>(from, &w.c[c], &w.c[c + 4]);
  if constexpr (c < 3) make_block<S, c + 1>(from, w);
}

// One row by a group of narrow rows, which is read only once: the same sums without a buffer between.
template <Stored S, Packing P>
[[gnu::noinline]] void narrow_row(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t row, float* y,
                                  bool add) {
  constexpr StoredInfo info = stored_info(S);
  constexpr int parts = info.halves ? 2 : 1;
  const uint8_t *from = m.quants(group), *scale = from + info.scales_at(m.blocks),
                *super_at = from + info.supers_at(m.blocks);
  const int64_t ahead = Blocks::kAhead * m.group_bytes;
  const int8_t* q = x.q + 2 * row * x.cols;
  const float* sums = x.sums + row * m.blocks * parts;
  const int32_t* offsets = x.offsets + row * m.blocks;
  simd::V acc[kParts];
  SuperScales super[kParts];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    acc[part] = simd::zero();
    if constexpr (info.scaling == StoredScales::e4m3)
      super[part].factor = simd::load(m.row_scales(group) + part * simd::W);
  }
  for (int64_t begin = 0; begin < m.blocks; begin += kSuper, super_at += info.super_bytes()) {
    const int64_t end = begin + kSuper < m.blocks ? begin + kSuper : m.blocks;
    if constexpr (info.super_bytes() > 0) {
      __builtin_prefetch(super_at + ahead, 0, Blocks::kLocality);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) super[part].template load<S>(super_at, part);
    }
    for (int64_t b = begin; b < end; ++b, from += info.quant_bytes(), scale += info.scale_bytes()) {
#pragma GCC unroll 6
      for (int i = 0; i < info.quant_bytes(); i += 64) __builtin_prefetch(from + ahead + i, 0, Blocks::kLocality);
      __builtin_prefetch(scale + ahead, 0, Blocks::kLocality);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        Blocks::W w;
        make_block<S>(from + 4 * simd::W * part, w);
        BlockScales<P> s;
#pragma GCC unroll 2
        for (int h = 0; h < parts; ++h) scales_of<S>(scale, h, part, super[part], &s.d[h], &s.m[h]);
        acc[part] = add_block<P>(w, s, q + 64 * b, sums + b * parts, offsets + b, acc[part]);
      }
    }
  }
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part)
    store_lanes(simd::mul(acc[part], simd::set1(x.d[row])), part, y, m.valid(group), add);
}

// T rows by a group.
template <Packing P, int T>
inline void integer_rows_of(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t row, float* y,
                            int64_t y_stride, int valid, bool add) {
  constexpr bool of_rows = packing_info(P).of_rows;
  std::conditional_t<of_rows, ExactSum, BlockSum> sums[kParts][T];
  ExpandBuffer<P, 1, kExpanded> buffer;
  for (int64_t begin = 0; begin < m.blocks;) {
    const int64_t end = begin + expanded_at_once(m) < m.blocks ? begin + expanded_at_once(m) : m.blocks;
    const BlockView view = view_blocks<P, 1, kExpanded>(m, group, begin, end, buffer);
    for (int part = 0; part < kParts; ++part)
      if constexpr (of_rows)
        sum_tile<P, T>(m, view, part, x, row, begin, end, sums[part]);
      else
        integer_tile<P, T>(m, view, part, x, row, begin, end, sums[part]);
    begin = end;
  }
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const simd::V d = simd::set1(x.d[row + t]);
      simd::V value;
      if constexpr (of_rows)
        value = sums[part][t].sum.finish(simd::mul(simd::load(m.row_scales(group) + part * simd::W), d));
      else
        value = simd::mul(sums[part][t].sum, d);
      store_lanes(value, part, y + t * y_stride, valid, add);
    }
}

template <Packing P>
void integer_rows(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
                  int64_t y_stride, int valid, bool add) {
  constexpr int most = Blocks::kTile >= 16 && packing_info(P).of_rows ? 8 : Blocks::kTile;
  if constexpr (Blocks::kMakesBlocks && kMayBeStored<P> && !packing_info(P).of_rows)
    if (m.narrow() && rows == 1)
      return with_stored(m.stored, [&]<Stored S>() {
        if constexpr (stored_info(S).form == P) narrow_row<S, P>(m, group, x, first, y, add);
      });
  for (int64_t t = 0; t < rows;) {
    const int64_t left = rows - t;
    auto run = [&]<int T>() {
      integer_rows_of<P, T>(m, group, x, first + t, y + t * y_stride, y_stride, valid, add);
      t += T;
    };
    if (most >= 16 && left >= 16)
      run.template operator()<most >= 16 ? 16 : 1>();
    else if (most >= 8 && left >= 8)
      run.template operator()<most >= 8 ? 8 : 1>();
    else if (most >= 4 && left >= 4)
      run.template operator()<most >= 4 ? 4 : 1>();
    else if (most >= 2 && left >= 2)
      run.template operator()<most >= 2 ? 2 : 1>();
    else
      run.template operator()<1>();
  }
}

// Exact packings of 4 bits are only ever multiplied as floats, and integers of rows never.
constexpr bool has_integers(Packing p) {
  return packing_info(p).of_rows || (packing_info(p).quantized && packing_info(p).quant_bytes == 512);
}

// f.operator()<P>() for the packing of a matrix.
template <class F>
inline void with_packing(Packing packing, const F& f) {
  switch (packing) {
#define KVASIR_PACKING(P) \
  case Packing::P: return f.template operator()<Packing::P>()
    KVASIR_PACKING(i4_zero);
    KVASIR_PACKING(i4_min);
    KVASIR_PACKING(i4_halves);
    KVASIR_PACKING(n4_zero);
    KVASIR_PACKING(n4_min);
    KVASIR_PACKING(n4_wide);
    KVASIR_PACKING(n8_zero);
    KVASIR_PACKING(n8_float);
    KVASIR_PACKING(n8_wide);
    KVASIR_PACKING(n8_halves);
    KVASIR_PACKING(f32);
    KVASIR_PACKING(f16);
    KVASIR_PACKING(bf16);
    KVASIR_PACKING(f8);
#undef KVASIR_PACKING
  }
}

void integer(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first, int64_t rows,
             float* y, int64_t y_stride, bool add) {
  with_packing(m.packing, [&]<Packing P>() {
    if constexpr (has_integers(P))
      for (int64_t g = 0; g < groups; ++g)
        integer_rows<P>(m, group + g, x, first, rows, y + g * kGroup, y_stride, m.valid(group + g), add);
  });
}

// Two inputs of a dense block x 16 rows; of E4M3 without their scales.
template <Packing P>
inline void load_two(const uint8_t* q, int k, simd::V* first, simd::V* second) {
  if constexpr (P == Packing::f8) {
    Blocks::two_e4m3(q + 16 * k, first, second);
  } else {
    constexpr int size = P == Packing::f32 ? 4 : 2;
    auto load = [](const uint8_t* p) {
      if constexpr (P == Packing::f32)
        return simd::load(reinterpret_cast<const float*>(p));
      else if constexpr (P == Packing::f16)
        return simd::load_f16(p);
      else
        return simd::load_bf16(p);
    };
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      first[part] = load(q + (16 * k + part * simd::W) * size);
      second[part] = load(q + (16 * (k + 1) + part * simd::W) * size);
    }
  }
}

// A block of 32 inputs x 16 rows as floats.
template <Packing P>
void expand(const uint8_t* q, const uint8_t* scales, float (*w)[kGroup]) {
  if constexpr (!packing_info(P).quantized) {
#pragma GCC unroll 4
    for (int k = 0; k < 32; k += 2) {
      simd::V first[kParts], second[kParts];
      load_two<P>(q, k, first, second);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        simd::store(w[k] + part * simd::W, first[part]);
        simd::store(w[k + 1] + part * simd::W, second[part]);
      }
    }
  } else {
    constexpr bool nibbles = packing_info(P).quant_bytes == 256;
    for (int part = 0; part < kParts; ++part) {
      BlockScales<P> s;
      s.load(scales, part);
      for (int k = 0; k < 32; ++k) {
        int32_t values[simd::W];
        for (int i = 0; i < simd::W; ++i) {
          int r = part * simd::W + i;
          values[i] = nibbles ? (q[64 * (k % 16 / 4) + 4 * r + k % 4] >> (k < 16 ? 0 : 4)) & 15
                              : q[64 * (k / 4) + 4 * r + k % 4];
        }
        int h = packing_info(P).halves ? k / 16 : 0;
        simd::store(w[k] + part * simd::W, simd::fused(s.d[h], Blocks::to_float(Blocks::load_i(values)), s.m[h]));
      }
    }
  }
}

// Four running sums a block, so that a long row is not one chain of additions; times its scales, where it has some.
inline void float_block(const float (*w)[kGroup], const float* scales, const float* x, int part, float* sums) {
  simd::V a[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) a[j] = simd::mul(simd::load(w[j] + part * simd::W), simd::set1(x[j]));
#pragma GCC unroll 7
  for (int k = 4; k < 32; k += 4)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) a[j] = simd::fused(simd::load(w[k + j] + part * simd::W), simd::set1(x[k + j]), a[j]);
  float* p = sums + part * simd::W;
  const simd::V sum = simd::add(simd::add(a[0], a[1]), simd::add(a[2], a[3]));
  simd::store(
      p, scales ? simd::fused(simd::load(scales + part * simd::W), sum, simd::load(p)) : simd::add(simd::load(p), sum));
}

// The same of a single row and a dense group, whose weights are used as they come.
template <Packing P>
void float_row(const PackedMatrix& m, int64_t group, const float* x, float* y, int valid, bool add) {
  constexpr int bytes = packing_info(P).quant_bytes;
  const uint8_t* q = m.quants(group);
  simd::V sums[kParts];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) sums[part] = simd::zero();
  for (int64_t b = 0; b < m.blocks; ++b, q += bytes, x += 32) {
#pragma GCC unroll 8
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(q + m.group_bytes + i, 0, Blocks::kLocality);
    simd::V a[4][kParts];
#pragma GCC unroll 16
    for (int k = 0; k < 32; k += 2) {
      simd::V w[2][kParts];
      load_two<P>(q, k, w[0], w[1]);
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const simd::V in = simd::set1(x[k + j]);
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          simd::V& sum = a[(k + j) % 4][part];
          sum = k < 4 ? simd::mul(w[j][part], in) : simd::fused(w[j][part], in, sum);
        }
      }
    }
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const simd::V sum = simd::add(simd::add(a[0][part], a[1][part]), simd::add(a[2][part], a[3][part]));
      if constexpr (P == Packing::f8)
        sums[part] = simd::fused(simd::load(m.span_scales(group, b) + part * simd::W), sum, sums[part]);
      else
        sums[part] = simd::add(sums[part], sum);
    }
  }
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) store_lanes(sums[part], part, y, valid, add);
}

template <Packing P>
void float_rows(const PackedMatrix& m, int64_t group, const float* x, int64_t x_stride, int64_t rows, float* y,
                int64_t y_stride, int valid, bool add) {
  constexpr int kTokens = 32;
  constexpr PackingInfo info = packing_info(P);
  alignas(64) float w[32][kGroup];
  alignas(64) float sums[kTokens][kGroup];
  ExpandBuffer<P, 1, kExpanded> buffer;
  for (int64_t t0 = 0; t0 < rows; t0 += kTokens) {
    int n = int(rows - t0 < kTokens ? rows - t0 : kTokens);
    for (int t = 0; t < n; ++t)
      for (int r = 0; r < kGroup; ++r) sums[t][r] = 0.0f;
    BlockView view{};
    for (int64_t b = 0; b < m.blocks; ++b, view.quants += info.quant_bytes, view.scales += info.scale_bytes) {
      if (b % expanded_at_once(m) == 0)
        view = view_blocks<P, 1, kExpanded>(m, group, b, b + kExpanded < m.blocks ? b + kExpanded : m.blocks, buffer);
      expand<P>(view.quants, view.scales, w);
      const float* scales = P == Packing::f8 ? m.span_scales(group, b) : nullptr;
      for (int t = 0; t < n; ++t)
        for (int part = 0; part < kParts; ++part)
          float_block(w, scales, x + (t0 + t) * x_stride + 32 * b, part, sums[t]);
    }
    for (int t = 0; t < n; ++t)
      for (int part = 0; part < kParts; ++part)
        store_lanes(simd::load(sums[t] + part * simd::W), part, y + (t0 + t) * y_stride, valid, add);
  }
}

void floating(const PackedMatrix& m, int64_t group, int64_t groups, const float* x, int64_t x_stride, int64_t rows,
              float* y, int64_t y_stride, bool add) {
  with_packing(m.packing, [&]<Packing P>() {
    if constexpr (!packing_info(P).of_rows)
      for (int64_t g = 0; g < groups; ++g, y += kGroup) {
        if constexpr (!packing_info(P).quantized)
          if (rows == 1) {
            float_row<P>(m, group + g, x, y, m.valid(group + g), add);
            continue;
          }
        float_rows<P>(m, group + g, x, x_stride, rows, y, y_stride, m.valid(group + g), add);
      }
  });
}

constexpr Kernels make_kernels(const char* name) {
  return {name,      quantize, integer,  floating,         norm,         silu,     gelu,
          greatest,  find,     at_least, exponential_sums, exponentials, low_rank, short_convolution,
          delta_rule};
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
