// AMX for weights that are integers of their row: W and the activations are two bytes each, 256 * high + low, whose
// four products of tiles go to three sums, of 65536, 256 and 1 times, over as many inputs as 32 bits hold. Nothing is
// stored or scaled between blocks: what a tile's product takes is the product itself (64 cycles for 16 by 16 by 64),
// and with few rows the unpacking.
#pragma once

#include "model/cpu/block_kernels.h"

// NOLINTBEGIN(misc-definitions-in-headers): included by one unit, as block_kernels.h is.
namespace kvasir::model::cpu {
namespace {

constexpr int kTileRows = 16;
// 64 inputs, two blocks, are a step: a tile of high bytes and one of low ones, of weights and of activations each.
constexpr int64_t kStepBytes = 2048;
// Steps whose panel of weights (2 KB each) stays in the first-level cache while tiles of rows pass by.
constexpr int64_t kPanelSteps = 12;
// Where one tile of rows is all there is: steps unpacked ahead of the one that is multiplied.
constexpr int64_t kStepsAhead = 3, kStepRing = 4;

struct alignas(64) UnpackedStep {
  uint8_t high[16][64], low[16][64];
};

// D and M of 16 rows in both halves of their lanes.
template <Packing P>
struct WidePair {
  __m512i d, m;
  WidePair(const uint8_t* scales, int half) {
    const __m512i pair = Blocks::load_pair<P>(scales, half, 0);
    // Bytes 0 and 1 of each lane twice; bytes 2 and 3.
    d = _mm512_shuffle_epi8(pair, _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100));
    m = packing_info(P).zero != 0
            ? _mm512_setzero_si512()
            : _mm512_shuffle_epi8(pair, _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302));
    m = _mm512_sub_epi16(m, _mm512_slli_epi16(d, 3));  // as of q = 0
  }
  __m512i weights(__m512i q) const { return _mm512_add_epi16(_mm512_mullo_epi16(q, d), m); }
};

// Four inputs of 16 rows: `even` has the first and third as words, `odd` the second and fourth.
[[gnu::always_inline]] inline void put_words(uint8_t* high, uint8_t* low, __m512i even, __m512i odd) {
  const __m512i bytes = _mm512_set1_epi16(0xff);
  _mm512_store_si512(low, _mm512_ternarylogic_epi32(even, bytes, _mm512_slli_epi16(odd, 8), 0xea));   // (a & b) | c
  _mm512_store_si512(high, _mm512_ternarylogic_epi32(odd, bytes, _mm512_srli_epi16(even, 8), 0xba));  // (a & ~b) | c
}

// Block `half` of a step.
template <Packing P>
[[gnu::always_inline]] inline void unpack_weights(const uint8_t* quants, const uint8_t* scales, int half,
                                                  UnpackedStep& to) {
  const __m512i low = _mm512_set1_epi16(15);
  const WidePair<P> first(scales, 0), second = packing_info(P).halves ? WidePair<P>(scales, 1) : first;
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i v = _mm512_loadu_si512(quants + 64 * c);
    const int at = 8 * half + c;
    put_words(to.high[at], to.low[at], first.weights(_mm512_and_si512(v, low)),
              first.weights(_mm512_and_si512(_mm512_srli_epi16(v, 8), low)));
    put_words(to.high[at + 4], to.low[at + 4], second.weights(_mm512_and_si512(_mm512_srli_epi16(v, 4), low)),
              second.weights(_mm512_srli_epi16(v, 12)));
  }
}

// The next step's weights, of groups that follow each other.
template <Packing P>
struct StepReader {
  static constexpr PackingInfo kInfo = packing_info(P);
  static constexpr int64_t kFetchBytes = 8192;
  StepReader(const PackedMatrix& m, int64_t group, int64_t block)
      : blocks(m.blocks),
        group_bytes(m.group_bytes),
        ahead((kFetchBytes / group_bytes + 1) * group_bytes),
        group_at(m.quants(group)) {
    seek(block);
  }
  void seek(int64_t block) {
    b = block, quants = group_at + b * kInfo.quant_bytes;
    scales = group_at + blocks * kInfo.quant_bytes + b * kInfo.scale_bytes;
  }
  [[gnu::always_inline]] void next(UnpackedStep& to) {
    block(0, to);
    rest(to);
  }
  [[gnu::always_inline]] void rest(UnpackedStep& to) {
    if (b < blocks) block(1, to);  // else what is there meets activations of 0
    if (b == blocks) group_at += group_bytes, seek(0);
  }
  [[gnu::always_inline]] void block(int half, UnpackedStep& to) {
#pragma GCC unroll 8
    for (int i = 0; i < kInfo.quant_bytes; i += 64) __builtin_prefetch(quants + ahead + i, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < kInfo.scale_bytes; i += 64) __builtin_prefetch(scales + ahead + i, 0, 2);
    unpack_weights<P>(quants, scales, half, to);
    quants += kInfo.quant_bytes, scales += kInfo.scale_bytes, ++b;
  }
  int64_t blocks, group_bytes, ahead, b = 0;
  const uint8_t *group_at, *quants = nullptr, *scales = nullptr;
};

// Sums of 16 rows by 16 outputs.
struct alignas(64) TileSums {
  int32_t high[kTileRows][kGroup], cross[kTileRows][kGroup], low[kTileRows][kGroup];
  [[gnu::always_inline]] void add_to(RowSum& sum, int64_t t) const {
    sum.add<8>(_mm512_load_si512(cross[t]), _mm512_load_si512(low[t]));
    sum.top = _mm512_add_epi32(sum.top, _mm512_load_si512(high[t]));
  }
};

// Tiles 0 to 2 are sums, 4 and 5 activations, 6 and 7 weights: a product that shares weights with the one before it, or
// activations, is not to load them again. gcc's tile instructions want the tile's number written out. Where sums begin
// those before go to `made`, if there are any.
#define KVASIR_BEGIN(SUM, PLANE)                  \
  if constexpr (Begins) {                         \
    if (made) _tile_stored(SUM, made->PLANE, 64); \
    _tile_zero(SUM);                              \
  }

constexpr auto kNothing = []() __attribute__((always_inline)){};

// `first` and `second` are what else there is to do: vector instructions and tile products go on beside each other only
// as near as that, not one after another (unpacking a step: 168 and 100 cycles).
template <bool Begins, class First, class Second>
[[gnu::always_inline]] inline void add_step(const uint8_t* x, const UnpackedStep& w, [[maybe_unused]] TileSums* made,
                                            const First& first, const Second& second) {
  asm volatile("" ::: "memory");  // what is loaded has been stored
  _tile_loadd(4, x, 64);
  _tile_loadd(6, w.high, 64);
  KVASIR_BEGIN(0, high)
  _tile_dpbssd(0, 4, 6);
  _tile_loadd(5, x + kStepBytes / 2, 64);
  first();
  KVASIR_BEGIN(1, cross)
  _tile_dpbusd(1, 5, 6);
  _tile_loadd(7, w.low, 64);
  KVASIR_BEGIN(2, low)
  _tile_dpbuud(2, 5, 7);
  second();
  _tile_dpbsud(1, 4, 7);
}
#undef KVASIR_BEGIN

[[gnu::always_inline]] inline void last_sums(TileSums& made) {
  _tile_stored(0, made.high, 64);
  _tile_stored(1, made.cross, 64);
  _tile_stored(2, made.low, 64);
}

// Sums of 16 rows between two panels.
struct alignas(64) RowSums {
  int32_t top[kTileRows][kGroup], low[kTileRows][kGroup];
};

// What becomes of a tile's sums: kept for the next panel, or finished; a few rows at a time, between the products of
// the next tile.
constexpr int64_t kEndRows = 2, kEndParts = kTileRows / kEndRows;

struct TileEnd {
  const PackedMatrix& m;
  int64_t group;
  const float* d;  // of the tile's first row
  float* y;
  int64_t y_stride, rows;
  bool add;
  [[gnu::always_inline]] void operator()(const TileSums& made, RowSums* between, bool first, bool last,
                                         int64_t part) const {
    const int valid = m.valid(group);
    const simd::V scale = simd::load(m.row_scales(group));
    const int64_t end = rows < (part + 1) * kEndRows ? rows : (part + 1) * kEndRows;
    for (int64_t t = part * kEndRows; t < end; ++t) {
      RowSum sum{Blocks::zero_i(), Blocks::zero_i()};
      if (!first) sum = {Blocks::load_i(between->top[t]), Blocks::load_i(between->low[t])};
      made.add_to(sum, t);
      if (last) {
        store_lanes(sum.finish(simd::mul(scale, simd::set1(d[t]))), 0, y + t * y_stride, valid, add);
      } else {
        _mm512_store_si512(between->top[t], sum.top), _mm512_store_si512(between->low[t], sum.low);
      }
    }
  }
};

inline const uint8_t* tile_input(const QuantRows& x, int64_t row, int64_t steps) {
  return reinterpret_cast<const uint8_t*>(x.q) + row / kTileRows * steps * kStepBytes;
}

// One tile of rows: weights flow through a ring, unpacked while earlier ones are multiplied.
template <Packing P>
void sum_one_tile(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first, int64_t rows,
                  float* y, int64_t y_stride, bool add) {
  constexpr int64_t kMostSteps = 64;  // 32 bits hold the sums of low bytes of 516
  UnpackedStep ring[kStepRing];
  TileSums made[2];
  RowSums between;
  StepReader<P> reader(m, group, 0);
  const int64_t steps = (m.blocks + 1) / 2, total = steps * groups;
  const uint8_t* in = tile_input(x, first, steps);
  TileEnd end{m, group, x.d + first, y, y_stride, rows, add};
  for (int64_t i = 0; i < kStepsAhead && i < total; ++i) reader.next(ring[i % kStepRing]);
  int64_t parts = 0, part = kEndParts;        // sums made, and what of the last is next to be dealt with
  bool first_part = true, last_part = false;  // which they are of their group's
  auto end_part = [&]() __attribute__((always_inline)) {
    if (part == kEndParts) return;
    end(made[parts % 2], &between, first_part, last_part, part);
    if (++part == kEndParts && last_part) ++end.group, end.y += kGroup;
  };
  for (int64_t i = 0, step = 0; i < total; ++i) {
    const uint8_t* from = in + step * kStepBytes;
    UnpackedStep& to = ring[(i + kStepsAhead) % kStepRing];
    const bool more = i + kStepsAhead < total;
    if (step % kMostSteps == 0) {
      while (part < kEndParts) end_part();
      add_step<true>(from, ring[i % kStepRing], i > 0 ? made + ++parts % 2 : nullptr, kNothing, kNothing);
      if (i > 0) part = 0, last_part = step == 0, first_part = last_part ? steps <= kMostSteps : step == kMostSteps;
      if (more) reader.next(to);
    } else {
      add_step<false>(
          from, ring[i % kStepRing], nullptr,
          [&]() __attribute__((always_inline)) {
            if (more) reader.block(0, to);
            end_part();
          },
          [&]() __attribute__((always_inline)) {
            if (more) reader.rest(to);
            end_part();
          });
    }
    if (++step == steps) step = 0;
  }
  while (part < kEndParts) end_part();
  last_sums(made[++parts % 2]);
  part = 0, last_part = true, first_part = steps <= kMostSteps;
  while (part < kEndParts) end_part();
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
