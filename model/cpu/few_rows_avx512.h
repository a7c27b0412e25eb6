// Products of two to four rows with AVX-512, of weights that are integers of their row: two groups by two rows at a
// time, since reading a row for each group takes longer than multiplying it.
#pragma once

#include "model/cpu/block_kernels.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

template <Packing P, int T>
void two_groups(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t row, float* y, int64_t y_stride,
                bool add) {
  constexpr PackingInfo info = packing_info(P);
  constexpr int parts = info.halves ? 2 : 1, G = 2;
  const uint8_t *quants = m.quants(group), *scales = m.scales(group);
  const int64_t blocks = m.blocks;
  RowSum sum[T][G];
  for (auto& of_row : sum)
    for (RowSum& s : of_row) s.top = s.low = Blocks::zero_i();
  for (int64_t b = 0; b < blocks;) {
    const int64_t end = b + kCarryBlocks < blocks ? b + kCarryBlocks : blocks;
    Blocks::I high[T][G], low[T][G];
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) high[t][g] = low[t][g] = Blocks::zero_i();
    for (; b < end; ++b) {
      const uint8_t *from = quants + b * info.quant_bytes, *scale = scales + b * info.scale_bytes;
      Blocks::W w[G];
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) {
        // The same block of the groups to come: the hardware does not look beyond a page by itself.
#pragma GCC unroll 4
        for (int i = 0; i < info.quant_bytes; i += 64) __builtin_prefetch(from + (G + g) * m.group_bytes + i);
#pragma GCC unroll 2
        for (int i = 0; i < info.scale_bytes; i += 64) __builtin_prefetch(scale + (G + g) * m.group_bytes + i);
        w[g] = Blocks::load4(from + g * m.group_bytes);
      }
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) {
        const int8_t* q = x.q + 2 * (row + t) * x.cols + 64 * b;
#pragma GCC unroll 2
        for (int h = 0; h < parts; ++h) {
          const int32_t* sums = x.planes + 4 * (((row + t) * blocks + b) * parts + h);
          Blocks::I products[2][G];
#pragma GCC unroll 2
          for (int plane = 0; plane < 2; ++plane)
            products[plane][0] = products[plane][1] = _mm512_set1_epi32(sums[plane]);
#pragma GCC unroll 8
          for (int c = h * 8 / parts; c < (h + 1) * 8 / parts; ++c)
#pragma GCC unroll 2
            for (int plane = 0; plane < 2; ++plane) {
              const Blocks::I v = Blocks::inputs(q + 32 * plane + 4 * c);
#pragma GCC unroll 2
              for (int g = 0; g < G; ++g) products[plane][g] = _mm512_dpbusd_epi32(products[plane][g], w[g].c[c], v);
            }
#pragma GCC unroll 2
          for (int g = 0; g < G; ++g) {
            const Blocks::Pair pair = Blocks::load_pair<P>(scale + g * m.group_bytes, h, 0);
            high[t][g] = Blocks::scaled<info.zero != 0>(products[0][g], sums[2], pair, high[t][g]);
            low[t][g] = Blocks::scaled<info.zero != 0>(products[1][g], sums[3], pair, low[t][g]);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) sum[t][g].template add<4>(high[t][g], low[t][g]);
  }
  for (int t = 0; t < T; ++t)
    for (int g = 0; g < G; ++g) {
      const simd::V scale = simd::mul(simd::load(m.row_scales(group + g)), simd::set1(x.d[row + t]));
      store_lanes(sum[t][g].finish(scale), 0, y + t * y_stride + g * kGroup, m.valid(group + g), add);
    }
}

template <Packing P>
void few_rows_by_vectors(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first,
                         int64_t rows, float* y, int64_t y_stride, bool add) {
  for (; groups >= 2; group += 2, groups -= 2, y += 2 * kGroup)
    for (int64_t t = 0; t < rows; t += 2)
      if (t + 1 < rows)
        two_groups<P, 2>(m, group, x, first + t, y + t * y_stride, y_stride, add);
      else
        two_groups<P, 1>(m, group, x, first + t, y + t * y_stride, y_stride, add);
  if (groups == 1) integer(m, group, 1, x, first, rows, y, y_stride, add);
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
