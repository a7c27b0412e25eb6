// Products of many rows with AVX2 where blocks have scales of their own: a group's weights become panels of 16-bit
// integers once, for all rows, so that two products of 8 outputs are one multiplication and one addition of 32 bits
// (with AVX-VNNI one instruction). Weights of_rows are in pairs_avx2.h.
#pragma once

#include "model/cpu/pairs_avx2.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

// Fewer rows are not worth unpacking for.
inline int64_t least_rows(const PackingInfo& info) { return !kVnni ? 2 : info.of_rows ? 3 : 5; }

struct WordPanels {
  static constexpr int64_t kPanelRows = cpu::kPanelRows;
  template <int G>
  static constexpr int64_t kPanelBlocks = 20;  // a panel and the rows at it stay in a first-level cache of 32 KB
  template <int G>
  static int64_t blocks(int64_t) {
    return kPanelBlocks<G>;
  }
  template <int G>  // a chain of VNNI's additions takes five cycles a link, of which two may begin a cycle
  static constexpr int kTall = kVnni ? 6 : 4;

  // Where these are intrinsics gcc 12 adds products to one another first, and spills them and the sums.
  static Blocks::I add_two_products(Blocks::I to, Blocks::I a, Blocks::I b) {
#if defined(__AVXVNNI__)
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(to) : "x"(a), "x"(b));
#else
    asm("vpaddd %1, %0, %0" : "+x"(to) : "x"(_mm256_madd_epi16(a, b)));
#endif
    return to;
  }

  template <Packing P, class Put>
  static void unpack(const uint8_t* quants, const uint8_t*, int, const Put& put) {
    const Blocks::I zero = _mm256_set1_epi16(packing_info(P).zero);
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      const Blocks::I v = Blocks::chunk(quants + 64 * c);
      put(2 * c, _mm256_sub_epi16(_mm256_and_si256(v, _mm256_set1_epi16(255)), zero));
      put(2 * c + 1, _mm256_sub_epi16(_mm256_srli_epi16(v, 8), zero));
    }
  }
};

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
            panel_rows<WordPanels, P, 1>(m, group + g, x, first + t, some, to, y_stride, add);
        }
    }
  });
}

// How quantize_to() writes a block whose planes stand together as integers of 16 bits.
struct Together {
  static void quantize_block(const float* x, float inverse, int8_t* to, int8_t*) {
    const simd::V magic = simd::set1(12582912.0f), by = simd::set1(inverse);
    const Blocks::I in_order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
#pragma GCC unroll 2
    for (int i = 0; i < 32; i += 16) {
      auto whole = [&](const float* p) {
        return _mm256_sub_epi32(_mm256_castps_si256(simd::fused(simd::load(p), by, magic)), _mm256_castps_si256(magic));
      };
      Blocks::I v = _mm256_permutevar8x32_epi32(_mm256_packs_epi32(whole(x + i), whole(x + i + 8)), in_order);
      v = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, 0xd8), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<Blocks::I*>(to + 2 * i), v);
    }
  }
  // As if there were no high plane.
  static void plane_sums(const int8_t* both, const int8_t*, int32_t* sums) {
    auto pairs = [&](int i) {
      return _mm256_madd_epi16(_mm256_loadu_si256(reinterpret_cast<const Blocks::I*>(both + i)), _mm256_set1_epi16(1));
    };
    const Blocks::I fours = _mm256_hadd_epi32(pairs(0), pairs(32));
    __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    halves = _mm_hadd_epi32(halves, halves);
    sums[0] = sums[1] = 0, sums[2] = _mm_cvtsi128_si32(halves), sums[3] = _mm_extract_epi32(halves, 1);
  }
  static int32_t size_of(const int8_t* q) { return cpu::size_of(q); }
};

void quantize_for_many(const float* x, Packing packing, const QuantRows& to, int64_t row) {
  const PackingInfo info = packing_info(packing);
  if (to.rows < least_rows(info)) return quantize(x, packing, to, row);
  if (info.of_rows) return quantize_pair_row(x, info, to, row);
  quantize_together<Together>(x, info, to, row);
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
