// AMX for weights that are integers of their row, W = 256 * high + low, and more rows than one tile has: integers of
// two rows in three bytes, as pairs_avx2.h has them,
//   a = 16 * first + both, b = 15 * second + both,
// so that 32 rows take six products of tiles where four bytes would take eight. Each has sums of its own; a tile of
// weights is multiplied with three of activations before it makes room for another.
//
// A tile of 32 rows has three planes a step of 64 inputs, `first`, `second` and `both`, 64 bytes of each pair in them.
#pragma once

#include "model/cpu/amx_row_sums.h"

// NOLINTBEGIN(misc-definitions-in-headers): included by one unit, as block_kernels.h is.
namespace kvasir::model::cpu {
namespace {

constexpr int64_t kPairs = 16, kPairTileRows = 2 * kPairs;
constexpr int64_t kPlaneBytes = 64 * kPairs, kPairStepBytes = 3 * kPlaneBytes;
// 16 * first * low is what sums grow by fastest.
static_assert(kPanelSteps * 64 * (16 * 127 + 128) * 255 < int64_t(1) << 31);

// Of 32 inputs the integers of a pair's first row, half beside `first` and half beside `second`.
struct PairWords : Blocks {
  static void quantize_block(const float* x, float inverse, int8_t* first, int8_t* second) {
    const Blocks::I v = quantize_words(x, inverse);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm512_castsi512_si256(v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), _mm512_extracti64x4_epi64(v, 1));
  }
  static void plane_sums(const int8_t*, const int8_t*, int32_t*) {}
};

// In their place, and with the second row's integers, the three bytes.
inline void put_digits(int8_t* first, int8_t* second, Blocks::I b) {
  auto load = [](const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
  auto put = [](int8_t* p, Blocks::I v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(v));
  };
  const Blocks::I a = _mm512_inserti64x4(_mm512_castsi256_si512(load(first)), load(second), 1);
  // `both` is a - 16 * (a - b) less the nearest 240 * n: a little beside the nearest is as good.
  const Blocks::I off = _mm512_sub_epi16(a, b),
                  half = _mm512_sub_epi16(_mm512_srai_epi16(a, 1), _mm512_slli_epi16(off, 3)),
                  sixteenths = _mm512_mulhi_epi16(half, _mm512_set1_epi16(8738)),  // of 120: 65536 * 16 / 120
      n = _mm512_srai_epi16(_mm512_add_epi16(sixteenths, _mm512_set1_epi16(8)), 4);
  const Blocks::I of_b = _mm512_add_epi16(off, _mm512_slli_epi16(n, 4)), of_a = _mm512_sub_epi16(of_b, n);
  put(first, of_a), put(second, of_b);
  put(second + kPlaneBytes, _mm512_sub_epi16(a, _mm512_slli_epi16(of_a, 4)));
}

struct PairDigits : PairWords {
  static void quantize_block(const float* x, float inverse, int8_t* first, int8_t* second) {
    put_digits(first, second, quantize_words(x, inverse));
  }
};

void quantize_pair_row(const float* x, const QuantRows& to, int64_t row) {
  const int64_t blocks = to.cols / 32, steps = (blocks + 1) / 2;
  int8_t* pair = to.q + row / kPairTileRows * steps * kPairStepBytes + row % kPairTileRows / 2 * 64;
  auto place = [&](int64_t b) {
    int8_t* first = pair + b / 2 * kPairStepBytes + 32 * (b % 2);
    return BlockPlace{first, first + kPlaneBytes, 0, 0};
  };
  if (row % 2 == 1) {
    quantize_to<PairDigits>(x, to, row, place, [](int64_t, const BlockPlace&, const int32_t*) {});
  } else {
    const bool alone = row + 1 == to.rows;  // beside zeros, then
    quantize_to<PairWords>(x, to, row, place, [&](int64_t, const BlockPlace& at, const int32_t*) {
      if (alone) put_digits(at.high, at.low, Blocks::zero_i());
    });
  }
  if (blocks % 2 != 0)
    for (int plane = 0; plane < 3; ++plane)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(place(blocks).high + plane * kPlaneBytes), _mm256_setzero_si256());
}

// Tiles 0 to 5 are sums, 6 is activations and 7 weights.
void configure_pairs(int64_t pairs) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } c;
  for (int t = 0; t < 8; ++t) c.rows[t] = uint8_t(t < 7 ? pairs : 16);
  asm volatile("" : "+m"(c));  // gcc 12 believes that only the first eight bytes are read
  _tile_loadconfig(&c);
}

// Of a tile: what the high bytes of weights make with `first`, `second` and `both`, then what the low ones do.
struct alignas(64) PairTileSums {
  int32_t of[6][kPairs][kGroup];
  [[gnu::always_inline]] void add_to(RowSum& a, RowSum& b, int64_t pair) const {
    const Blocks::I both_high = at(2, pair), both_low = at(3, pair), second_high = at(1, pair),
                    second_low = at(4, pair);
    a.add<8>(_mm512_add_epi32(_mm512_slli_epi32(at(0, pair), 4), both_high),
             _mm512_add_epi32(_mm512_slli_epi32(at(5, pair), 4), both_low));
    b.add<8>(_mm512_add_epi32(_mm512_sub_epi32(_mm512_slli_epi32(second_high, 4), second_high), both_high),
             _mm512_add_epi32(_mm512_sub_epi32(_mm512_slli_epi32(second_low, 4), second_low), both_low));
  }

 private:
  [[gnu::always_inline]] Blocks::I at(int sum, int64_t pair) const { return _mm512_load_si512(of[sum][pair]); }
};

// gcc's tile instructions want the tile's number written out. Where sums begin those before go to `made`, if there are
// any.
#define KVASIR_PAIRS(DOT, SUM, PLANE)          \
  _tile_loadd(6, x + PLANE * kPlaneBytes, 64); \
  KVASIR_PAIRS_AGAIN(DOT, SUM)
#define KVASIR_PAIRS_AGAIN(DOT, SUM)                \
  if constexpr (Begins) {                           \
    if (made) _tile_stored(SUM, made->of[SUM], 64); \
    _tile_zero(SUM);                                \
  }                                                 \
  DOT(SUM, 6, 7);

// `between` is what else there is to do, a little after every two products.
template <bool Begins, class Between>
[[gnu::always_inline]] inline void add_pair_step(const uint8_t* x, const UnpackedStep& w,
                                                 [[maybe_unused]] PairTileSums* made, const Between& between) {
  asm volatile("" ::: "memory");  // what is loaded has been stored
  _tile_loadd(7, w.high, 64);
  KVASIR_PAIRS(_tile_dpbssd, 0, 0)
  KVASIR_PAIRS(_tile_dpbssd, 1, 1)
  between();
  KVASIR_PAIRS(_tile_dpbssd, 2, 2)
  _tile_loadd(7, w.low, 64);
  KVASIR_PAIRS_AGAIN(_tile_dpbsud, 3)
  between();
  KVASIR_PAIRS(_tile_dpbsud, 4, 1)
  KVASIR_PAIRS(_tile_dpbsud, 5, 0)
  between();
}
#undef KVASIR_PAIRS
#undef KVASIR_PAIRS_AGAIN

[[gnu::always_inline]] inline void last_pair_sums(PairTileSums& made) {
  _tile_stored(0, made.of[0], 64);
  _tile_stored(1, made.of[1], 64);
  _tile_stored(2, made.of[2], 64);
  _tile_stored(3, made.of[3], 64);
  _tile_stored(4, made.of[4], 64);
  _tile_stored(5, made.of[5], 64);
}

// Sums of 32 rows between two panels.
struct alignas(64) PairRowSums {
  int32_t top[kPairTileRows][kGroup], low[kPairTileRows][kGroup];
};

// What becomes of a tile's sums: kept for the next panel, or finished; a pair at a time, between the products of the
// next tile.
struct PairEnd {
  const PackedMatrix& m;
  int64_t group;
  const float* d;  // of the tile's first row
  float* y;
  int64_t y_stride, rows;
  bool add, first, last;
  [[gnu::always_inline]] void operator()(const PairTileSums& made, PairRowSums& between, int64_t pair) const {
    const int64_t t = 2 * pair;
    if (t >= rows) return;
    RowSum a{Blocks::zero_i(), Blocks::zero_i()}, b = a;
    if (!first) {
      a = {Blocks::load_i(between.top[t]), Blocks::load_i(between.low[t])};
      b = {Blocks::load_i(between.top[t + 1]), Blocks::load_i(between.low[t + 1])};
    }
    made.add_to(a, b, pair);
    if (last) {
      const int valid = m.valid(group);
      const simd::V scale = simd::load(m.row_scales(group));
      store_lanes(a.finish(simd::mul(scale, simd::set1(d[t]))), 0, y + t * y_stride, valid, add);
      if (t + 1 < rows)
        store_lanes(b.finish(simd::mul(scale, simd::set1(d[t + 1]))), 0, y + (t + 1) * y_stride, valid, add);
    } else {
      _mm512_store_si512(between.top[t], a.top), _mm512_store_si512(between.low[t], a.low);
      _mm512_store_si512(between.top[t + 1], b.top), _mm512_store_si512(between.low[t + 1], b.low);
    }
  }
};

// A panel of a group's weights is unpacked once for many tiles of rows.
template <Packing P>
void sum_pairs(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
               int64_t y_stride, bool add) {
  constexpr int64_t kTiles = 16;  // whose sums wait between two panels
  alignas(64) UnpackedStep panel[kPanelSteps];
  alignas(64) PairRowSums between[kTiles];
  PairTileSums made[2];
  const int64_t steps = (m.blocks + 1) / 2, panels = (steps + kPanelSteps - 1) / kPanelSteps;
  for (int64_t span = 0; span < rows; span += kTiles * kPairTileRows) {
    const int64_t n = rows - span < kTiles * kPairTileRows ? rows - span : kTiles * kPairTileRows;
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t begin = steps * p / panels, count = steps * (p + 1) / panels - begin;
      StepReader<P> reader(m, group, 2 * begin);
      for (int64_t i = 0; i < count; ++i) reader.next(panel[i]);
      auto end = [&](int64_t tile, int64_t pair) __attribute__((always_inline)) {
        const int64_t row = tile * kPairTileRows, left = n - row;
        PairEnd{m,   group,  x.d + first + span + row, y + (span + row) * y_stride, y_stride, left,
                add, p == 0, p + 1 == panels}(made[tile % 2], between[tile], pair);
      };
      auto tiles = [&](int64_t tile, int64_t stop) __attribute__((always_inline)) {
        const int64_t start = tile;
        for (; tile < stop; ++tile) {
          const uint8_t* in = reinterpret_cast<const uint8_t*>(x.q) +
                              ((first + span) / kPairTileRows + tile) * steps * kPairStepBytes + begin * kPairStepBytes;
          int64_t pair = tile > start ? 0 : kPairs;  // of the tile before
          auto end_pair = [&]() __attribute__((always_inline)) {
            if (pair < kPairs) end(tile - 1, pair++);
          };
          add_pair_step<true>(in, panel[0], tile > start ? made + (tile - 1) % 2 : nullptr, kNothing);
          for (int64_t i = 1; i < count; ++i)
            add_pair_step<false>(in + i * kPairStepBytes, panel[i], nullptr, end_pair);
          while (pair < kPairs) end_pair();
        }
        last_pair_sums(made[(stop - 1) % 2]);
        for (int64_t pair = 0; pair < kPairs; ++pair) end(stop - 1, pair);
      };
      const int64_t whole = n / kPairTileRows, pairs_left = (n % kPairTileRows + 1) / 2;
      if (whole > 0) configure_pairs(kPairs), tiles(0, whole);
      if (pairs_left > 0) configure_pairs(pairs_left), tiles(whole, whole + 1);
    }
  }
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
