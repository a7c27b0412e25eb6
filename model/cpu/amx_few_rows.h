// AMX for at most a tile of rows and weights that are integers of their row: there unpacking W would take longer than
// its products do. A tile is of plain q - 8 instead, and AVX-512 multiplies its sums by D, block by block.
//
// Whatever its height, a tile of weights takes 16 cycles to be multiplied and a tile of sums 16 to be stored, so every
// product is to have 16 rows of sums: those of both planes and, with at most 4 rows of activations, of two blocks whose
// activations stand apart among zeros. With more than 8 rows a chunk's blocks pass twice, once for each plane.
// Weights with two scales a block have halves in the blocks' place; a pair is two blocks, or a block of halves.
#pragma once

#include "model/cpu/amx_row_sums.h"

// NOLINTBEGIN(misc-definitions-in-headers): included by one unit, as block_kernels.h is.
namespace kvasir::model::cpu {
namespace {

// Pairs whose products' sums stay within 32 bits: 32 blocks' are below 16,384 * 127 * 32 each.
constexpr int64_t kChunkPairs = 16;

// How activations lie for R rows.
template <Packing P, int R>
struct Few {
  static constexpr PackingInfo kInfo = packing_info(P);
  static constexpr bool kMinima = kInfo.zero == 0;
  static constexpr int kInputs = kInfo.halves ? 16 : 32;  // that share D and M
  static constexpr int kPairBlocks = kInfo.halves ? 1 : 2;
  static constexpr int kTogether = R <= 4 ? 2 : 1;  // of a pair in a product
  static constexpr int kProducts = 2 / kTogether;
  static constexpr int kSums = 2 * R;                   // rows of sums that are kept: R of the high plane, R of the low
  static constexpr int kMade = kSums * kTogether;       // that a product makes
  static constexpr int kWidth = kInputs * kTogether;    // bytes of a product's row of activations
  static constexpr int kProductBytes = kMade * kWidth;  // of activations
  static constexpr int kPairBytes = kProductBytes * kProducts;
  static constexpr int kWeightBytes = 16 * kWidth;  // of a product
  // Where a row's sums of a pair of blocks are.
  static constexpr int64_t pair_sum(int64_t pair, int plane, int64_t row) { return (2 * pair + plane) * R + row; }
  // Where its sum of a block (or half) is, over both planes.
  static constexpr int64_t block_sum(int64_t pair, int part, int64_t row) { return (2 * pair + part) * R + row; }
  // Where a row's inputs of block (or half) `part` of a pair are.
  static constexpr int64_t place(int64_t pair, int part, int plane, int64_t row) {
    const int64_t sum = plane * R + row;
    return pair * kPairBytes +
           (kTogether == 2 ? (part * kSums + sum) * kWidth + part * kInputs : part * kProductBytes + sum * kWidth);
  }
};

// Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
template <class L>
void configure_few() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } c;
  for (int t = 0; t < 8; ++t) c.bytes[t] = 64, c.rows[t] = L::kMade;
  for (int t = 4; t < 6; ++t) c.bytes[t] = L::kWidth, c.rows[t + 2] = L::kWidth / 4;
  asm volatile("" : "+m"(c));  // gcc 12 believes that only the first eight bytes are read
  _tile_loadconfig(&c);
}

// A pair's q - 8, four inputs of 16 outputs in 64 bytes.
struct alignas(64) PairWeights {
  uint8_t tile[16][64];
};

// The next pair's weights, of groups that follow each other; a block at a time.
template <class L>
struct PairReader {
  static constexpr PackingInfo kInfo = L::kInfo;
  static constexpr int64_t kFetchBytes = 8192;
  PairReader(const PackedMatrix& m, int64_t group)
      : blocks(m.blocks),
        group_bytes(m.group_bytes),
        ahead((kFetchBytes / group_bytes + 1) * group_bytes),
        group_at(m.quants(group)) {
    seek();
  }
  void seek() { b = 0, quants = group_at, scales = group_at + blocks * kInfo.quant_bytes; }
  [[gnu::always_inline]] void next(PairWeights& to) {
    block(0, to);
    rest(to);
  }
  [[gnu::always_inline]] void rest(PairWeights& to) {
    if (L::kPairBlocks == 2 && b < blocks) block(1, to);  // else what is there meets activations of 0
    if (b == blocks) group_at += group_bytes, seek();
  }
  [[gnu::always_inline]] void block(int which, PairWeights& to) {
#pragma GCC unroll 4
    for (int i = 0; i < kInfo.quant_bytes; i += 64) __builtin_prefetch(quants + ahead + i, 0, 2);
#pragma GCC unroll 2
    for (int i = 0; i < kInfo.scale_bytes; i += 64) __builtin_prefetch(scales + ahead + i, 0, 2);
    // Bits 0 to 2 of a nibble, and bit 3 turned round into all above: the nibble less 8, as a signed byte.
    const __m512i low = _mm512_set1_epi64(0x0102040808080808), high = _mm512_set1_epi64(0x1020408080808080);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m512i v = _mm512_loadu_si512(quants + 64 * c);
      _mm512_store_si512(to.tile[8 * which + c], _mm512_gf2p8affine_epi64_epi8(v, low, 0xf8));
      _mm512_store_si512(to.tile[8 * which + c + 4], _mm512_gf2p8affine_epi64_epi8(v, high, 0xf8));
    }
    quants += kInfo.quant_bytes, scales += kInfo.scale_bytes, ++b;
  }
  int64_t blocks, group_bytes, ahead, b = 0;
  const uint8_t *group_at, *quants = nullptr, *scales = nullptr;
};

template <class L>
struct alignas(64) PairSums {
  int32_t of[L::kProducts * L::kMade][kGroup];  // of either block (or half) kSums
};

// gcc's tile instructions want the tile's number written out.
#define KVASIR_PRODUCT(SUM, X, W, x, w) \
  _tile_loadd(W, w, 64);                \
  _tile_loadd(X, x, L::kWidth);         \
  _tile_zero(SUM);                      \
  if constexpr (L::kInfo.of_rows) {     \
    _tile_dpbssd(SUM, X, W);            \
  } else {                              \
    _tile_dpbsud(SUM, X, W);            \
  }

template <class L, int Turn>
[[gnu::always_inline]] inline void begin_pair(const uint8_t* x, const uint8_t* w) {
  asm volatile("" ::: "memory");  // what is loaded has been stored
  if constexpr (L::kProducts == 2 && Turn == 0) {
    KVASIR_PRODUCT(0, 4, 6, x, w)
    KVASIR_PRODUCT(1, 5, 7, x + L::kProductBytes, w + L::kWeightBytes)
  } else if constexpr (L::kProducts == 2) {
    KVASIR_PRODUCT(2, 4, 6, x, w)
    KVASIR_PRODUCT(3, 5, 7, x + L::kProductBytes, w + L::kWeightBytes)
  } else if constexpr (Turn == 0) {
    KVASIR_PRODUCT(0, 4, 6, x, w)
  } else {
    KVASIR_PRODUCT(2, 5, 7, x, w)
  }
}
#undef KVASIR_PRODUCT

template <class L, int Turn>
[[gnu::always_inline]] inline void end_pair(PairSums<L>& to) {
  if constexpr (Turn == 0) {
    _tile_stored(0, to.of[0], 64);
    if constexpr (L::kProducts == 2) _tile_stored(1, to.of[L::kMade], 64);
  } else {
    _tile_stored(2, to.of[0], 64);
    if constexpr (L::kProducts == 2) _tile_stored(3, to.of[L::kMade], 64);
  }
}

// Adds what a pair's products make with D, and its activations' sums with M, to `acc`.
template <Packing P, class L>
[[gnu::always_inline]] inline void scale_pair(const PairSums<L>& made, const uint8_t* scales, const int32_t* x_sums,
                                              Blocks::I* acc) {
  Blocks::I first, second, minima = Blocks::zero_i();
  if constexpr (L::kMinima) {
    const Blocks::I p0 = _mm512_loadu_si512(scales), p1 = _mm512_loadu_si512(scales + 64),
                    low = _mm512_set1_epi32(0xffff);
    first = _mm512_and_si512(p0, low), second = _mm512_and_si512(p1, low);
    minima = _mm512_ternarylogic_epi32(_mm512_srli_epi32(p0, 16), low, p1, 0xf2);  // a | (~b & c)
  } else {
    first = Blocks::template load_pair<P>(scales, 0, 0),
    second = Blocks::template load_pair<P>(scales + L::kInfo.scale_bytes, 0, 0);
  }
#pragma GCC unroll 16
  for (int t = 0; t < L::kSums; ++t) {
    acc[t] = _mm512_dpwssd_epi32(acc[t], first, _mm512_load_si512(made.of[t]));
    if constexpr (L::kMinima) acc[t] = _mm512_dpwssd_epi32(acc[t], minima, _mm512_set1_epi32(x_sums[t]));
    acc[t] = _mm512_dpwssd_epi32(acc[t], second, _mm512_load_si512(made.of[L::kSums + t]));
  }
}

// Weights flow through a ring, unpacked while earlier ones are multiplied; products rest in memory before they are
// scaled, since loads that find a tile's stores still under way would wait for them.
template <Packing P, int R>
void few_rows(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t rows, float* y,
              int64_t y_stride, bool add) {
  using L = Few<P, R>;
  constexpr int64_t kTurns = 2, kLag = 2, kFirst = kLag + kTurns - 1, kBuffers = 4, kRing = 8, kAhead = 7;
  configure_few<L>();
  PairWeights ring[kRing];
  PairSums<L> sums[kBuffers];
  RowSum made[R];
  Blocks::I acc[L::kSums];
#pragma GCC unroll 16
  for (int t = 0; t < L::kSums; ++t) acc[t] = Blocks::zero_i();
  const int64_t pairs = (m.blocks + L::kPairBlocks - 1) / L::kPairBlocks, total = pairs * groups;
  const auto* in = reinterpret_cast<const uint8_t*>(x.q);
  PairReader<L> reader(m, group);
  for (int64_t i = 0; i < kAhead && i < total; ++i) reader.next(ring[i]);
  int64_t begun = 0, scaled = 0;  // pairs within their groups
  int64_t rest = kChunkPairs;     // of a chunk
  bool first = true;              // a group's first chunk
  const uint8_t* scales = m.scales(group);
  auto turn = [&]<int Turn>(int64_t i) __attribute__((always_inline)) {
    if (i + kFirst < total) {
      begin_pair<L, (Turn + kTurns - 1) % kTurns>(in + begun * L::kPairBytes, ring[(i + kFirst) % kRing].tile[0]);
      begun = begun + 1 == pairs ? 0 : begun + 1;
    }
    if (i + kLag >= 0 && i + kLag < total) end_pair<L, Turn>(sums[(i + kLag) % kBuffers]);
    if (i < 0 || i >= total) return;
    if (i + kAhead < total) reader.next(ring[(i + kAhead) % kRing]);
    scale_pair<P, L>(sums[i % kBuffers], scales + scaled * L::kPairBlocks * L::kInfo.scale_bytes,
                     x.planes + L::pair_sum(scaled, 0, 0), acc);
    const bool last = ++scaled == pairs;
    if (!last && --rest > 0) return;
#pragma GCC unroll 16
    for (int t = 0; t < R; ++t) {
      if (first) made[t].top = made[t].low = Blocks::zero_i();
      made[t].template add<4>(acc[t], acc[R + t]);
      acc[t] = acc[R + t] = Blocks::zero_i();
    }
    first = last, rest = kChunkPairs;
    if (!last) return;
    const simd::V scale = simd::load(m.row_scales(group));
    const int valid = m.valid(group);
    for (int64_t t = 0; t < rows; ++t)
      store_lanes(made[t].finish(simd::mul(scale, simd::set1(x.d[t]))), 0, y + t * y_stride, valid, add);
    ++group, y += kGroup, scales += m.group_bytes, scaled = 0;
  };
  for (int64_t i = -kFirst; i < total; i += kTurns) {
    turn.template operator()<1>(i);
    turn.template operator()<0>(i + 1);
  }
}

// The same for weights of 8 bits, which are tiles as they lie. Each block is scaled by itself, in the other kernels'
// order.
template <Packing P, int R>
void few_rows_of_blocks(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t rows,
                        float* y, int64_t y_stride, bool add) {
  using L = Few<P, R>;
  constexpr int64_t kTurns = 2, kLag = 2, kFirst = kLag + kTurns - 1, kBuffers = 4;
  constexpr int64_t kPairQuants = L::kPairBlocks * L::kInfo.quant_bytes, kFetchBytes = 8192;
  configure_few<L>();
  PairSums<L> sums[kBuffers];
  simd::V acc[R];
#pragma GCC unroll 8
  for (int t = 0; t < R; ++t) acc[t] = simd::set1(0.0f);
  const int64_t pairs = m.blocks / L::kPairBlocks, total = pairs * groups;
  const int64_t ahead = (kFetchBytes / m.group_bytes + 1) * m.group_bytes;
  const auto* in = reinterpret_cast<const uint8_t*>(x.q);
  int64_t begun = 0, scaled = 0;  // pairs within their groups
  const uint8_t *quants = m.quants(group), *scales = m.scales(group);
  auto turn = [&]<int Turn>(int64_t i) __attribute__((always_inline)) {
    if (i + kFirst < total) {
      const uint8_t* w = quants + begun * kPairQuants;
#pragma GCC unroll 16
      for (int k = 0; k < kPairQuants; k += 64) __builtin_prefetch(w + ahead + k, 0, 2);
      begin_pair<L, (Turn + kTurns - 1) % kTurns>(in + begun * L::kPairBytes, w);
      if (++begun == pairs) begun = 0, quants += m.group_bytes;
    }
    if (i + kLag >= 0 && i + kLag < total) end_pair<L, Turn>(sums[(i + kLag) % kBuffers]);
    if (i < 0 || i >= total) return;
    const auto& made = sums[i % kBuffers].of;
    const uint8_t* at = scales + scaled * L::kPairBlocks * L::kInfo.scale_bytes;
#pragma GCC unroll 4
    for (int k = 0; k < L::kPairBlocks * L::kInfo.scale_bytes; k += 64) __builtin_prefetch(at + ahead + k, 0, 2);
    BlockScales<P> of_block[L::kPairBlocks];
    for (int b = 0; b < L::kPairBlocks; ++b) of_block[b].load(at + b * L::kInfo.scale_bytes, 0);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const BlockScales<P>& s = of_block[L::kPairBlocks == 2 ? part : 0];
      const int half = L::kPairBlocks == 2 ? 0 : part;
#pragma GCC unroll 8
      for (int t = 0; t < R; ++t) {
        const int64_t sum = L::block_sum(scaled, part, t);
        Blocks::I v = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(made[part * L::kSums + t]), 4),
                                       _mm512_load_si512(made[part * L::kSums + R + t]));
        if constexpr (!L::kMinima) v = _mm512_add_epi32(v, _mm512_set1_epi32(x.offsets[sum]));
        acc[t] = simd::fused(s.d[half], Blocks::to_float(v), acc[t]);
        if constexpr (L::kMinima) acc[t] = simd::fused(s.m[half], simd::set1(x.sums[sum]), acc[t]);
      }
    }
    if (++scaled < pairs) return;
    const int valid = m.valid(group);
#pragma GCC unroll 8
    for (int t = 0; t < R; ++t) {
      if (t < rows) store_lanes(simd::mul(acc[t], simd::set1(x.d[t])), 0, y + t * y_stride, valid, add);
      acc[t] = simd::set1(0.0f);
    }
    ++group, y += kGroup, scales += m.group_bytes, scaled = 0;
  };
  for (int64_t i = -kFirst; i < total; i += kTurns) {
    turn.template operator()<1>(i);
    turn.template operator()<0>(i + 1);
  }
}

// f.operator()<R>() for as many rows as are multiplied where there are `rows`.
template <class F>
inline void with_few(int64_t rows, const F& f) {
  if (rows > 4) return f.template operator()<8>();
  if (rows > 3) return f.template operator()<4>();
  if (rows > 2) return f.template operator()<3>();
  if (rows > 1) return f.template operator()<2>();
  f.template operator()<1>();
}

template <Packing P, int R>
void quantize_few(const float* x, const QuantRows& to, int64_t row) {
  using L = Few<P, R>;
  alignas(64) int8_t room[2][32];
  int16_t* sums = reinterpret_cast<int16_t*>(to.planes);
  // A plane of a block or half.
  auto put = [&](int64_t pair, int part, int plane, const int8_t* from, int32_t sum) {
    int8_t* q = to.q + L::place(pair, part, plane, row);
    __builtin_memcpy(q, from, L::kInputs);
    if (L::kTogether == 2) __builtin_memset(q + (part == 0 ? L::kInputs : -L::kInputs), 0, L::kInputs);
    if (L::kInfo.of_rows && L::kMinima) sums[2 * L::pair_sum(pair, plane, row) + part] = int16_t(sum);
  };
  // Of both planes, for weights that are scaled block by block.
  auto put_block_sum = [&](int64_t pair, int part, int32_t sum) {
    const int64_t at = L::block_sum(pair, part, row);
    if (L::kMinima)
      to.sums[at] = float(sum);
    else
      to.offsets[at] = -L::kInfo.zero * sum;
  };
  quantize_to<Blocks>(
      x, to, row,
      [&](int64_t) {
        return BlockPlace{room[0], room[1], 0, 0};
      },
      [&](int64_t b, const BlockPlace&, const int32_t* made) {
        for (int plane = 0; plane < 2; ++plane) {
          const int32_t* sum = made + 2 * plane;
          if (L::kPairBlocks == 2) {
            put(b / 2, int(b % 2), plane, room[plane], sum[0] + sum[1]);
          } else {
            put(b, 0, plane, room[plane], sum[0]);
            put(b, 1, plane, room[plane] + L::kInputs, sum[1]);
          }
        }
        if (L::kInfo.of_rows) return;
        const int32_t first = 16 * made[0] + made[2], second = 16 * made[1] + made[3];
        if (L::kPairBlocks == 2)
          put_block_sum(b / 2, int(b % 2), first + second);
        else
          put_block_sum(b, 0, first), put_block_sum(b, 1, second);
      });
  const int64_t blocks = to.cols / 32;
  if (L::kPairBlocks == 1 || blocks % 2 == 0) return;
  __builtin_memset(room, 0, sizeof room);
  for (int plane = 0; plane < 2; ++plane) put(blocks / 2, 1, plane, room[plane], 0);
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
