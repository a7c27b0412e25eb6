// Products of many rows with weights of_rows, two rows in three products (pair_digits.h).
#pragma once

#include "model/cpu/one_row_avx2.h"
#include "model/cpu/pair_digits.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

constexpr int64_t kDigitBlocks = 32;  // a panel and the rows at it stay in a first-level cache of 32 KB
constexpr int64_t kPanelRows = 256;   // whose sums are kept while the panels of a group go by
#if defined(__AVXVNNI__)
constexpr bool kVnni = true;
#else
constexpr bool kVnni = false;
#endif

// Where these are intrinsics gcc 12 adds products to one another first, and spills them and the sums.
inline Blocks::I add_of_16(Blocks::I to, Blocks::I a) {
  asm("vpaddw %1, %0, %0" : "+x"(to) : "x"(a));
  return to;
}

// A group's weights: their integers, and D and M of each block (or half).
template <Packing P>
struct DigitPanel {
  static constexpr int kHalves = packing_info(P).halves ? 2 : 1;
  Blocks::I q[kDigitBlocks][8][kParts];
  Blocks::I d[kDigitBlocks * kHalves][kParts];          // AVX-VNNI: beside M, else D in both halves of a lane
  Blocks::I m[kDigitBlocks * kHalves / 2 + 1][kParts];  // of q = 0, two neighbours in a lane

  void unpack(const PackedMatrix& matrix, int64_t group, int64_t begin, int64_t end) {
    constexpr PackingInfo info = packing_info(P);
    ExpandBuffer<P, 1, kDigitBlocks> buffer;
    const BlockView view = view_blocks<P, 1, kDigitBlocks>(matrix, group, begin, end, buffer);
    const uint8_t *quants = view.quants, *scales = view.scales;
    for (int64_t b = 0; b < end - begin; ++b, quants += info.quant_bytes, scales += info.scale_bytes)
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        const Blocks::W w = Blocks::load4(quants + 32 * part);
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) q[b][c][part] = w.c[c];
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) put_scales(kHalves * b + h, part, scales, h);
      }
  }

 private:
  void put_scales(int64_t at, int part, const uint8_t* scales, int half) {
    const Blocks::Pair pair = Blocks::load_pair<P>(scales, half, part);
    if constexpr (kVnni) {
      d[at][part] = kHalves == 1 ? pair.d : _mm256_sub_epi16(pair.d, _mm256_slli_epi32(pair.d, 19));
    } else {
      d[at][part] = pair.d;
      if (at % 2 == 0)
        m[at / 2][part] = Blocks::right<16>(pair.m);
      else
        m[at / 2][part] = _mm256_blend_epi16(m[at / 2][part], pair.m, 0xaa);
    }
  }
};

// A tile's products of one group.
template <Packing P, int C>
struct DigitTile {
  static constexpr int kHalves = packing_info(P).halves ? 2 : 1, kChunks = 8 / kHalves;
  const DigitPanel<P>& panel;
  const int8_t* q;       // the panel's first block of the tile's first row
  const int64_t stride;  // of pairs
  Blocks::I sums[C][kParts];

  const int8_t* at(int64_t block, int digit) const {
    return q + digit / kDigits * stride + block * kDigitBytes + digit % kDigits * 32;
  }
  Blocks::I value(int64_t block, int digit, int which) const {
    return Blocks::inputs(q + digit / kDigits * stride + block * kDigitBytes + kDigitSums +
                          4 * (digit % kDigits + which));
  }

  // What q = 0 stands for, times the sums of digits.
  void begin(int64_t first, int64_t end) {
#pragma GCC unroll 6
    for (int j = 0; j < C; ++j) sums[j][0] = sums[j][1] = Blocks::zero_i();
    if constexpr (!kVnni)
      for (int64_t i = first * kHalves / 2; i < (end * kHalves + 1) / 2; ++i)
#pragma GCC unroll 6
        for (int j = 0; j < C; ++j) {
          const Blocks::I v = value(i * 2 / kHalves, j, 0);
#pragma GCC unroll 2
          for (int part = 0; part < kParts; ++part)
            sums[j][part] = Blocks::add_i(sums[j][part], _mm256_madd_epi16(panel.m[i][part], v));
        }
  }

  void add(int64_t b) {
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
      Blocks::I acc[C][kParts];
#if defined(__AVXVNNI__)
      for (int j = 0; j < C; ++j) acc[j][0] = acc[j][1] = kHalves == 1 ? value(b, j, kDigits) : Blocks::zero_i();
#endif
#pragma GCC unroll 8
      for (int c = h * kChunks; c < (h + 1) * kChunks; ++c) {
        const Blocks::I w[kParts] = {panel.q[b][c][0], panel.q[b][c][1]};
#pragma GCC unroll 6
        for (int j = 0; j < C; ++j) {
          const Blocks::I v = Blocks::inputs(at(b, j) + 4 * c);
#pragma GCC unroll 2
          for (int part = 0; part < kParts; ++part) {
#if defined(__AVXVNNI__)
            asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc[j][part]) : "x"(w[part]), "x"(v));
#else
            const Blocks::I product = _mm256_maddubs_epi16(w[part], v);
            acc[j][part] = c == h * kChunks ? product : add_of_16(acc[j][part], product);
#endif
          }
        }
      }
#pragma GCC unroll 6
      for (int j = 0; j < C; ++j)
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          const Blocks::I d = panel.d[kHalves * b + h][part];
#if defined(__AVXVNNI__)
          const Blocks::I v = _mm256_blend_epi16(acc[j][part], value(b, j, h * kDigits), 0xaa);
          sums[j][part] = _mm256_dpwssd_avx_epi32(sums[j][part], v, d);
#else
          sums[j][part] = Blocks::add_i(sums[j][part], _mm256_madd_epi16(acc[j][part], d));
#endif
        }
    }
  }

  void finish(WholeSums<kParts>* rows) const {
    each_row_of<C>(sums, [&]<int t, int part>(Blocks::I sum) { rows[t].add(part, sum); });
  }
};

template <Packing P, int C>
void digit_tile(const DigitPanel<P>& panel, int64_t begin, int64_t end, const QuantRows& x, int64_t row, Ahead& ahead,
                WholeSums<kParts>* sums) {
  int64_t fit = fit_of(x, row);
  for (int t = 1; t < kTileRows<C>; ++t) fit = fit_of(x, row + t) < fit ? fit_of(x, row + t) : fit;
  DigitTile<P, C> tile{panel, x.q + 2 * row * x.cols + begin * kDigitBytes, 4 * x.cols, {}};
  for (int64_t b = begin; b < end;) {
    const int64_t full = (b | (fit - 1)) + 1, next = full < end ? full : end;
    tile.begin(b - begin, next - begin);
    for (; b < next; ++b) {
      ahead.fetch();
      tile.add(b - begin);
      ahead.fetch();
    }
    tile.finish(sums);
  }
}

template <Packing P>
void digit_rows(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
                int64_t y_stride, bool add) {
  constexpr int kTall = 4;
  DigitPanel<P> panel;
  WholeSums<kParts> kept[kPanelRows];
  const int64_t panels = (m.blocks + kDigitBlocks - 1) / kDigitBlocks;
  // Few rows are done before what is fetched beside them is here.
  const int64_t later = rows > 8 ? 1 : 2;
  Ahead ahead = ahead_of(m, group + later, 1, 2 * ((rows + kTall - 1) / kTall) * m.blocks);
  for (int64_t i = 0; i < panels; ++i) {
    auto start = [&](int64_t of) { return of == panels ? m.blocks : m.blocks * of / panels / 2 * 2; };
    const int64_t begin = start(i), end = start(i + 1);
    panel.unpack(m, group, begin, end);
    for (int64_t t = 0; t < rows;) {
      const int64_t after = t + kTall < rows ? t + kTall : rows;
      WholeSums<kParts>* sums = panels == 1 ? kept : kept + t;
      if (i == 0)
        for (int64_t j = 0; j < after - t; ++j) sums[j] = WholeSums<kParts>{};
      auto run = [&]<int C>() { digit_tile<P, C>(panel, begin, end, x, first + t, ahead, sums); };
      with_digits(after - t, run);
      if (i + 1 < panels)
        t = after;
      else  // its sums are at hand, and storing goes on beside the next tile
        for (; t < after; ++t, ++sums)
          for (int part = 0; part < kParts; ++part)
            store_lanes(finish(*sums, part, m, group, x.d[first + t]), part, y + t * y_stride, m.valid(group), add);
    }
  }
  ahead.fetch_rest();
}

void quantize_pair_row(const float* x, const PackingInfo& info, const QuantRows& to, int64_t row) {
  quantize_digits<Int16Blocks>(x, info, to, row, [&](int8_t* block, int64_t b, __m128i first, __m128i second) {
    auto* sums = reinterpret_cast<__m128i*>(block + kDigitSums);
    if (kVnni) {
      put_upper_sums(block, info.halves, first, second);
    } else if (info.halves) {
      _mm_storeu_si128(sums, _mm_blend_epi16(first, _mm_slli_epi32(second, 16), 0xaa));
    } else if (b % 2 == 0) {  // beside the next block's
      _mm_storeu_si128(sums, _mm_and_si128(_mm_add_epi32(first, second), _mm_set1_epi32(0xffff)));
    } else {
      auto* before = reinterpret_cast<__m128i*>(block - kDigitBytes + kDigitSums);
      _mm_storeu_si128(before, _mm_or_si128(_mm_loadu_si128(before), _mm_slli_epi32(_mm_add_epi32(first, second), 16)));
    }
  });
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
