// Products of many rows with AVX2 where blocks have scales of their own: a group's weights become panels of 16-bit
// integers once, for all rows, so that two products of 8 outputs are one multiplication and one addition of 32 bits
// (with AVX-VNNI one instruction). Weights of_rows are in pairs_avx2.h.
//
// Activations are 16-bit integers then, in the room of their two planes: 4 inputs stand as 0, 2, 1, 3, since
// unpacking bytes to 16 bits takes every other one. Each vector of a panel has two such neighbours of 8 outputs.
#pragma once

#include "model/cpu/pairs_avx2.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

constexpr int kPairs = 16;            // of inputs, in a block
constexpr int kStep = 8;              // pairs that are one piece of code
constexpr int64_t kPanelBlocks = 20;  // a panel and the rows at it stay in a first-level cache of 32 KB
#if defined(__AVXVNNI__)
constexpr int kTall = 6;  // a chain of additions takes five cycles a link, of which two may begin a cycle
#else
constexpr int kTall = 4;
#endif

// Fewer rows are not worth unpacking for.
inline int64_t least_rows(const PackingInfo& info) { return !kVnni ? 2 : info.of_rows ? 3 : 5; }

struct Panel {
  V::I w[kPanelBlocks * kPairs][kParts];
  V::F d[2 * kPanelBlocks][kParts], m[2 * kPanelBlocks][kParts];
};

// Where these are intrinsics gcc 12 adds products to one another first, and spills them and the sums.
inline V::I add_two_products(V::I to, V::I a, V::I b) {
#if defined(__AVXVNNI__)
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(to) : "x"(a), "x"(b));
#else
  asm("vpaddd %1, %0, %0" : "+x"(to) : "x"(_mm256_madd_epi16(a, b)));
#endif
  return to;
}

// Of a chunk of a part, where each pair goes: put(pair, two neighbours of 8 outputs as they are stored).
template <Packing P, class Put>
inline void each_pair(const uint8_t* quants, int c, const Put& put) {
  const V::I v = V::chunk(quants + 64 * c), zero = _mm256_set1_epi16(packing_info(P).zero);
  put(2 * c, _mm256_sub_epi16(_mm256_and_si256(v, _mm256_set1_epi16(255)), zero));
  put(2 * c + 1, _mm256_sub_epi16(_mm256_srli_epi16(v, 8), zero));
}

template <Packing P>
void unpack_panel(const PackedMatrix& m, int64_t group, int64_t begin, int64_t end, Panel& to) {
  constexpr PackingInfo info = packing_info(P);
  constexpr int parts = info.halves ? 2 : 1;
  const uint8_t *quants = m.quants(group), *scales = m.scales(group);
  for (int64_t b = begin; b < end; ++b) {
    const uint8_t *q = quants + b * info.quant_bytes, *s = scales + b * info.scale_bytes;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      V::I(*w)[kParts] = to.w + kPairs * (b - begin);
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c) each_pair<P>(q + 32 * part, c, [&](int i, V::I v) { w[i][part] = v; });
      Scales<P> of;
      of.load(s, part);
      for (int h = 0; h < parts; ++h) {
        to.d[(b - begin) * parts + h][part] = of.d[h];
        if constexpr (info.zero == 0) to.m[(b - begin) * parts + h][part] = of.m[h];
      }
    }
  }
}

// `times` times kStep pairs by T rows of activations: row t's pair i is the four bytes at q + t * stride + 4 * i.
template <int T>
inline void add_pairs(const V::I (*w)[kParts], int64_t times, const int8_t* q, int64_t stride, Ahead& ahead,
                      V::I (*to)[kParts]) {
  do {
    ahead.fetch();
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const V::I v = V::inputs(q + t * stride + 4 * i);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) to[t][part] = add_two_products(to[t][part], w[i][part], v);
      }
    w += kStep, q += 4 * kStep;
  } while (--times != 0);
}

struct FloatSums {
  V::F sum[kParts];
};

template <Packing P, int T>
void panel_tile(const Panel& panel, int64_t begin, int64_t end, const QuantRows& x, int64_t row, Ahead& ahead,
                FloatSums* sums) {
  constexpr int parts = packing_info(P).halves ? 2 : 1, pairs = kPairs / parts;
  const int8_t* q = x.q + 2 * row * x.cols;
  const int64_t all = x.cols / 32 * parts;
  const float* s = x.sums + row * all;
  for (int64_t i = begin * parts; i < end * parts; ++i) {
    V::I acc[T][kParts];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[t][0] = acc[t][1] = V::zero_i();
    const int64_t at = i - begin * parts;
    add_pairs<T>(panel.w + pairs * at, pairs / kStep, q + 4 * pairs * i, 2 * x.cols, ahead, acc);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        V::F& sum = sums[t].sum[part];
        sum = V::fma(panel.d[at][part], V::to_float(acc[t][part]), sum);
        if constexpr (packing_info(P).zero == 0) sum = V::fma(panel.m[at][part], V::set_f(s[t * all + i]), sum);
      }
  }
}

// A tile of `rows` rows, kTall at most.
template <Packing P>
inline void panel_tile(const Panel& panel, int64_t begin, int64_t end, const QuantRows& x, int64_t row, int64_t rows,
                       Ahead& ahead, FloatSums* sums) {
  auto run = [&]<int T>() { panel_tile<P, T>(panel, begin, end, x, row, ahead, sums); };
  switch (rows) {
    case 1: return run.template operator()<1>();
    case 2: return run.template operator()<2>();
    case 3: return run.template operator()<3>();
    case 4: return run.template operator()<4>();
    case 5:
      if constexpr (kTall >= 5) return run.template operator()<5>();
      break;
    case 6:
      if constexpr (kTall >= 6) return run.template operator()<6>();
      break;
  }
}

template <Packing P>
void panel_rows(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
                int64_t y_stride, bool add) {
  Panel panel;
  FloatSums kept[kPanelRows];
  const int64_t panels = (m.blocks + kPanelBlocks - 1) / kPanelBlocks;
  const int64_t tiles = (rows + kTall - 1) / kTall, tall = rows / tiles, taller = rows % tiles;
  Ahead ahead{m.quants(group + 1), m.quants(group + 2)};
  for (int64_t i = 0; i < panels; ++i) {
    const int64_t begin = m.blocks * i / panels, end = m.blocks * (i + 1) / panels;
    unpack_panel<P>(m, group, begin, end, panel);
    for (int64_t tile = 0, t = 0; tile < tiles; ++tile) {
      const int64_t after = t + tall + (tile < taller ? 1 : 0);
      FloatSums* sums = panels == 1 ? kept : kept + t;
      if (i == 0)
        for (int64_t j = 0; j < after - t; ++j) sums[j] = FloatSums{};
      panel_tile<P>(panel, begin, end, x, first + t, after - t, ahead, sums);
      if (i + 1 < panels)
        t = after;
      else  // its sums are at hand, and storing goes on beside the next tile
        for (; t < after; ++t, ++sums)
          for (int part = 0; part < kParts; ++part)
            store_lanes(V::mul(sums->sum[part], V::set_f(x.d[first + t])), part, y + t * y_stride, m.valid(group), add);
    }
  }
  ahead.fetch_rest();
}

void integer_of_many(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first,
                     int64_t rows, float* y, int64_t y_stride, bool add) {
  with_packing(m.packing, [&]<Packing P>() {
#if !defined(__AVXVNNI__)
    if constexpr (packing_info(P).of_rows && !packing_info(P).halves)
      if (rows == 1 && x.rows == 1) {
        for (int64_t g = 0; g < groups; ++g) one_row<P>(m, group + g, x, first, y + g * kGroup, add);
        return;
      }
#endif
    if (x.rows < least_rows(packing_info(P))) return integer(m, group, groups, x, first, rows, y, y_stride, add);
    if constexpr (has_integers(P)) {
      for (int64_t t = 0; t < rows; t += kPanelRows)
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t some = rows - t < kPanelRows ? rows - t : kPanelRows;
          float* to = y + t * y_stride + g * kGroup;
          if constexpr (packing_info(P).of_rows)
            digit_rows<P>(m, group + g, x, first + t, some, to, y_stride, add);
          else
            panel_rows<P>(m, group + g, x, first + t, some, to, y_stride, add);
        }
    }
  });
}

// How quantize_to() writes a block whose planes stand together as integers of 16 bits.
struct Together {
  static void quantize_block(const float* x, float inverse, int8_t* to, int8_t*) {
    const V::F magic = V::set_f(12582912.0f), by = V::set_f(inverse);
    const V::I in_order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
#pragma GCC unroll 2
    for (int i = 0; i < 32; i += 16) {
      auto whole = [&](const float* p) {
        return _mm256_sub_epi32(_mm256_castps_si256(V::fma(V::load_f(p), by, magic)), _mm256_castps_si256(magic));
      };
      V::I v = _mm256_permutevar8x32_epi32(_mm256_packs_epi32(whole(x + i), whole(x + i + 8)), in_order);
      v = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, 0xd8), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<V::I*>(to + 2 * i), v);
    }
  }
  // As if there were no high plane.
  static void plane_sums(const int8_t* both, const int8_t*, int32_t* sums) {
    auto pairs = [&](int i) {
      return _mm256_madd_epi16(_mm256_loadu_si256(reinterpret_cast<const V::I*>(both + i)), _mm256_set1_epi16(1));
    };
    const V::I fours = _mm256_hadd_epi32(pairs(0), pairs(32));
    __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    halves = _mm_hadd_epi32(halves, halves);
    sums[0] = sums[1] = 0, sums[2] = _mm_cvtsi128_si32(halves), sums[3] = _mm_extract_epi32(halves, 1);
  }
};

void quantize_for_many(const float* x, Packing packing, const QuantRows& to, int64_t row) {
  const PackingInfo info = packing_info(packing);
  if (to.rows < least_rows(info)) return quantize(x, packing, to, row);
  if (info.of_rows) return quantize_digits(x, packing, to, row);
  const int64_t blocks = to.cols / 32, parts = info.halves ? 2 : 1;
  quantize_to<Together>(
      x, to, row,
      [&](int64_t b) {
        int8_t* q = to.q + 2 * row * to.cols + 64 * b;
        return BlockPlace{q, q + 32, (row * blocks + b) * parts, 1};
      },
      [&](int64_t, const BlockPlace& at, const int32_t* sums) {
        if (info.zero == 0) put_sums(info, at, sums, to);
      });
}

constexpr Kernels panel_kernels(const char* name) {
  Kernels k = make_kernels(name);
  k.quantize = quantize_for_many;
  k.integer = integer_of_many;
  k.slow_groups = true;
  return k;
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
