// AMX: with 4-bit weights a block of 32 inputs by 16 outputs, once times 16 and once as it is, is one tile, and its
// product with both planes of 16 rows of activations one instruction. AVX-512 applies the block's scales in the order
// of the other kernels; integers are exact, so the bits are theirs.
#include "model/cpu/vector_avx512.h"

// After the vectors it is written for.
#include "model/cpu/kernels_impl.h"

namespace kvasir::model::cpu {
namespace {

template <Packing P>
constexpr bool nibbles() {
  return packing_info(P).quant_bytes == 256;
}
template <Packing P>
constexpr int parts() {
  return packing_info(P).halves ? 2 : 1;
}

constexpr int kTileRows = 16;
// Fewer rows are not worth setting tiles up for.
constexpr int kLeastRows = 3;
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
template <Packing P>
constexpr int turns() {
  return nibbles<P>() ? 4 : 2;
}

// A block (or half of one, whose other half is zeros) as the tile instruction wants it: four inputs of 16 outputs in 64
// bytes. 8-bit weights have no room for 16 times as much, so their planes are two products.
template <Packing P>
struct Room {
  static constexpr int kRows = nibbles<P>() ? 16 : 8;
  alignas(64) uint8_t tile[kRows][64];
  float d[kGroup], m[kGroup];
};

inline void put(uint8_t* to, __m512i v, bool there) { _mm512_store_si512(to, there ? v : _mm512_setzero_si512()); }

template <Packing P>
[[gnu::always_inline]] inline void unpack(const uint8_t* quants, const uint8_t* scales, Room<P>* rooms) {
  constexpr int zero = packing_info(P).zero;
  const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(int8_t(0xf0));
  // With a zero point the tile is of signed bytes.
  auto sixteen = [&](__m512i v) {
    v = _mm512_and_si512(v, high);
    return zero ? _mm512_xor_si512(v, _mm512_set1_epi8(-128)) : v;
  };
  auto once = [&](__m512i v) {
    v = _mm512_and_si512(v, low);
    return zero ? _mm512_sub_epi8(v, _mm512_set1_epi8(8)) : v;
  };
  for (int h = 0; h < parts<P>(); ++h) {
    uint8_t(*to)[64] = rooms[h].tile;
    const bool first = parts<P>() == 1 || h == 0, second = parts<P>() == 1 || h == 1;
    if constexpr (nibbles<P>()) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        __m512i w = _mm512_loadu_si512(quants + 64 * c), v = _mm512_srli_epi16(w, 4);
        put(to[c], sixteen(_mm512_slli_epi16(w, 4)), first);
        put(to[c + 4], sixteen(w), second);
        put(to[c + 8], once(w), first);
        put(to[c + 12], once(v), second);
      }
    } else {
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c) {
        __m512i w = _mm512_loadu_si512(quants + 64 * c);
        put(to[c], zero ? _mm512_xor_si512(w, _mm512_set1_epi8(-128)) : w, c < 4 ? first : second);
      }
    }
  }
  Scales<P> s;
  s.load(scales, 0);
  for (int h = 0; h < parts<P>(); ++h) {
    _mm512_store_ps(rooms[h].d, s.d[h]);
    if constexpr (zero == 0) _mm512_store_ps(rooms[h].m, s.m[h]);
  }
}

// The next block to unpack, of groups that follow each other.
template <Packing P>
struct Reader {
  static constexpr PackingInfo kInfo = packing_info(P);
  Reader(const PackedMatrix& m, int64_t group, int64_t block)
      : blocks(m.blocks), group_bytes(m.group_bytes), group_at(m.quants(group)) {
    ahead = (kFetchBytes / group_bytes + 1) * group_bytes;
    seek(block);
  }
  void seek(int64_t block) {
    b = block, quants = group_at + b * kInfo.quant_bytes;
    scales = group_at + blocks * kInfo.quant_bytes + b * kInfo.scale_bytes;
  }
  [[gnu::always_inline]] void next(Room<P>* rooms) {
#pragma GCC unroll 8
    for (int i = 0; i < kInfo.quant_bytes; i += 64) __builtin_prefetch(quants + ahead + i, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < kInfo.scale_bytes; i += 64) __builtin_prefetch(scales + ahead + i, 0, 2);
    unpack<P>(quants, scales, rooms);
    quants += kInfo.quant_bytes, scales += kInfo.scale_bytes;
    if (++b == blocks) group_at += group_bytes, seek(0);
  }
  static constexpr int64_t kFetchBytes = 8192;
  int64_t blocks, group_bytes, ahead, b = 0;
  const uint8_t *group_at, *quants = nullptr, *scales = nullptr;
};

// Tiles 0 to 3 hold the sums of four products (8 bits: of either plane of two), 4 and 5 activations, 6 and 7 weights.
void configure(bool one_product, int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } c;
  for (int t = 0; t < 8; ++t) c.bytes[t] = 64, c.rows[t] = uint8_t(t < 6 ? rows : kTileRows);
  if (!one_product)
    for (int t = 4; t < 6; ++t) c.bytes[t] = 32, c.rows[t + 2] = 8;
  asm volatile("" : "+m"(c));  // gcc 12 believes that only the first eight bytes are read
  _tile_loadconfig(&c);
}

// gcc's tile instructions want the tile's number written out.
#define KVASIR_ONE(DOT, SUM, X, W) \
  _tile_loadd(X, x, 64);           \
  _tile_loadd(W, w, 64);           \
  _tile_zero(SUM);                 \
  DOT(SUM, X, W);
#define KVASIR_TWO(DOT, HIGH, LOW, W) \
  _tile_loadd(W, w, 64);              \
  _tile_loadd(4, x, 64);              \
  _tile_zero(HIGH);                   \
  DOT(HIGH, 4, W);                    \
  _tile_loadd(5, x + 32, 64);         \
  _tile_zero(LOW);                    \
  DOT(LOW, 5, W);

template <Packing P, int Turn>
[[gnu::always_inline]] inline void begin_product(const Room<P>& room, const uint8_t* x) {
  constexpr bool zero = packing_info(P).zero != 0;
  const uint8_t* w = room.tile[0];
  asm volatile("" ::: "memory");  // what is loaded has been stored
  if constexpr (zero && nibbles<P>() && Turn == 0) {
    KVASIR_ONE(_tile_dpbssd, 0, 4, 6)
  } else if constexpr (zero && nibbles<P>() && Turn == 1) {
    KVASIR_ONE(_tile_dpbssd, 1, 5, 7)
  } else if constexpr (zero && nibbles<P>() && Turn == 2) {
    KVASIR_ONE(_tile_dpbssd, 2, 4, 6)
  } else if constexpr (zero && nibbles<P>() && Turn == 3) {
    KVASIR_ONE(_tile_dpbssd, 3, 5, 7)
  } else if constexpr (nibbles<P>() && Turn == 0) {
    KVASIR_ONE(_tile_dpbsud, 0, 4, 6)
  } else if constexpr (nibbles<P>() && Turn == 1) {
    KVASIR_ONE(_tile_dpbsud, 1, 5, 7)
  } else if constexpr (nibbles<P>() && Turn == 2) {
    KVASIR_ONE(_tile_dpbsud, 2, 4, 6)
  } else if constexpr (nibbles<P>() && Turn == 3) {
    KVASIR_ONE(_tile_dpbsud, 3, 5, 7)
  } else if constexpr (zero && Turn == 0) {
    KVASIR_TWO(_tile_dpbssd, 0, 1, 6)
  } else if constexpr (zero && Turn == 1) {
    KVASIR_TWO(_tile_dpbssd, 2, 3, 7)
  } else if constexpr (Turn == 0) {
    KVASIR_TWO(_tile_dpbsud, 0, 1, 6)
  } else {
    KVASIR_TWO(_tile_dpbsud, 2, 3, 7)
  }
}
#undef KVASIR_ONE
#undef KVASIR_TWO

template <Packing P>
using Sums = int32_t[nibbles<P>() ? 1 : 2][kTileRows][kGroup];

template <Packing P, int Turn>
[[gnu::always_inline]] inline void end_product(Sums<P>& to) {
  if constexpr (nibbles<P>()) {
    if constexpr (Turn == 0) _tile_stored(0, to[0], 64);
    if constexpr (Turn == 1) _tile_stored(1, to[0], 64);
    if constexpr (Turn == 2) _tile_stored(2, to[0], 64);
    if constexpr (Turn == 3) _tile_stored(3, to[0], 64);
  } else if constexpr (Turn == 0) {
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

// Adds a product to the sums of R rows.
template <Packing P, int R = kTileRows>
[[gnu::always_inline]] inline void scale(const Sums<P>& sums, const Room<P>& room, const float* x_sums, V::F* acc) {
  const V::F d = V::load_f(room.d), m = packing_info(P).zero ? d : V::load_f(room.m);
#pragma GCC unroll 16
  for (int t = 0; t < R; ++t) {
    V::I v = _mm512_load_si512(sums[0][t]);
    if constexpr (!nibbles<P>()) v = _mm512_add_epi32(_mm512_slli_epi32(v, 4), _mm512_load_si512(sums[1][t]));
    acc[t] = V::fma(d, V::to_float(v), acc[t]);
    if constexpr (packing_info(P).zero == 0) acc[t] = V::fma(m, V::set_f(x_sums[t]), acc[t]);
  }
}

// Products 0 to n flow from begin to end to scale, which are several of them apart.
template <Packing P, class Begin, class Scale>
[[gnu::always_inline]] inline void flow(int64_t n, const Begin& begin, const Scale& scale_one) {
  constexpr int kTurns = turns<P>(), kFirst = kLag + kTurns - 1;
  alignas(64) Sums<P> sums[kSums];
  auto turn = [&]<int Turn>(int64_t i) __attribute__((always_inline)) {
    if (i + kFirst < n) begin.template operator()<(Turn + kTurns - 1) % kTurns>(i + kFirst);
    if (i + kLag >= 0 && i + kLag < n) end_product<P, Turn>(sums[(i + kLag) % kSums]);
    if (i >= 0 && i < n) scale_one(i, sums[i % kSums]);
  };
  for (int64_t i = -kFirst; i < n; i += kTurns) {
    turn.template operator()<1 % kTurns>(i);
    if constexpr (kTurns == 4) turn.template operator()<2>(i + 1), turn.template operator()<3>(i + 2);
    turn.template operator()<0>(i + kTurns - 1);
  }
}

// A group's sums of `rows` rows, scaled by the rows' own scales.
void finish(const float (*sums)[kGroup], const float* d, int64_t rows, int valid, bool add, float* y,
            int64_t y_stride) {
  for (int64_t t = 0; t < rows; ++t)
    store_lanes(V::mul(V::load_f(sums[t]), V::set_f(d[t])), 0, y + t * y_stride, valid, add);
}

// Many tiles of rows: a chunk of a group's weights is unpacked once for as many of them as kSpan has.
template <Packing P>
void many_tiles(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
                int64_t y_stride, bool add) {
  alignas(64) Room<P> room[kChunk];
  alignas(64) float acc[kSpan][kGroup];
  constexpr int kBlocks = kChunk / parts<P>();
  const int64_t chunks = (m.blocks + kBlocks - 1) / kBlocks, chunk = (m.blocks + chunks - 1) / chunks;
  for (int64_t span = 0; span < rows; span += kSpan) {
    const int64_t n = rows - span < kSpan ? rows - span : kSpan;
    for (int64_t b = 0; b < m.blocks; b += chunk) {
      const int64_t count = (m.blocks - b < chunk ? m.blocks - b : chunk) * parts<P>();
      Reader<P> reader(m, group, b);
      for (int64_t i = 0; i < count; i += parts<P>()) reader.next(room + i);
      int64_t begun = 0, scaled = 0;  // products within their tiles
      TileInput in(x, first + span, b, parts<P>());
      const int64_t next = x.cols / 32 - count / parts<P>();  // blocks between the end of a tile and the next
      float(*acc_at)[kGroup] = acc;
      V::F sums[kTileRows];
      flow<P>((n + kTileRows - 1) / kTileRows * count,
              [&]<int Turn>(int64_t) __attribute__((always_inline)) {
                begin_product<P, Turn>(room[begun], in.x);
                if (++begun % parts<P>() == 0) in.x += 1024;
                if (begun == count) begun = 0, in.x += 1024 * next;
              },
              [&](int64_t, const Sums<P>& made) __attribute__((always_inline)) {
                if (scaled == 0) {
#pragma GCC unroll 16
                  for (int t = 0; t < kTileRows; ++t) sums[t] = b == 0 ? V::set_f(0.0f) : V::load_f(acc_at[t]);
                }
                scale<P>(made, room[scaled], in.sums, sums);
                in.sums += kTileRows;
                if (++scaled < count) return;
#pragma GCC unroll 16
                for (int t = 0; t < kTileRows; ++t) V::store_f(acc_at[t], sums[t]);
                scaled = 0, in.sums += next * kTileRows * parts<P>(), acc_at += kTileRows;
              });
    }
    finish(acc, x.d + first + span, n, m.valid(group), add, y + span * y_stride, y_stride);
  }
}

// One tile of at most R rows: weights flow through a ring, unpacked while earlier ones are multiplied.
template <Packing P, int R>
void one_tile(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first, int64_t rows,
              float* y, int64_t y_stride, bool add) {
  alignas(64) Room<P> ring[kRing];
  const TileInput in(x, first, 0, parts<P>());
  Reader<P> reader(m, group, 0);
  const int64_t count = m.blocks * parts<P>(), total = count * groups;
  for (int64_t i = 0; i < kAhead && i < total; i += parts<P>()) reader.next(ring + i);
  alignas(64) float made_rows[R][kGroup];
  V::F sums[R];
#pragma GCC unroll 16
  for (int t = 0; t < R; ++t) sums[t] = V::set_f(0.0f);
  int64_t begun = 0, scaled = 0;  // products within their groups
  flow<P>(
      total,
      [&]<int Turn>(int64_t i) __attribute__((always_inline)) {
        begin_product<P, Turn>(ring[i % kRing], in.x + 1024 * (begun / parts<P>()));
        begun = begun + 1 == count ? 0 : begun + 1;
      },
      [&](int64_t i, const Sums<P>& made) __attribute__((always_inline)) {
        if (i % parts<P>() == 0 && i + kAhead < total) reader.next(ring + (i + kAhead) % kRing);
        scale<P, R>(made, ring[i % kRing], in.sums + scaled * kTileRows, sums);
        if (++scaled < count) return;
        scaled = 0;
#pragma GCC unroll 16
        for (int t = 0; t < R; ++t) V::store_f(made_rows[t], sums[t]), sums[t] = V::set_f(0.0f);
        finish(made_rows, x.d + first, rows, m.valid(group), add, y, y_stride);
        ++group, y += kGroup;
      });
}

template <Packing P>
void tiles(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first, int64_t rows,
           float* y, int64_t y_stride, bool add) {
  auto one = [&]<int R>() {
    configure(nibbles<P>(), R);
    one_tile<P, R>(m, group, groups, x, first, rows, y, y_stride, add);
  };
  if (rows <= 4) {
    one.template operator()<4>();
  } else if (rows <= kTileRows) {
    one.template operator()<kTileRows>();
  } else {
    configure(nibbles<P>(), kTileRows);
    for (int64_t g = 0; g < groups; ++g) many_tiles<P>(m, group + g, x, first, rows, y + g * kGroup, y_stride, add);
  }
  _tile_release();
}

void tiled_integer(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first,
                   int64_t rows, float* y, int64_t y_stride, bool add) {
  if (x.rows < kLeastRows) return integer(m, group, groups, x, first, rows, y, y_stride, add);
  with_packing(m.packing, [&]<Packing P>() {
    if constexpr (packing_info(P).quantized) tiles<P>(m, group, groups, x, first, rows, y, y_stride, add);
  });
}

// As tiles want it: blocks of 16 rows, where there are enough.
void quantize_for_tiles(const float* x, Packing packing, const QuantRows& to, int64_t row) {
  if (to.rows < kLeastRows) return quantize(x, packing, to, row);
  const int64_t t = row % kTileRows, first = row - t, blocks = to.cols / 32;
  const int64_t parts = packing_info(packing).halves ? 2 : 1;
  quantize_to<V>(x, packing, to, row, [&](int64_t b) {
    return BlockPlace{to.q + 2 * first * to.cols + 1024 * b + 64 * t, (first * blocks + kTileRows * b) * parts + t,
                      kTileRows};
  });
}

constexpr Kernels amx_kernels() {
  Kernels k = make_kernels("amx");
  k.quantize = quantize_for_tiles;
  k.integer = tiled_integer;
  return k;
}

}  // namespace

const Kernels kKernelsAmx = amx_kernels();

}  // namespace kvasir::model::cpu
