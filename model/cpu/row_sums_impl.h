// Products of weights that are integers of their row: one exact sum a row, in whatever order. Part of kernels_impl.h.
// V has for it
//   Pair: D and M of a block (or half) of N rows; load_pair<P>(block's scales, half, part)
//   add_products(W, x, first, count, sums, pair, high, low): adds to `high` what chunks [first, first + count) of the
//     activations' high plane make with the weights, and to `low` what those of the low plane do
//   add_i, and_i, left<n>, right<n> of I

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

// An exact sum of products is 65536 * top + low, which never overflows; low is below 65536 when it is finished.
struct RowSum {
  V::I top, low;
  // Adds unit * 2^Shift * a + b, where unit * 2^Shift is at most 2^16.
  template <int Shift>
  void add(V::I a, V::I b) {
    low = V::add_i(low, V::add_i(V::template left<Shift>(V::and_i(a, (1 << (16 - Shift)) - 1)), b));
    top = V::add_i(top, V::add_i(V::template right<16 - Shift>(a), V::template right<16>(low)));
    low = V::and_i(low, 0xffff);
  }
  V::F finish(V::F scale) const {
    return V::mul(V::fma(V::to_float(top), V::set_f(65536.0f), V::to_float(low)), scale);
  }
};

// A block of a group to come: the hardware does not look beyond a page by itself.
[[gnu::always_inline]] inline void fetch_block(const PackingInfo& info, const uint8_t* quants, const uint8_t* scales) {
#pragma GCC unroll 8
  for (int i = 0; i < info.quant_bytes; i += 64) __builtin_prefetch(quants + i, 0, V::kLocality);
#pragma GCC unroll 8
  for (int i = 0; i < info.scale_bytes; i += 64) __builtin_prefetch(scales + i, 0, V::kLocality);
}

// A block's products with the high plane are below 2^26.
constexpr int64_t kCarryBlocks = 16;

template <Packing P, int T>
inline void sum_tile(const PackedMatrix& m, int64_t group, int part, const QuantRows& x, int64_t row, V::F* sums) {
  constexpr PackingInfo info = packing_info(P);
  constexpr int parts = info.halves ? 2 : 1;
  const uint8_t *quants = m.quants(group), *scales = m.scales(group);
  const int64_t blocks = m.blocks;
  const int8_t* q = x.q + 2 * row * x.cols;
  const int32_t* planes = x.planes + row * blocks * parts * 4;
  V::I high[T], low[T];
  RowSum sum[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) sum[t].top = sum[t].low = high[t] = low[t] = V::zero_i();
  for (int64_t begin = 0; begin < blocks; begin += kCarryBlocks) {
    const int64_t end = begin + kCarryBlocks < blocks ? begin + kCarryBlocks : blocks;
    for (int64_t b = begin; b < end; ++b) {
      fetch_block(info, quants + b * info.quant_bytes + V::kAhead * m.group_bytes,
                  scales + b * info.scale_bytes + V::kAhead * m.group_bytes);
      const V::W w = V::load4(quants + b * info.quant_bytes + part * V::N * 4);
#pragma GCC unroll 2
      for (int h = 0; h < parts; ++h) {
        const V::Pair pair = V::template load_pair<P>(scales + b * info.scale_bytes, h, part);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t)
          V::template add_products<info.zero != 0>(w, q + 2 * (t * x.cols + 32 * b), h * 8 / parts, 8 / parts,
                                                   planes + 4 * ((t * blocks + b) * parts + h), pair, high[t], low[t]);
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) sum[t].template add<4>(high[t], low[t]), high[t] = low[t] = V::zero_i();
  }
  const V::F scale = V::load_f(m.row_scales(group) + part * V::N);
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) sums[t] = sum[t].finish(V::mul(scale, V::set_f(x.d[row + t])));
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
