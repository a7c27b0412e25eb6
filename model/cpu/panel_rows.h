// What products by panels have in common: the weights of some groups are unpacked once for all rows, and a tile of rows
// goes by them at a time.
//
// Panels of integers of 16 bits: two products of a lane's output are one instruction or two. Activations are such
// integers then, in the room of their two planes: 4 inputs stand as 0, 2, 1, 3, since unpacking bytes to 16 bits takes
// every other one. Each vector of a panel has two such neighbours. `How` says of them
//   kPanelRows, whose sums are kept while the panels of some groups go by; kPanelBlocks<G> of a panel of G groups at
//     most, blocks<G>(rows) where there are so many rows; kTall<G> rows of a tile
//   add_two_products(to, weights, inputs); unpack<P>(block's integers of a part, block's scales, part, put): put(pair,
//     vector) for each pair of a block
#pragma once

#include "model/cpu/block_kernels.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

constexpr int kPairs = 16;  // of inputs, in a block
constexpr int kStep = 8;    // pairs that are one piece of code

// Groups whose turn is soon, fetched beside these ones' tiles a line or a few at a time: many at once would wait.
struct Ahead {
  const uint8_t *at, *end;
  int lines = 1;
  void fetch() {
    for (int i = 0; i < lines; ++i, at += at < end ? 64 : 0) __builtin_prefetch(at, 0, 2);
  }
  void fetch_rest() {
    for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// `count` groups from one on, that so many steps go by.
inline Ahead ahead_of(const PackedMatrix& m, int64_t group, int64_t count, int64_t steps) {
  const uint8_t* at = m.quants(group);
  const int64_t bytes = count * m.group_bytes;
  return {at, at + bytes, int((bytes / 64 + steps - 1) / steps)};
}

// What a row's sums in N vectors are while the panels of some groups go by: exact integers, or floats of blocks.
template <int N>
struct WholeSums {
  Blocks::I top[N], low[N];  // of parts of the sum: their upper halves, and all of them modulo 2^32
  void add(int n, Blocks::I sum) {
    top[n] = Blocks::add_i(top[n], Blocks::template right<16>(sum));
    low[n] = Blocks::add_i(low[n], sum);
  }
};
template <int N>
struct FloatSums {
  simd::V sum[N];
};

template <int N>
inline simd::V finish(const WholeSums<N>& sums, int n, const PackedMatrix& m, int64_t group, float d) {
  const Blocks::I top = sums.top[n], rest = Blocks::sub_i(sums.low[n], Blocks::template left<16>(top));
  const RowSum sum{Blocks::add_i(top, Blocks::template right<16>(rest)), Blocks::and_i(rest, 0xffff)};
  const float* scales = m.row_scales(group + n / kParts) + n % kParts * simd::W;
  return sum.finish(simd::mul(simd::load(scales), simd::set1(d)));
}
template <int N>
inline simd::V finish(const FloatSums<N>& sums, int n, const PackedMatrix&, int64_t, float d) {
  return simd::mul(sums.sum[n], simd::set1(d));
}

// For how many blocks, from a multiple of as many on, the sums of a row of_rows fit 32 bits whatever the weights: 2 at
// least, since weights are below 2^14 and inputs below 2^11.
inline int32_t& fit_of(const QuantRows& x, int64_t row) { return x.planes[row * x.cols / 32 * 4]; }

// As fit_of() says, from the sums of magnitudes of a row's blocks, which are lost.
inline int32_t find_fit(int32_t* sizes, int64_t blocks) {
  constexpr int32_t kMost = (1 << 17) - 1;
  int32_t fit = 1, most = 0;
  for (; blocks > 1; fit *= 2, blocks = (blocks + 1) / 2) {
    for (int64_t i = 0; i < blocks; i += 2) {
      const int32_t both = sizes[i] + (i + 1 < blocks ? sizes[i + 1] : 0);
      sizes[i / 2] = both, most = both > most ? both : most;
    }
    if (most > kMost) break;
  }
  return fit;
}

template <class How, int G>
struct Panel {
  static constexpr int N = G * kParts;
  static constexpr int64_t kBlocks = How::template kPanelBlocks<G>;
  Blocks::I w[kBlocks * kPairs][N];
  simd::V d[2 * kBlocks][N], m[2 * kBlocks][N];  // where weights are not of_rows

  template <Packing P>
  void unpack(const PackedMatrix& matrix, int64_t group, int64_t begin, int64_t end) {
    constexpr PackingInfo info = packing_info(P);
    constexpr int parts = info.halves ? 2 : 1;
    for (int g = 0; g < G; ++g) {
      ExpandBuffer<P, 1, kExpanded> buffer;
      BlockView view{};
      for (int64_t b = begin; b < end; ++b, view.quants += info.quant_bytes, view.scales += info.scale_bytes) {
        if ((b - begin) % expanded_at_once(matrix) == 0)
          view = view_blocks<P, 1, kExpanded>(matrix, group + g, b, b + kExpanded < end ? b + kExpanded : end, buffer);
        const uint8_t *q = view.quants, *s = view.scales;
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          const int n = g * kParts + part;
          How::template unpack<P>(q + 4 * simd::W * part, s, part,
                                  [&](int i, Blocks::I v) { w[kPairs * (b - begin) + i][n] = v; });
          if constexpr (!info.of_rows) {
            BlockScales<P> of;
            of.load(s, part);
            for (int h = 0; h < parts; ++h) {
              d[(b - begin) * parts + h][n] = of.d[h];
              if constexpr (info.zero == 0) m[(b - begin) * parts + h][n] = of.m[h];
            }
          }
        }
      }
    }
  }
};

// `times` times kStep pairs by T rows of activations: row t's pair i is the four bytes at q + t * stride + 4 * i.
template <class How, int T, int N>
inline void add_pairs(const Blocks::I (*w)[N], int64_t times, const int8_t* q, int64_t stride, Ahead& ahead,
                      Blocks::I (*to)[N]) {
  do {
    ahead.fetch();
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const Blocks::I v = Blocks::inputs(q + t * stride + 4 * i);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) to[t][n] = How::add_two_products(to[t][n], w[i][n], v);
      }
    w += kStep, q += 4 * kStep;
  } while (--times != 0);
}

template <int T, int N>
inline void clear(Blocks::I (*to)[N]) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) to[t][n] = Blocks::zero_i();
}

template <Packing P, int T, class How, int G, int N>
void panel_tile(const Panel<How, G>& panel, int64_t begin, int64_t end, const QuantRows& x, int64_t row, Ahead& ahead,
                WholeSums<N>* sums) {
  const int8_t* q = x.q + 2 * row * x.cols;
  int64_t fit = fit_of(x, row);
  for (int t = 1; t < T; ++t) fit = fit_of(x, row + t) < fit ? fit_of(x, row + t) : fit;
  for (int64_t b = begin; b < end;) {
    Blocks::I acc[T][N];
    clear<T>(acc);
    const int64_t full = (b | (fit - 1)) + 1, next = full < end ? full : end;
    add_pairs<How, T>(panel.w + kPairs * (b - begin), (next - b) * (kPairs / kStep), q + 64 * b, 2 * x.cols, ahead,
                      acc);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[t].add(n, acc[t][n]);
    b = next;
  }
}

template <Packing P, int T, class How, int G, int N>
void panel_tile(const Panel<How, G>& panel, int64_t begin, int64_t end, const QuantRows& x, int64_t row, Ahead& ahead,
                FloatSums<N>* sums) {
  constexpr int parts = packing_info(P).halves ? 2 : 1, pairs = kPairs / parts;
  const int8_t* q = x.q + 2 * row * x.cols;
  const int64_t all = x.cols / 32 * parts;
  const float* s = x.sums + row * all;
  for (int64_t i = begin * parts; i < end * parts; ++i) {
    Blocks::I acc[T][N];
    clear<T>(acc);
    const int64_t at = i - begin * parts;
    add_pairs<How, T>(panel.w + pairs * at, pairs / kStep, q + 4 * pairs * i, 2 * x.cols, ahead, acc);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        simd::V& sum = sums[t].sum[n];
        sum = simd::fused(panel.d[at][n], Blocks::to_float(acc[t][n]), sum);
        if constexpr (packing_info(P).zero == 0) sum = simd::fused(panel.m[at][n], simd::set1(s[t * all + i]), sum);
      }
  }
}

// Weights of_rows differ no more once they are unpacked.
template <Packing P>
constexpr Packing kTileOf = packing_info(P).of_rows ? Packing::i4_min : P;

// f.operator()<rows>(), of 1 to Most.
template <int Most, class F>
inline void with_rows(int64_t rows, const F& f) {
  if constexpr (Most == 1)
    f.template operator()<1>();
  else if (rows == Most)
    f.template operator()<Most>();
  else
    with_rows<Most - 1>(rows, f);
}

// Of G groups.
template <class How, Packing P, int G>
void panel_rows(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
                int64_t y_stride, bool add) {
  constexpr int N = G * kParts;
  constexpr int64_t kTall = How::template kTall<G>;
  using Sums = std::conditional_t<packing_info(P).of_rows, WholeSums<N>, FloatSums<N>>;
  Panel<How, G> panel;
  Sums kept[How::kPanelRows];
  const int64_t most = How::template blocks<G>(rows), panels = (m.blocks + most - 1) / most;
  const int64_t tiles = (rows + kTall - 1) / kTall, tall = rows / tiles, taller = rows % tiles;
  const int64_t later = rows > 8 ? G : 2 * G;  // few rows are done before what is fetched beside them is here
  Ahead ahead = ahead_of(m, group + later, G, tiles * m.blocks * (kPairs / kStep));
  for (int64_t i = 0; i < panels; ++i) {
    const int64_t begin = m.blocks * i / panels, end = m.blocks * (i + 1) / panels;
    panel.template unpack<P>(m, group, begin, end);
    for (int64_t tile = 0, t = 0; tile < tiles; ++tile) {
      const int64_t after = t + tall + (tile < taller ? 1 : 0);
      Sums* sums = panels == 1 ? kept : kept + t;
      if (i == 0)
        for (int64_t j = 0; j < after - t; ++j) sums[j] = Sums{};
      with_rows<kTall>(after - t,
                       [&]<int T>() { panel_tile<kTileOf<P>, T>(panel, begin, end, x, first + t, ahead, sums); });
      if (i + 1 < panels)
        t = after;
      else  // its sums are at hand, and storing goes on beside the next tile
        for (; t < after; ++t, ++sums)
          for (int n = 0; n < N; ++n)
            store_lanes(finish(*sums, n, m, group, x.d[first + t]), n % kParts, y + t * y_stride + n / kParts * kGroup,
                        m.valid(group + n / kParts), add);
    }
  }
  ahead.fetch_rest();
}

// A row as `Together` writes blocks for such panels; Together::size_of(block) is its sum of magnitudes.
template <class Together>
inline void quantize_together(const float* x, const PackingInfo& info, const QuantRows& to, int64_t row) {
  const int64_t blocks = to.cols / 32, parts = info.halves ? 2 : 1;
  int32_t* sizes = &fit_of(to, row);  // there is room for more
  quantize_to<Together>(
      x, to, row,
      [&](int64_t b) {
        int8_t* q = to.q + 2 * row * to.cols + 64 * b;
        return BlockPlace{q, q + 32, (row * blocks + b) * parts, 1};
      },
      [&](int64_t b, const BlockPlace& at, const int32_t* sums) {
        if (info.of_rows)
          sizes[b] = Together::size_of(at.high);
        else if (info.zero == 0)
          put_sums(info, at, sums, to);
      });
  if (info.of_rows) *sizes = find_fit(sizes, blocks);
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
