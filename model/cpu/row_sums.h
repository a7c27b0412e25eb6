// Products of weights that are integers of their row: one exact sum a row, in whatever order.
// Blocks has for it
//   Pair: D and M of a block (or half) of N rows; load_pair<P>(block's scales, half, part)
//   add_products(W, x, first, count, sums, pair, high, low): adds to `high` what chunks [first, first + count) of the
//     activations' high plane make with the weights, and to `low` what those of the low plane do
//   add_i, and_i, left<n>, right<n> of I
#pragma once

#include "model/cpu/blocks.h"
#include "model/cpu/expand.h"
#include "model/cpu/row_kernels.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

// An exact sum of products is 65536 * top + low, which never overflows; low is below 65536 when it is finished.
struct RowSum {
  Blocks::I top, low;
  // Adds unit * 2^Shift * a + b, where unit * 2^Shift is at most 2^16.
  template <int Shift>
  void add(Blocks::I a, Blocks::I b) {
    low = Blocks::add_i(low, Blocks::add_i(Blocks::template left<Shift>(Blocks::and_i(a, (1 << (16 - Shift)) - 1)), b));
    top = Blocks::add_i(top, Blocks::add_i(Blocks::template right<16 - Shift>(a), Blocks::template right<16>(low)));
    low = Blocks::and_i(low, 0xffff);
  }
  simd::V finish(simd::V scale) const {
    return simd::mul(simd::fused(Blocks::to_float(top), simd::set1(65536.0f), Blocks::to_float(low)), scale);
  }
};

// A block of a group to come: the hardware does not look beyond a page by itself.
[[gnu::always_inline]] inline void fetch_block(const PackingInfo& info, const uint8_t* quants, const uint8_t* scales) {
#pragma GCC unroll 8
  for (int i = 0; i < info.quant_bytes; i += 64) __builtin_prefetch(quants + i, 0, Blocks::kLocality);
#pragma GCC unroll 8
  for (int i = 0; i < info.scale_bytes; i += 64) __builtin_prefetch(scales + i, 0, Blocks::kLocality);
}

// A block's products with the high plane are below 2^26.
constexpr int64_t kCarryBlocks = 16;

struct ExactSum {
  RowSum sum{Blocks::zero_i(), Blocks::zero_i()};
};

// Adds what blocks [first, last) make, which lie there.
template <Packing P, int T>
inline void sum_tile(const PackedMatrix& m, const BlockView& view, int part, const QuantRows& x, int64_t row,
                     int64_t first, int64_t last, ExactSum* sums) {
  constexpr PackingInfo info = packing_info(P);
  constexpr int parts = info.halves ? 2 : 1;
  const int64_t blocks = m.blocks, ahead = Blocks::kAhead * m.group_bytes;
  const uint8_t *quants = view.quants, *scales = view.scales;
  const int8_t* q = x.q + 2 * row * x.cols;
  const int32_t* planes = x.planes + row * blocks * parts * 4;
  Blocks::I high[T], low[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) high[t] = low[t] = Blocks::zero_i();
  for (int64_t begin = first; begin < last; begin += kCarryBlocks) {
    const int64_t end = begin + kCarryBlocks < last ? begin + kCarryBlocks : last;
    for (int64_t b = begin; b < end; ++b, quants += info.quant_bytes, scales += info.scale_bytes) {
      if (view.next)
        view.fetch(b - first);
      else
        fetch_block(info, quants + ahead, scales + ahead);
      const Blocks::W w = Blocks::load4(quants + part * simd::W * 4);
#pragma GCC unroll 2
      for (int h = 0; h < parts; ++h) {
        const Blocks::Pair pair = Blocks::template load_pair<P>(scales, h, part);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t)
          Blocks::template add_products<info.zero != 0>(w, q + 2 * (t * x.cols + 32 * b), h * 8 / parts, 8 / parts,
                                                        planes + 4 * ((t * blocks + b) * parts + h), pair, high[t],
                                                        low[t]);
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) sums[t].sum.template add<4>(high[t], low[t]), high[t] = low[t] = Blocks::zero_i();
  }
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
