// Products of several rows with AVX-512: the weights of up to four groups become a panel of 16-bit integers once, for
// all rows, so that two products of 16 outputs are one instruction, and what is read of a row serves four groups:
// reading it for each of them would take longer than multiplying.
#pragma once

#include "model/cpu/few_rows_avx512.h"
// After the vectors it is written for.
#include "model/cpu/panel_rows_impl.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

constexpr int kWide = 4;  // groups of a panel

// Fewer rows are not worth unpacking for.
constexpr int64_t kLeastRows = 5;

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

struct Words {
  static constexpr int64_t kPanelRows = 512;
  template <int G>
  static constexpr int64_t kPanelBlocks = 256 / G;  // a panel stays in the second-level cache
  template <int G>
  static int64_t blocks(int64_t rows) {
    return rows > 16 ? kPanelBlocks<G> : 32 / G;  // or in the first-level one, where few rows take it once or twice
  }
  template <int G>  // a tile's sums, a panel's vectors and what is read of a row are 32 registers
  static constexpr int kTall = G == 4 ? 6 : 8;

  static V::I add_two_products(V::I to, V::I a, V::I b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(to) : "v"(a), "v"(b));  // as an intrinsic gcc 12 spills what it adds to
    return to;
  }

  template <Packing P, class Put>
  static void unpack(const uint8_t* quants, const uint8_t* scales, int, const Put& put) {
    constexpr PackingInfo info = packing_info(P);
    if constexpr (info.of_rows) {
      const Line lines[2] = {load_line<P>(scales, 0), load_line<P>(scales, info.halves ? 1 : 0)};
      auto weights = [](V::I v, const Line& line) {
        return _mm512_add_epi16(_mm512_mullo_epi16(v, line.d), line.at_zero);
      };
      const V::I low = _mm512_set1_epi16(15);
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const V::I v = _mm512_loadu_si512(quants + 64 * c);
        put(2 * c, weights(_mm512_and_si512(v, low), lines[0]));
        put(2 * c + 1, weights(_mm512_and_si512(_mm512_srli_epi16(v, 8), low), lines[0]));
        put(2 * c + 8, weights(_mm512_and_si512(_mm512_srli_epi16(v, 4), low), lines[1]));
        put(2 * c + 9, weights(_mm512_srli_epi16(v, 12), lines[1]));
      }
    } else {
      const V::I zero = _mm512_set1_epi16(info.zero);
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c) {
        const V::I v = _mm512_loadu_si512(quants + 64 * c);
        put(2 * c, _mm512_sub_epi16(_mm512_and_si512(v, _mm512_set1_epi16(255)), zero));
        put(2 * c + 1, _mm512_sub_epi16(_mm512_srli_epi16(v, 8), zero));
      }
    }
  }
};

void integer_of_many(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first,
                     int64_t rows, float* y, int64_t y_stride, bool add) {
  with_packing(m.packing, [&]<Packing P>() {
    if constexpr (packing_info(P).of_rows)
      if (x.rows > 1 && x.rows < kLeastRows)
        return few_rows_by_vectors<P>(m, group, groups, x, first, rows, y, y_stride, add);
    if (x.rows < kLeastRows) return integer(m, group, groups, x, first, rows, y, y_stride, add);
    if constexpr (has_integers(P)) {
      for (int64_t t = 0; t < rows; t += Words::kPanelRows)
        for (int64_t g = 0, left = (groups + kWide - 1) / kWide; g < groups; --left) {
          auto run = [&]<int G>() {
            panel_rows<Words, P, G>(m, group + g, x, first + t,
                                    rows - t < Words::kPanelRows ? rows - t : Words::kPanelRows,
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
  static int32_t size_of(const int8_t* q) {
    const V::I twos = _mm512_madd_epi16(_mm512_abs_epi16(_mm512_loadu_si512(q)), _mm512_set1_epi16(1));
    return V::total(_mm256_add_epi32(_mm512_castsi512_si256(twos), _mm512_extracti64x4_epi64(twos, 1)));
  }
};

void quantize_for_many(const float* x, Packing packing, const QuantRows& to, int64_t row) {
  if (to.rows < kLeastRows) return quantize(x, packing, to, row);
  quantize_together<Together>(x, packing_info(packing), to, row);
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
