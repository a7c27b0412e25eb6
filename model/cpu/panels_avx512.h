// Products of several rows with AVX-512: the weights of up to four groups become a panel of 16-bit integers once, for
// all rows, so that two products of 16 outputs are one instruction, and what is read of a row serves four groups:
// reading it for each of them would take longer than multiplying.
//
// Activations are 16-bit integers then, in the room of their two planes: 4 inputs stand as 0, 2, 1, 3, since
// unpacking bytes to 16 bits takes every other one. Each vector of a panel has two such neighbours of 16 outputs.
#pragma once

#include "model/cpu/few_rows_avx512.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

constexpr int kPairs = 16;             // of inputs, in a block
constexpr int kStep = 8;               // pairs that are one piece of code
constexpr int kWide = 4;               // groups of a panel
constexpr int64_t kPanelBlocks = 256;  // of all its groups: a panel stays in the second-level cache
constexpr int64_t kFewBlocks = 32;     // while few rows take it once or twice, in the first-level one
constexpr int64_t kPanelRows = 512;    // whose sums are kept while the panels of some groups go by

// Rows of a tile of so many groups: their sums, a panel's vectors and what is read of a row are 32 registers.
constexpr int tall_of(int groups) { return groups == 4 ? 6 : 8; }

// Fewer rows are not worth unpacking for.
constexpr int64_t kLeastRows = 5;

template <int G>
struct Panel {
  V::I w[kPanelBlocks / G * kPairs][G];
  V::F d[2 * kPanelBlocks / G][G], m[2 * kPanelBlocks / G][G];  // where weights are not of_rows
};

inline V::I add_two_products(V::I to, V::I a, V::I b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(to) : "v"(a), "v"(b));  // as an intrinsic gcc 12 spills what it adds to
  return to;
}

// Of a chunk, where each pair goes: put(pair, two neighbours as they are stored).
template <Packing P, class Put>
inline void each_pair(const uint8_t* from, int c, const Put& put) {
  const V::I v = _mm512_loadu_si512(from + 64 * c);
  if constexpr (packing_info(P).quant_bytes == 256) {
    const V::I low = _mm512_set1_epi16(15);
    put(2 * c, _mm512_and_si512(v, low));
    put(2 * c + 1, _mm512_and_si512(_mm512_srli_epi16(v, 8), low));
    put(2 * c + 8, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
    put(2 * c + 9, _mm512_srli_epi16(v, 12));
  } else {
    const V::I zero = _mm512_set1_epi16(packing_info(P).zero);
    put(2 * c, _mm512_sub_epi16(_mm512_and_si512(v, _mm512_set1_epi16(255)), zero));
    put(2 * c + 1, _mm512_sub_epi16(_mm512_srli_epi16(v, 8), zero));
  }
}

// D in both halves of a lane, and so what q = 0 stands for.
struct Line {
  V::I d, at_zero;
};
template <Packing P>
inline Line load_line(const uint8_t* scales, int half) {
  const V::I pair = V::load_pair<P>(scales, half, 0);
  V::I d, m = V::zero_i();
  if constexpr (packing_info(P).zero != 0) {
    d = _mm512_or_si512(pair, _mm512_slli_epi32(pair, 16));
  } else {
    d = _mm512_mask_blend_epi16(0xaaaaaaaau, pair, _mm512_slli_epi32(pair, 16));
    m = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(pair, 16), pair);
  }
  return {d, _mm512_sub_epi16(m, _mm512_slli_epi16(d, 3))};
}

template <Packing P, int G>
void unpack_panel(const PackedMatrix& m, int64_t group, int64_t begin, int64_t end, Panel<G>& to) {
  constexpr PackingInfo info = packing_info(P);
  constexpr int parts = info.halves ? 2 : 1;
  for (int g = 0; g < G; ++g) {
    const uint8_t *quants = m.quants(group + g), *scales = m.scales(group + g);
    for (int64_t b = begin; b < end; ++b) {
      const uint8_t *q = quants + b * info.quant_bytes, *s = scales + b * info.scale_bytes;
      V::I(*w)[G] = to.w + kPairs * (b - begin);
      if constexpr (info.of_rows) {
        const Line lines[2] = {load_line<P>(s, 0), load_line<P>(s, parts - 1)};
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
          each_pair<P>(q, c, [&](int i, V::I v) {
            const Line& line = lines[i >= kPairs / 2];
            w[i][g] = _mm512_add_epi16(_mm512_mullo_epi16(v, line.d), line.at_zero);
          });
      } else {
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) each_pair<P>(q, c, [&](int i, V::I v) { w[i][g] = v; });
        Scales<P> of;
        of.load(s, 0);
        for (int h = 0; h < parts; ++h) {
          to.d[(b - begin) * parts + h][g] = of.d[h];
          if constexpr (info.zero == 0) to.m[(b - begin) * parts + h][g] = of.m[h];
        }
      }
    }
  }
}

// The groups to be unpacked after these ones' tiles, fetched beside them a few lines at a time: many at once would
// wait.
struct Ahead {
  const uint8_t *at, *end;
  int lines;
  void fetch() {
    for (int i = 0; i < lines; ++i, at += at < end ? 64 : 0) __builtin_prefetch(at, 0, 2);
  }
  void fetch_rest() {
    for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// `times` times kStep pairs by T rows of activations: row t's pair i is the four bytes at q + t * stride + 4 * i.
template <int G, int T>
inline void add_pairs(const V::I (*w)[G], int64_t times, const int8_t* q, int64_t stride, Ahead& ahead, V::I (*to)[G]) {
  do {
    ahead.fetch();
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const V::I v = V::inputs(q + t * stride + 4 * i);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) to[t][g] = add_two_products(to[t][g], w[i][g], v);
      }
    w += kStep, q += 4 * kStep;
  } while (--times != 0);
}

// What a row's sums are while the panels of some groups go by: exact integers, or floats of blocks.
template <int G>
struct WholeSums {
  V::I top[G], low[G];  // of parts of the sum: their upper halves, and all of them modulo 2^32
};
template <int G>
struct FloatSums {
  V::F sum[G];
};

// For how many blocks, from a multiple of as many on, the sums of a row of_rows fit 32 bits whatever the weights.
inline int32_t& fit_of(const QuantRows& x, int64_t row) { return x.planes[row * x.cols / 32 * 4]; }

template <Packing P, int G, int T>
void panel_tile(const Panel<G>& panel, int64_t begin, int64_t end, const QuantRows& x, int64_t row, Ahead& ahead,
                WholeSums<G>* sums) {
  const int8_t* q = x.q + 2 * row * x.cols;
  int64_t fit = fit_of(x, row);
  for (int t = 1; t < T; ++t) fit = fit_of(x, row + t) < fit ? fit_of(x, row + t) : fit;
  for (int64_t b = begin; b < end;) {
    V::I acc[T][G];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[t][g] = V::zero_i();
    const int64_t full = (b | (fit - 1)) + 1, next = full < end ? full : end;
    add_pairs<G, T>(panel.w + kPairs * (b - begin), (next - b) * (kPairs / kStep), q + 64 * b, 2 * x.cols, ahead, acc);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        sums[t].top[g] = V::add_i(sums[t].top[g], V::right<16>(acc[t][g]));
        sums[t].low[g] = V::add_i(sums[t].low[g], acc[t][g]);
      }
    b = next;
  }
}

template <Packing P, int G, int T>
void panel_tile(const Panel<G>& panel, int64_t begin, int64_t end, const QuantRows& x, int64_t row, Ahead& ahead,
                FloatSums<G>* sums) {
  constexpr int parts = packing_info(P).halves ? 2 : 1, pairs = kPairs / parts;
  const int8_t* q = x.q + 2 * row * x.cols;
  const int64_t all = x.cols / 32 * parts;
  const float* s = x.sums + row * all;
  for (int64_t i = begin * parts; i < end * parts; ++i) {
    V::I acc[T][G];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[t][g] = V::zero_i();
    const int64_t at = i - begin * parts;
    add_pairs<G, T>(panel.w + pairs * at, pairs / kStep, q + 4 * pairs * i, 2 * x.cols, ahead, acc);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        V::F& sum = sums[t].sum[g];
        sum = V::fma(panel.d[at][g], V::to_float(acc[t][g]), sum);
        if constexpr (packing_info(P).zero == 0) sum = V::fma(panel.m[at][g], V::set_f(s[t * all + i]), sum);
      }
  }
}

template <int G>
inline V::F finish(const WholeSums<G>& sums, int g, const PackedMatrix& m, int64_t group, float d) {
  const V::I top = sums.top[g], rest = _mm512_sub_epi32(sums.low[g], V::left<16>(top));
  const RowSum sum{V::add_i(top, V::right<16>(rest)), V::and_i(rest, 0xffff)};
  return sum.finish(V::mul(V::load_f(m.row_scales(group)), V::set_f(d)));
}
template <int G>
inline V::F finish(const FloatSums<G>& sums, int g, const PackedMatrix&, int64_t, float d) {
  return V::mul(sums.sum[g], V::set_f(d));
}

// Weights of_rows differ no more once they are unpacked.
template <Packing P>
constexpr Packing kTileOf = packing_info(P).of_rows ? Packing::i4_min : P;

// A tile of `rows` rows, tall_of(G) at most.
template <Packing P, int G, class Sums>
inline void panel_tile(const Panel<G>& panel, int64_t begin, int64_t end, const QuantRows& x, int64_t row, int64_t rows,
                       Ahead& ahead, Sums* sums) {
  auto run = [&]<int T>() { panel_tile<kTileOf<P>, G, T>(panel, begin, end, x, row, ahead, sums); };
  switch (rows) {
    case 1: return run.template operator()<1>();
    case 2: return run.template operator()<2>();
    case 3: return run.template operator()<3>();
    case 4: return run.template operator()<4>();
    case 5: return run.template operator()<5>();
    case 6: return run.template operator()<6>();
    case 7:
      if constexpr (tall_of(G) >= 7) return run.template operator()<7>();
      break;
    case 8:
      if constexpr (tall_of(G) >= 8) return run.template operator()<8>();
      break;
  }
}

template <Packing P, int G, class Sums>
void panel_rows(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
                int64_t y_stride, bool add) {
  Panel<G> panel;
  Sums kept[kPanelRows];
  const int64_t most = rows > 16 ? kPanelBlocks : kFewBlocks, panels = (m.blocks * G + most - 1) / most;
  const int64_t tiles = (rows + tall_of(G) - 1) / tall_of(G), tall = rows / tiles, taller = rows % tiles;
  const int64_t lines = G * m.group_bytes / 64, steps = tiles * m.blocks * (kPairs / kStep);
  Ahead ahead{m.quants(group + G), m.quants(group + 2 * G), int((lines + steps - 1) / steps)};
  for (int64_t i = 0; i < panels; ++i) {
    const int64_t begin = m.blocks * i / panels, end = m.blocks * (i + 1) / panels;
    unpack_panel<P, G>(m, group, begin, end, panel);
    for (int64_t tile = 0, t = 0; tile < tiles; ++tile) {
      const int64_t after = t + tall + (tile < taller ? 1 : 0);
      Sums* sums = panels == 1 ? kept : kept + t;
      if (i == 0)
        for (int64_t j = 0; j < after - t; ++j) sums[j] = Sums{};
      panel_tile<P, G>(panel, begin, end, x, first + t, after - t, ahead, sums);
      if (i + 1 < panels)
        t = after;
      else  // its sums are at hand, and storing goes on beside the next tile
        for (; t < after; ++t, ++sums)
          for (int g = 0; g < G; ++g)
            store_lanes(finish(*sums, g, m, group + g, x.d[first + t]), 0, y + t * y_stride + g * kGroup,
                        m.valid(group + g), add);
    }
  }
  ahead.fetch_rest();
}

void integer_of_many(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first,
                     int64_t rows, float* y, int64_t y_stride, bool add) {
  with_packing(m.packing, [&]<Packing P>() {
    if constexpr (packing_info(P).of_rows)
      if (x.rows > 1 && x.rows < kLeastRows) return few_rows<P>(m, group, groups, x, first, rows, y, y_stride, add);
    if (x.rows < kLeastRows) return integer(m, group, groups, x, first, rows, y, y_stride, add);
    if constexpr (has_integers(P)) {
      for (int64_t t = 0; t < rows; t += kPanelRows)
        for (int64_t g = 0, left = (groups + kWide - 1) / kWide; g < groups; --left) {
          auto run = [&]<int G>() {
            using Sums = std::conditional_t<packing_info(P).of_rows, WholeSums<G>, FloatSums<G>>;
            panel_rows<P, G, Sums>(m, group + g, x, first + t, rows - t < kPanelRows ? rows - t : kPanelRows,
                                   y + t * y_stride + g * kGroup, y_stride, add);
            g += G;
          };
          switch ((groups - g + left - 1) / left) {  // panels of nearly one width
            case 1: run.template operator()<1>(); break;
            case 2: run.template operator()<2>(); break;
            case 3: run.template operator()<3>(); break;
            default: run.template operator()<4>(); break;
          }
        }
    }
  });
}

// How quantize_to() writes a block whose planes stand together as integers of 16 bits.
struct Together {
  static float magnitude(const float* x, int64_t cols) { return V::magnitude(x, cols); }
  static void quantize_block(const float* x, float inverse, int8_t* to, int8_t*) {
    const V::I v = V::quantize_words(x, inverse);
    _mm512_storeu_si512(to, _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(v, 0xd8), 0xd8));
  }
  // As if there were no high plane.
  static void plane_sums(const int8_t* both, const int8_t*, int32_t* sums) {
    const V::I twos = _mm512_madd_epi16(_mm512_loadu_si512(both), _mm512_set1_epi16(1));
    sums[0] = sums[1] = 0;
    sums[2] = V::total(_mm512_castsi512_si256(twos)), sums[3] = V::total(_mm512_extracti64x4_epi64(twos, 1));
  }
};

// The sum of a block's magnitudes.
inline int32_t size_of(const int8_t* q) {
  const V::I twos = _mm512_madd_epi16(_mm512_abs_epi16(_mm512_loadu_si512(q)), _mm512_set1_epi16(1));
  return V::total(_mm256_add_epi32(_mm512_castsi512_si256(twos), _mm512_extracti64x4_epi64(twos, 1)));
}

// As fit_of() says, from the sizes of a row's blocks, which are lost: weights are below 2^14, so that 64 inputs below
// 2^11 always fit.
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

void quantize_for_many(const float* x, Packing packing, const QuantRows& to, int64_t row) {
  const PackingInfo info = packing_info(packing);
  if (to.rows < kLeastRows) return quantize(x, packing, to, row);
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
          sizes[b] = size_of(at.high);
        else if (info.zero == 0)
          put_sums(info, at, sums, to);
      });
  if (info.of_rows) *sizes = find_fit(sizes, blocks);
}

constexpr Kernels panel_kernels(const char* name) {
  Kernels k = make_kernels(name);
  k.quantize = quantize_for_many;
  k.integer = integer_of_many;
  return k;
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
