// Products of many rows with weights of_rows, two rows in three products: what a multiplication of bytes leaves unused
// of the activations' 12 bits in two planes is shared by both. Integers a and b of two rows are
//   a = 16 * first + both, b = 15 * second + both
// where 240 values of `both` meet each remainder of a by 16 and of b by 15 once; so first, second and both are bytes as
// long as |a| and |b| are at most 15 * 127 - 120, the range of quantize_to(). The three sums are exact modulo 2^32, and
// so are those of the rows.
//
// A pair of rows has 128 bytes a block: `first`, `second` and `both`, 32 of each, then what Digits::put_sums() puts. A
// row without another has its two planes instead of the three.
#pragma once

#include "model/cpu/one_row_avx2.h"
// After the vectors it is written for.
#include "model/cpu/panel_rows_impl.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

constexpr int kDigits = 3;
constexpr int64_t kDigitBytes = 128;  // of a pair's block
constexpr int kDigitSums = 96;        // where in them
constexpr int64_t kDigitBlocks = 32;  // a panel and the rows at it stay in a first-level cache of 32 KB
constexpr int64_t kPanelRows = 256;   // whose sums are kept while the panels of a group go by
#if defined(__AVXVNNI__)
constexpr bool kVnni = true;
#else
constexpr bool kVnni = false;
#endif

// Where these are intrinsics gcc 12 adds products to one another first, and spills them and the sums.
inline V::I add_of_16(V::I to, V::I a) {
  asm("vpaddw %1, %0, %0" : "+x"(to) : "x"(a));
  return to;
}

// A group's weights: their integers, and D and M of each block (or half).
template <Packing P>
struct DigitPanel {
  static constexpr int kHalves = packing_info(P).halves ? 2 : 1;
  V::I q[kDigitBlocks][8][kParts];
  V::I d[kDigitBlocks * kHalves][kParts];          // AVX-VNNI: beside M, else D in both halves of a lane
  V::I m[kDigitBlocks * kHalves / 2 + 1][kParts];  // of q = 0, two neighbours in a lane

  void unpack(const PackedMatrix& matrix, int64_t group, int64_t begin, int64_t end) {
    constexpr PackingInfo info = packing_info(P);
    const uint8_t *quants = matrix.quants(group) + begin * info.quant_bytes,
                  *scales = matrix.scales(group) + begin * info.scale_bytes;
    for (int64_t b = 0; b < end - begin; ++b, quants += info.quant_bytes, scales += info.scale_bytes)
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        const V::W w = V::load4(quants + 32 * part);
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) q[b][c][part] = w.c[c];
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) put_scales(kHalves * b + h, part, scales, h);
      }
  }

 private:
  void put_scales(int64_t at, int part, const uint8_t* scales, int half) {
    const V::Pair pair = V::load_pair<P>(scales, half, part);
    if constexpr (kVnni) {
      d[at][part] = kHalves == 1 ? pair.d : _mm256_sub_epi16(pair.d, _mm256_slli_epi32(pair.d, 19));
    } else {
      d[at][part] = pair.d;
      if (at % 2 == 0)
        m[at / 2][part] = V::right<16>(pair.m);
      else
        m[at / 2][part] = _mm256_blend_epi16(m[at / 2][part], pair.m, 0xaa);
    }
  }
};

// A tile's digits: those of two pairs, or one, or of one and a single row, or of a single row.
template <int C>
constexpr int kTileRows = C / kDigits * 2 + (C % kDigits != 0 ? 1 : 0);

// A tile's products of one group.
template <Packing P, int C>
struct DigitTile {
  static constexpr int kHalves = packing_info(P).halves ? 2 : 1, kChunks = 8 / kHalves;
  const DigitPanel<P>& panel;
  const int8_t* q;       // the panel's first block of the tile's first row
  const int64_t stride;  // of pairs
  V::I sums[C][kParts];

  const int8_t* at(int64_t block, int digit) const {
    return q + digit / kDigits * stride + block * kDigitBytes + digit % kDigits * 32;
  }
  V::I value(int64_t block, int digit, int which) const {
    return V::inputs(q + digit / kDigits * stride + block * kDigitBytes + kDigitSums + 4 * (digit % kDigits + which));
  }

  // What q = 0 stands for, times the sums of digits.
  void begin(int64_t first, int64_t end) {
#pragma GCC unroll 6
    for (int j = 0; j < C; ++j) sums[j][0] = sums[j][1] = V::zero_i();
    if constexpr (!kVnni)
      for (int64_t i = first * kHalves / 2; i < (end * kHalves + 1) / 2; ++i)
#pragma GCC unroll 6
        for (int j = 0; j < C; ++j) {
          const V::I v = value(i * 2 / kHalves, j, 0);
#pragma GCC unroll 2
          for (int part = 0; part < kParts; ++part)
            sums[j][part] = V::add_i(sums[j][part], _mm256_madd_epi16(panel.m[i][part], v));
        }
  }

  void add(int64_t b) {
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
      V::I acc[C][kParts];
#if defined(__AVXVNNI__)
      for (int j = 0; j < C; ++j) acc[j][0] = acc[j][1] = kHalves == 1 ? value(b, j, kDigits) : V::zero_i();
#endif
#pragma GCC unroll 8
      for (int c = h * kChunks; c < (h + 1) * kChunks; ++c) {
        const V::I w[kParts] = {panel.q[b][c][0], panel.q[b][c][1]};
#pragma GCC unroll 6
        for (int j = 0; j < C; ++j) {
          const V::I v = V::inputs(at(b, j) + 4 * c);
#pragma GCC unroll 2
          for (int part = 0; part < kParts; ++part) {
#if defined(__AVXVNNI__)
            asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc[j][part]) : "x"(w[part]), "x"(v));
#else
            const V::I product = _mm256_maddubs_epi16(w[part], v);
            acc[j][part] = c == h * kChunks ? product : add_of_16(acc[j][part], product);
#endif
          }
        }
      }
#pragma GCC unroll 6
      for (int j = 0; j < C; ++j)
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          const V::I d = panel.d[kHalves * b + h][part];
#if defined(__AVXVNNI__)
          const V::I v = _mm256_blend_epi16(acc[j][part], value(b, j, h * kDigits), 0xaa);
          sums[j][part] = _mm256_dpwssd_avx_epi32(sums[j][part], v, d);
#else
          sums[j][part] = V::add_i(sums[j][part], _mm256_madd_epi16(acc[j][part], d));
#endif
        }
    }
  }

  void finish(WholeSums<kParts>* rows) const {
#pragma GCC unroll 6
    for (int j = 0; j < C; j += kDigits, rows += 2)
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        const V::I first = V::left<4>(sums[j][part]), both = sums[j + (C - j < kDigits ? 1 : 2)][part];
        rows[0].add(part, V::add_i(first, both));
        if (C - j < kDigits) continue;
        const V::I second = sums[j + 1][part];
        rows[1].add(part, V::add_i(_mm256_sub_epi32(V::left<4>(second), second), both));
      }
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
  Ahead ahead{m.quants(group + 1), m.quants(group + 2)};
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
      switch (after - t) {
        case 1: run.template operator()<2>(); break;
        case 2: run.template operator()<3>(); break;
        case 3: run.template operator()<5>(); break;
        case 4: run.template operator()<6>(); break;
      }
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

// How quantize_to() writes a row's block, as integers of 16 bits, until its pair is made of it.
struct Wide {
  static void quantize_block(const float* x, float inverse, int8_t* to, int8_t*) {
    const V::F magic = V::set_f(12582912.0f), by = V::set_f(inverse);
    const V::I most = _mm256_set1_epi16(int16_t(kActivationRange));
#pragma GCC unroll 2
    for (int i = 0; i < 32; i += 16) {
      auto whole = [&](const float* p) {
        return _mm256_sub_epi32(_mm256_castps_si256(V::fma(V::load_f(p), by, magic)), _mm256_castps_si256(magic));
      };
      const V::I v = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole(x + i), whole(x + i + 8)), 0xd8);
      // What is no number must not reach the other row.
      const V::I kept = _mm256_max_epi16(_mm256_min_epi16(v, most), _mm256_sub_epi16(V::zero_i(), most));
      _mm256_storeu_si256(reinterpret_cast<V::I*>(to + 2 * i), kept);
    }
  }
  static void plane_sums(const int8_t*, const int8_t*, int32_t*) {}
};

// The sum of a block's magnitudes.
inline int32_t size_of(const int8_t* q) {
  auto half = [&](int i) { return _mm256_abs_epi16(_mm256_loadu_si256(reinterpret_cast<const V::I*>(q + i))); };
  const V::I twos = _mm256_madd_epi16(_mm256_add_epi16(half(0), half(32)), _mm256_set1_epi16(1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(twos), _mm256_extracti128_si256(twos, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// The digits of a pair's block in the room of its integers, or of a row alone in that of its own.
template <bool alone>
inline void make_digits(int8_t* block, int64_t b, bool halves) {
  auto bytes = [](V::I low, V::I high) { return _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8); };
  V::I digits[kDigits][2];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const V::I a = _mm256_loadu_si256(reinterpret_cast<const V::I*>(block + 32 * h));
    if constexpr (alone) {
      digits[0][h] = _mm256_srai_epi16(_mm256_add_epi16(a, _mm256_set1_epi16(8)), 4);
      digits[1][h] = _mm256_sub_epi16(a, _mm256_slli_epi16(digits[0][h], 4));
      digits[2][h] = V::zero_i();
    } else {
      // `both` is a - 16 * (a - b) less the nearest 240 * n: a little beside the nearest is as good.
      const V::I second = _mm256_loadu_si256(reinterpret_cast<const V::I*>(block + 64 + 32 * h)),
                 off = _mm256_sub_epi16(a, second),
                 half = _mm256_sub_epi16(_mm256_srai_epi16(a, 1), _mm256_slli_epi16(off, 3)),
                 sixteenths = _mm256_mulhi_epi16(half, _mm256_set1_epi16(8738)),  // of 120: 65536 * 16 / 120
          n = _mm256_srai_epi16(_mm256_add_epi16(sixteenths, _mm256_set1_epi16(8)), 4);
      digits[1][h] = _mm256_add_epi16(off, _mm256_slli_epi16(n, 4));
      digits[0][h] = _mm256_sub_epi16(digits[1][h], n);
      digits[2][h] = _mm256_sub_epi16(a, _mm256_slli_epi16(digits[0][h], 4));
    }
  }
  V::I fours[kDigits];
#pragma GCC unroll 3
  for (int j = 0; j < kDigits; ++j) {
    const V::I v = bytes(digits[j][0], digits[j][1]);
    _mm256_storeu_si256(reinterpret_cast<V::I*>(block + 32 * j), v);
    fours[j] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), v), _mm256_set1_epi16(1));
  }
  const V::I both = _mm256_hadd_epi32(_mm256_hadd_epi32(fours[0], fours[1]), _mm256_hadd_epi32(fours[2], V::zero_i()));
  const __m128i first = _mm256_castsi256_si128(both), second = _mm256_extracti128_si256(both, 1);
  auto* sums = reinterpret_cast<__m128i*>(block + kDigitSums);
  if constexpr (kVnni) {
    // In the upper half of a lane: either half's; or all of them, then -8 times them.
    const __m128i all = _mm_add_epi32(first, second);
    const __m128i one = _mm_slli_epi32(halves ? first : all, 16),
                  other =
                      halves ? _mm_slli_epi32(second, 16) : _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(all, 3));
    int32_t six[8];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(six), one);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(six + kDigits), other);
    __builtin_memcpy(sums, six, 24);
  } else if (halves) {
    _mm_storeu_si128(sums, _mm_blend_epi16(first, _mm_slli_epi32(second, 16), 0xaa));
  } else if (b % 2 == 0) {  // beside the next block's
    _mm_storeu_si128(sums, _mm_and_si128(_mm_add_epi32(first, second), _mm_set1_epi32(0xffff)));
  } else {
    auto* before = reinterpret_cast<__m128i*>(block - kDigitBytes + kDigitSums);
    _mm_storeu_si128(before, _mm_or_si128(_mm_loadu_si128(before), _mm_slli_epi32(_mm_add_epi32(first, second), 16)));
  }
}

void quantize_digits(const float* x, Packing packing, const QuantRows& to, int64_t row) {
  const bool halves = packing_info(packing).halves;
  int32_t* sizes = &fit_of(to, row);  // there is room for more
  quantize_to<Wide>(
      x, to, row,
      [&](int64_t b) {
        int8_t* q = to.q + row / 2 * 4 * to.cols + b * kDigitBytes + row % 2 * 64;
        return BlockPlace{q, q, 0, 0};
      },
      [&](int64_t b, const BlockPlace& at, const int32_t*) {
        sizes[b] = size_of(at.high);
        if (row % 2 == 1)
          make_digits<false>(at.high - 64, b, halves);
        else if (row + 1 == to.rows)
          make_digits<true>(at.high, b, halves);
      });
  *sizes = find_fit(sizes, to.cols / 32);
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
