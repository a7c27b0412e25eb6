// Products with AVX-512, two rows in three planes of bytes (pair_digits.h): weights are multiplied as
// the bytes they are in the file, unpacked in passing, since that has ports of its own beside the products. Two groups
// of outputs at a time: what is read of a row serves both.
#pragma once

#include "model/cpu/pair_digits.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

constexpr int64_t kTall = 4;  // rows of a tile

// As intrinsics gcc 12 spills what they add to.
inline Blocks::I add_four_products(Blocks::I to, Blocks::I w, Blocks::I v) {
  asm("vpdpbusd %2, %1, %0" : "+v"(to) : "v"(w), "v"(v));
  return to;
}
inline Blocks::I add_two_products(Blocks::I to, Blocks::I a, Blocks::I b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(to) : "v"(a), "v"(b));
  return to;
}
// What is loaded from there is loaded again.
inline const uint8_t* anew(const uint8_t* p) {
  asm("" : "+r"(p));
  return p;
}

// What a tile of C digits reads: the sums of a block are those of digits and of what stands beside them.
template <Packing P, int C, int G>
struct PairTile {
  static constexpr PackingInfo kInfo = packing_info(P);
  static constexpr int kHalves = kInfo.halves ? 2 : 1;
  static constexpr bool kNibbles = kInfo.quant_bytes == 256;
  const BlockView view;  // blocks from begin to end
  const int64_t begin, end;
  const int64_t blocks;   // of a row
  const int8_t* const q;  // the tile's first row
  const int64_t stride;   // of pairs
  Ahead& ahead;

  const int8_t* at(int64_t b, int digit) const {
    return q + digit / kDigits * stride + b * kDigitBytes + digit % kDigits * 32;
  }
  [[gnu::always_inline]] Blocks::I value(int64_t b, int digit, int which) const {
    const int8_t* p = q + digit / kDigits * stride + b * kDigitBytes + kDigitSums + 4 * (digit % kDigits + which);
    Blocks::I out;  // as an intrinsic gcc 12 takes some by way of general registers, which costs the products' ports
    asm("vpbroadcastd %1, %0" : "=v"(out) : "m"(*reinterpret_cast<const int8_t(*)[4]>(p)));
    return out;
  }
  const uint8_t* quants(int64_t b) const { return view.quants + (b - begin) * kInfo.quant_bytes; }
  const uint8_t* scales(int64_t b, int g) const {
    return view.scales + g * view.scale_stride + (b - begin) * kInfo.scale_bytes;
  }

  // Four inputs of each of 16 outputs by those of every digit.
  [[gnu::always_inline]] void add_chunk(int64_t b, int c, const Blocks::I (&w)[G], Blocks::I (&to)[C][G]) const {
    unrolled<C>([&]<int j>() __attribute__((always_inline)) {
      const Blocks::I v = Blocks::inputs(at(b, j) + 4 * c);
      unrolled<G>([&]<int g>() __attribute__((always_inline)) { to[j][g] = add_four_products(to[j][g], w[g], v); });
    });
  }

  // A block's products, or those of a half.
  [[gnu::always_inline]] void add_block(int64_t b, int half, Blocks::I (&to)[C][G]) const {
    const uint8_t* from = quants(b);
    ahead.fetch();
    unrolled<8 / kHalves>([&]<int I>() __attribute__((always_inline)) {
      const int c = 8 / kHalves * half + I;
      if (kNibbles && c == 4) from = anew(from);  // lest the lower nibbles' loads are kept for these
      Blocks::I w[G];
      unrolled<G>([&]<int g>() __attribute__((always_inline)) {
        const Blocks::I v = _mm512_loadu_si512(from + g * view.quant_stride + 64 * (kNibbles ? c % 4 : c));
        if constexpr (kNibbles)
          w[g] = _mm512_and_si512(c < 4 ? v : _mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
        else
          w[g] = v;
      });
      add_chunk(b, c, w, to);
    });
  }

  // Integers of rows: D times a block's products and M times its inputs are one instruction.
  void sum(const QuantRows& x, int64_t row, WholeSums<G>* sums) const {
    int64_t fit = fit_of(x, row);
    for (int t = 1; t < kTileRows<C>; ++t) fit = fit_of(x, row + t) < fit ? fit_of(x, row + t) : fit;
    for (int64_t b = begin; b < end;) {
      const int64_t full = (b | (fit - 1)) + 1, next = full < end ? full : end;
      Blocks::I total[C][G];
      unrolled<C * G>([&]<int I>() __attribute__((always_inline)) { total[I / G][I % G] = Blocks::zero_i(); });
      for (; b < next; ++b)
        unrolled<kHalves>([&]<int h>() __attribute__((always_inline)) {
          Blocks::I made[C][G];
          unrolled<C * G>([&]<int I>() __attribute__((always_inline)) {
            made[I / G][I % G] = kHalves == 2 ? Blocks::zero_i()
                                 : I % G > 0  ? made[I / G][0]
                                              : value(b, I / G, kDigits);
          });
          add_block(b, h, made);
          unrolled<C * G>([&]<int I>() __attribute__((always_inline)) {
            constexpr int j = I % C, g = I / C;
            Blocks::I pair = Blocks::load_pair<P>(scales(b, g), h, 0), v = made[j][g];
            if (kHalves == 2) pair = _mm512_sub_epi16(pair, _mm512_slli_epi32(pair, 19));
            if constexpr (kInfo.zero == 0)
              v = _mm512_ternarylogic_epi32(v, _mm512_set1_epi32(0xffff), value(b, j, h * kDigits), 0xea);
            total[j][g] = add_two_products(total[j][g], v, pair);
          });
        });
      each_row_of<C>(total, [&]<int t, int g>(Blocks::I sum) { sums[t].add(g, sum); });
    }
  }

  // Blocks that have scales of their own.
  void sum(const QuantRows& x, int64_t row, FloatSums<G>* sums) const {
    const float* of_inputs = x.sums + row * blocks * kHalves;
    simd::V total[kTileRows<C>][G];
#pragma GCC unroll 4
    for (int t = 0; t < kTileRows<C>; ++t)
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) total[t][g] = sums[t].sum[g];
    for (int64_t b = begin; b < end; ++b)
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) {
        Blocks::I made[C][G];
#pragma GCC unroll 6
        for (int j = 0; j < C; ++j)
#pragma GCC unroll 2
          for (int g = 0; g < G; ++g) made[j][g] = kInfo.zero != 0 ? value(b, j, 0) : Blocks::zero_i();
        add_block(b, h, made);
        BlockScales<P> of[G];
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) of[g].load(scales(b, g), 0);
        each_row_of<C>(made, [&]<int t, int g>(Blocks::I sum) {
          total[t][g] = simd::fused(of[g].d[h], Blocks::to_float(sum), total[t][g]);
          if constexpr (kInfo.zero == 0)
            total[t][g] = simd::fused(of[g].m[h], simd::set1(of_inputs[(t * blocks + b) * kHalves + h]), total[t][g]);
        });
      }
#pragma GCC unroll 4
    for (int t = 0; t < kTileRows<C>; ++t)
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) sums[t].sum[g] = total[t][g];
  }
};

// Rows whose sums are kept while stored blocks are expanded.
constexpr int64_t kKept = 128;

template <Packing P, int G>
void pair_rows(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
               int64_t y_stride, bool add) {
  using Sums = std::conditional_t<packing_info(P).of_rows, WholeSums<G>, FloatSums<G>>;
  Ahead ahead = ahead_of(m, group + G, G, (rows + kTall - 1) / kTall * m.blocks);
  ExpandBuffer<P, G, kExpanded> buffer;
  Sums sums[kKept];
  const int64_t most = expanded_at_once(m), kept = m.narrow() ? kKept : kTall;
  for (int64_t span = 0; span < rows; span += kept) {
    const int64_t after = span + kept < rows ? span + kept : rows;
    for (int64_t i = 0; i < after - span; ++i) sums[i] = Sums{};
    for (int64_t begin = 0; begin < m.blocks; begin += most) {
      const int64_t end = begin + most < m.blocks ? begin + most : m.blocks;
      const BlockView view =
          view_blocks<P, G, kExpanded>(m, group, begin, end, buffer, rows <= 2 * kTall ? Blocks::kAhead : 0);
      for (int64_t t = span; t < after; t += kTall)
        with_digits(after - t < kTall ? after - t : kTall, [&]<int C>() {
          const PairTile<P, C, G> tile{view, begin, end, m.blocks, x.q + 2 * (first + t) * x.cols, 4 * x.cols, ahead};
          tile.sum(x, first + t, sums + (t - span));
        });
    }
    for (int64_t t = span; t < after; ++t)
      for (int g = 0; g < G; ++g)
        store_lanes(finish(sums[t - span], g, m, group, x.d[first + t]), 0, y + t * y_stride + g * kGroup,
                    m.valid(group + g), add);
  }
  ahead.fetch_rest();
}

// A row alone, which is multiplied as it is read.
bool is_plain(const PackingInfo&, const QuantRows& x) { return x.rows == 1; }

void integer_of_many(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first,
                     int64_t rows, float* y, int64_t y_stride, bool add) {
  with_packing(m.packing, [&]<Packing P>() {
    if (is_plain(packing_info(P), x)) return integer(m, group, groups, x, first, rows, y, y_stride, add);
    if constexpr (has_integers(P)) {
      for (; groups >= 2; group += 2, groups -= 2, y += 2 * kGroup)
        pair_rows<P, 2>(m, group, x, first, rows, y, y_stride, add);
      if (groups == 1) pair_rows<P, 1>(m, group, x, first, rows, y, y_stride, add);
    }
  });
}

struct WidePairs : Int16Blocks {
  static float magnitude(const float* x, int64_t cols) { return Blocks::magnitude(x, cols); }
};

void quantize_for_many(const float* x, Packing packing, const QuantRows& to, int64_t row) {
  const PackingInfo info = packing_info(packing);
  if (is_plain(info, to)) return quantize(x, packing, to, row);
  quantize_digits<WidePairs>(x, info, to, row, [&](int8_t* block, int64_t, __m128i first, __m128i second) {
    if (info.of_rows)
      put_upper_sums(block, info.halves, first, second);
    else  // what the integer that stands for 0 adds to their products
      _mm_storeu_si128(reinterpret_cast<__m128i*>(block + kDigitSums),
                       _mm_mullo_epi32(_mm_add_epi32(first, second), _mm_set1_epi32(-info.zero)));
  });
}

constexpr Kernels pair_kernels(const char* name) {
  Kernels k = make_kernels(name);
  k.quantize = quantize_for_many;
  k.integer = integer_of_many;
  return k;
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
