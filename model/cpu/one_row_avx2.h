// The product of a single row with AVX2: both halves of a group at once, so that what is read of the row serves both.
// AVX-VNNI takes fewer instructions half by half (blocks_avx2.h).
#pragma once

#include "model/cpu/block_kernels.h"

#if !defined(__AVXVNNI__)
// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

template <Packing P>
void one_row(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t row, float* y, bool add) {
  constexpr PackingInfo info = packing_info(P);
  const Blocks::I low_bits = _mm256_set1_epi8(15);
  const int64_t ahead = Blocks::kAhead * m.group_bytes;
  const int8_t* q = x.q + 2 * row * x.cols;
  const int32_t* planes = x.planes + row * m.blocks * 4;
  RowSum sum[kParts];
  for (RowSum& s : sum) s.top = s.low = Blocks::zero_i();
  ExpandBuffer<P, 1, kCarryBlocks> buffer;
  for (int64_t b = 0; b < m.blocks;) {
    const int64_t begin = b, end = b + kCarryBlocks < m.blocks ? b + kCarryBlocks : m.blocks;
    const BlockView view = view_blocks<P, 1, kCarryBlocks>(m, group, b, end, buffer);
    const uint8_t *from = view.quants, *scale = view.scales;
    Blocks::I sums[2][kParts];  // of the high plane and the low one
    for (auto& plane : sums) plane[0] = plane[1] = Blocks::zero_i();
    for (; b < end; ++b, from += info.quant_bytes, scale += info.scale_bytes) {
      const int8_t* at = q + 64 * b;
      if (view.next)
        view.fetch(b - begin);
      else
        fetch_block(info, from + ahead, scale + ahead);
      Blocks::I products[2][kParts];
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const Blocks::I in[2][2] = {{Blocks::inputs(at + 4 * c), Blocks::inputs(at + 16 + 4 * c)},
                                    {Blocks::inputs(at + 32 + 4 * c), Blocks::inputs(at + 48 + 4 * c)}};
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          const Blocks::I v = Blocks::chunk(from + 64 * c + 32 * part), first = _mm256_and_si256(v, low_bits),
                          second = _mm256_and_si256(_mm256_srli_epi16(v, 4), low_bits);
#pragma GCC unroll 2
          for (int plane = 0; plane < 2; ++plane) {
            const Blocks::I both =
                _mm256_add_epi16(_mm256_maddubs_epi16(first, in[plane][0]), _mm256_maddubs_epi16(second, in[plane][1]));
            products[plane][part] = c == 0 ? both : _mm256_add_epi16(products[plane][part], both);
          }
        }
      }
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        const Blocks::Pair pair = Blocks::load_pair<P>(scale, 0, part);
#pragma GCC unroll 2
        for (int plane = 0; plane < 2; ++plane) {
          const Blocks::I of_inputs = _mm256_madd_epi16(_mm256_set1_epi32(planes[4 * b + 2 + plane]), pair.m);
          const Blocks::I scaled = _mm256_madd_epi16(products[plane][part], pair.d);
          sums[plane][part] = Blocks::add_i(sums[plane][part], Blocks::add_i(scaled, of_inputs));
        }
      }
    }
    for (int part = 0; part < kParts; ++part) sum[part].add<4>(sums[0][part], sums[1][part]);
  }
  for (int part = 0; part < kParts; ++part) {
    const simd::V scale = simd::mul(simd::load(m.row_scales(group) + part * simd::W), simd::set1(x.d[row]));
    store_lanes(sum[part].finish(scale), part, y, m.valid(group), add);
  }
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
#endif
