// AMX for weights of 8 bits: a block of 32 inputs by 16 outputs is one tile, and AVX-512 applies the block's scales to
// its product with either plane of 16 rows of activations, in the order of the other kernels; integers are exact, so
// the bits are theirs.
#pragma once

#include "model/cpu/amx_row_sums.h"

// NOLINTBEGIN(misc-definitions-in-headers): included by one unit, as block_kernels.h is.
namespace kvasir::model::cpu {
namespace {

template <Packing P>
constexpr int parts() {
  return packing_info(P).halves ? 2 : 1;
}

// Rooms unpacked at a time: with the activations of a tile of rows they stay in the first-level cache.
constexpr int kChunk = 18;
// Rows whose sums wait between two chunks.
constexpr int kSpan = 128;
// Rooms unpacked ahead of the one that is multiplied, where there is one tile of rows.
constexpr int kAhead = 10, kRing = 16;
// A product's sums rest in memory while those of the next kLag are made: loads that find a tile's stores still under
// way would wait for them.
constexpr int kLag = 3, kSums = 4;
// Products under way in tiles of sums of their own, so that a store does not wait for its product.
constexpr int kTurns = 2;

// A block (or half of one, whose other half is zeros) as the tile instruction reads it: four inputs of 16 outputs in 64
// bytes.
struct UnpackedBlock {
  alignas(64) uint8_t tile[8][64];
  float d[kGroup], m[kGroup];
};

inline void put(uint8_t* to, __m512i v, bool there) { _mm512_store_si512(to, there ? v : _mm512_setzero_si512()); }

template <Packing P>
[[gnu::always_inline]] inline void unpack(const uint8_t* quants, const uint8_t* scales, UnpackedBlock* to_blocks) {
  constexpr int zero = packing_info(P).zero;
  for (int h = 0; h < parts<P>(); ++h) {
    uint8_t(*to)[64] = to_blocks[h].tile;
    const bool first = parts<P>() == 1 || h == 0, second = parts<P>() == 1 || h == 1;
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      __m512i w = _mm512_loadu_si512(quants + 64 * c);
      // With a zero point the tile is of signed bytes.
      put(to[c], zero ? _mm512_xor_si512(w, _mm512_set1_epi8(-128)) : w, c < 4 ? first : second);
    }
  }
  BlockScales<P> s;
  s.load(scales, 0);
  for (int h = 0; h < parts<P>(); ++h) {
    _mm512_store_ps(to_blocks[h].d, s.d[h]);
    if constexpr (zero == 0) _mm512_store_ps(to_blocks[h].m, s.m[h]);
  }
}

// The next block to unpack, of groups that follow each other.
template <Packing P>
struct BlockReader {
  static constexpr PackingInfo kInfo = packing_info(P);
  BlockReader(const PackedMatrix& m, int64_t group, int64_t block)
      : blocks(m.blocks), group_bytes(m.group_bytes), group_at(m.quants(group)) {
    ahead = (kFetchBytes / group_bytes + 1) * group_bytes;
    seek(block);
  }
  void seek(int64_t block) {
    b = block, quants = group_at + b * kInfo.quant_bytes;
    scales = group_at + blocks * kInfo.quant_bytes + b * kInfo.scale_bytes;
  }
  [[gnu::always_inline]] void next(UnpackedBlock* to_blocks) {
#pragma GCC unroll 8
    for (int i = 0; i < kInfo.quant_bytes; i += 64) __builtin_prefetch(quants + ahead + i, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < kInfo.scale_bytes; i += 64) __builtin_prefetch(scales + ahead + i, 0, 2);
    unpack<P>(quants, scales, to_blocks);
    quants += kInfo.quant_bytes, scales += kInfo.scale_bytes;
    if (++b == blocks) group_at += group_bytes, seek(0);
  }
  static constexpr int64_t kFetchBytes = 8192;
  int64_t blocks, group_bytes, ahead, b = 0;
  const uint8_t *group_at, *quants = nullptr, *scales = nullptr;
};

// gcc's tile instructions want the tile's number written out. Tiles 0 to 3 hold the sums of either plane of two
// products, 4 and 5 activations, 6 and 7 weights.
#define KVASIR_TWO(DOT, HIGH, LOW, W) \
  _tile_loadd(W, w, 64);              \
  _tile_loadd(4, x, 64);              \
  _tile_zero(HIGH);                   \
  DOT(HIGH, 4, W);                    \
  _tile_loadd(5, x + 32, 64);         \
  _tile_zero(LOW);                    \
  DOT(LOW, 5, W);

template <Packing P, int Turn>
[[gnu::always_inline]] inline void begin_product(const UnpackedBlock& unpacked, const uint8_t* x) {
  constexpr bool zero = packing_info(P).zero != 0;
  const uint8_t* w = unpacked.tile[0];
  asm volatile("" ::: "memory");  // what is loaded has been stored
  if constexpr (zero && Turn == 0) {
    KVASIR_TWO(_tile_dpbssd, 0, 1, 6)
  } else if constexpr (zero) {
    KVASIR_TWO(_tile_dpbssd, 2, 3, 7)
  } else if constexpr (Turn == 0) {
    KVASIR_TWO(_tile_dpbsud, 0, 1, 6)
  } else {
    KVASIR_TWO(_tile_dpbsud, 2, 3, 7)
  }
}
#undef KVASIR_TWO

using Sums = int32_t[2][kTileRows][kGroup];

template <int Turn>
[[gnu::always_inline]] inline void end_product(Sums& to) {
  if constexpr (Turn == 0) {
    _tile_stored(0, to[0], 64);
    _tile_stored(1, to[1], 64);
  } else {
    _tile_stored(2, to[0], 64);
    _tile_stored(3, to[1], 64);
  }
}

// The activations of 16 rows: a block is 16 times 64 bytes, and 16 sums (of either half).
struct TileInput {
  const uint8_t* x;
  const float* sums;
  TileInput(const QuantRows& rows, int64_t row, int64_t block, int64_t parts)
      : x(reinterpret_cast<const uint8_t*>(rows.q) + 2 * row * rows.cols + 1024 * block),
        sums(rows.sums + (row * (rows.cols / 32) + kTileRows * block) * parts) {}
};

// Adds a product to the sums of its rows.
template <Packing P>
[[gnu::always_inline]] inline void scale(const Sums& sums, const UnpackedBlock& unpacked, const float* x_sums,
                                         simd::V* acc) {
  const simd::V d = simd::load(unpacked.d), m = packing_info(P).zero ? d : simd::load(unpacked.m);
#pragma GCC unroll 16
  for (int t = 0; t < kTileRows; ++t) {
    const Blocks::I v =
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[0][t]), 4), _mm512_load_si512(sums[1][t]));
    acc[t] = simd::fused(d, Blocks::to_float(v), acc[t]);
    if constexpr (packing_info(P).zero == 0) acc[t] = simd::fused(m, simd::set1(x_sums[t]), acc[t]);
  }
}

// Products 0 to n flow from begin to end to scale, which are several of them apart.
template <class Begin, class Scale>
[[gnu::always_inline]] inline void flow(int64_t n, const Begin& begin, const Scale& scale_one) {
  constexpr int kFirst = kLag + kTurns - 1;
  alignas(64) Sums sums[kSums];
  auto turn = [&]<int Turn>(int64_t i) __attribute__((always_inline)) {
    if (i + kFirst < n) begin.template operator()<(Turn + kTurns - 1) % kTurns>(i + kFirst);
    if (i + kLag >= 0 && i + kLag < n) end_product<Turn>(sums[(i + kLag) % kSums]);
    if (i >= 0 && i < n) scale_one(i, sums[i % kSums]);
  };
  for (int64_t i = -kFirst; i < n; i += kTurns) {
    turn.template operator()<1>(i);
    turn.template operator()<0>(i + 1);
  }
}

// A group's sums of `rows` rows, scaled by the rows' own scales.
void finish(const float (*sums)[kGroup], const float* d, int64_t rows, int valid, bool add, float* y,
            int64_t y_stride) {
  for (int64_t t = 0; t < rows; ++t)
    store_lanes(simd::mul(simd::load(sums[t]), simd::set1(d[t])), 0, y + t * y_stride, valid, add);
}

// Many tiles of rows: a chunk of a group's weights is unpacked once for as many of them as kSpan has.
template <Packing P>
void many_tiles(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
                int64_t y_stride, bool add) {
  alignas(64) UnpackedBlock unpacked[kChunk];
  alignas(64) float acc[kSpan][kGroup];
  constexpr int kBlocks = kChunk / parts<P>();
  const int64_t chunks = (m.blocks + kBlocks - 1) / kBlocks, chunk = (m.blocks + chunks - 1) / chunks;
  for (int64_t span = 0; span < rows; span += kSpan) {
    const int64_t n = rows - span < kSpan ? rows - span : kSpan;
    for (int64_t b = 0; b < m.blocks; b += chunk) {
      const int64_t count = (m.blocks - b < chunk ? m.blocks - b : chunk) * parts<P>();
      BlockReader<P> reader(m, group, b);
      for (int64_t i = 0; i < count; i += parts<P>()) reader.next(unpacked + i);
      int64_t begun = 0, scaled = 0;  // products within their tiles
      TileInput in(x, first + span, b, parts<P>());
      const int64_t next = x.cols / 32 - count / parts<P>();  // blocks between the end of a tile and the next
      float(*acc_at)[kGroup] = acc;
      simd::V sums[kTileRows];
      flow((n + kTileRows - 1) / kTileRows * count,
           [&]<int Turn>(int64_t) __attribute__((always_inline)) {
             begin_product<P, Turn>(unpacked[begun], in.x);
             if (++begun % parts<P>() == 0) in.x += 1024;
             if (begun == count) begun = 0, in.x += 1024 * next;
           },
           [&](int64_t, const Sums& made) __attribute__((always_inline)) {
             if (scaled == 0) {
#pragma GCC unroll 16
               for (int t = 0; t < kTileRows; ++t) sums[t] = b == 0 ? simd::set1(0.0f) : simd::load(acc_at[t]);
             }
             scale<P>(made, unpacked[scaled], in.sums, sums);
             in.sums += kTileRows;
             if (++scaled < count) return;
#pragma GCC unroll 16
             for (int t = 0; t < kTileRows; ++t) simd::store(acc_at[t], sums[t]);
             scaled = 0, in.sums += next * kTileRows * parts<P>(), acc_at += kTileRows;
           });
    }
    finish(acc, x.d + first + span, n, m.valid(group), add, y + span * y_stride, y_stride);
  }
}

// One tile of rows: weights flow through a ring, unpacked while earlier ones are multiplied.
template <Packing P>
void one_tile(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first, int64_t rows,
              float* y, int64_t y_stride, bool add) {
  alignas(64) UnpackedBlock ring[kRing];
  const TileInput in(x, first, 0, parts<P>());
  BlockReader<P> reader(m, group, 0);
  const int64_t count = m.blocks * parts<P>(), total = count * groups;
  for (int64_t i = 0; i < kAhead && i < total; i += parts<P>()) reader.next(ring + i);
  alignas(64) float made_rows[kTileRows][kGroup];
  simd::V sums[kTileRows];
#pragma GCC unroll 16
  for (int t = 0; t < kTileRows; ++t) sums[t] = simd::set1(0.0f);
  int64_t begun = 0, scaled = 0;  // products within their groups
  flow(
      total,
      [&]<int Turn>(int64_t i) __attribute__((always_inline)) {
        begin_product<P, Turn>(ring[i % kRing], in.x + 1024 * (begun / parts<P>()));
        begun = begun + 1 == count ? 0 : begun + 1;
      },
      [&](int64_t i, const Sums& made) __attribute__((always_inline)) {
        if (i % parts<P>() == 0 && i + kAhead < total) reader.next(ring + (i + kAhead) % kRing);
        scale<P>(made, ring[i % kRing], in.sums + scaled * kTileRows, sums);
        if (++scaled < count) return;
        scaled = 0;
#pragma GCC unroll 16
        for (int t = 0; t < kTileRows; ++t) simd::store(made_rows[t], sums[t]), sums[t] = simd::set1(0.0f);
        finish(made_rows, x.d + first, rows, m.valid(group), add, y, y_stride);
        ++group, y += kGroup;
      });
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
