// AMX: the integer products of 16 rows of activations by 16 of weights are one tile instruction a plane; the
// scales are applied by AVX-512 in the order of the other kernels, so the bits are theirs.
#include "model/cpu/vector_avx512.h"

// After the vectors it is written for.
#include "model/cpu/kernels_impl.h"

namespace kvasir::model::cpu {
namespace {

constexpr int kTileRows = 16;
// Fewer rows than this are not worth setting tiles up for.
constexpr int kLeastRows = 8;
// Blocks whose weights are unpacked at a time: they stay in the first-level cache.
constexpr int kChunk = 48;
// Rows whose sums wait between two chunks.
constexpr int kSpan = 128;

// Tiles 0 and 1 hold the sums of one product, 2 and 3 of the next; 4 and 5 activations, 6 weights.
void configure(int rows, int inputs) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } c;
  for (int t = 0; t < 4; ++t) c.bytes[t] = 64, c.rows[t] = uint8_t(rows);
  for (int t = 4; t < 6; ++t) c.bytes[t] = uint16_t(inputs), c.rows[t] = uint8_t(rows);
  c.bytes[6] = 64, c.rows[6] = uint8_t(inputs / 4);
  asm volatile("" : "+m"(c));  // gcc 12 believes that only the first eight bytes are read
  _tile_loadconfig(&c);
}

// A block's weights as the tile instruction wants them, which is how 8 bits lie already.
template <Packing P>
const uint8_t* tile_weights(const uint8_t* quants, int64_t blocks, uint8_t* room) {
  if constexpr (packing_info(P).quant_bytes == 512) return quants;
  for (int64_t b = 0; b < blocks; ++b) {
    V::W w = V::load4(quants + 256 * b);
    for (int c = 0; c < 8; ++c) _mm512_store_si512(room + 512 * b + 64 * c, w.c[c]);
  }
  return room;
}

// gcc's tile instructions want the tile's number written out.
#define KVASIR_TILE_PRODUCT(HIGH, LOW) \
  _tile_loadd(6, w, 64);               \
  _tile_loadd(4, x, stride);           \
  _tile_zero(HIGH);                    \
  _tile_dpbsud(HIGH, 4, 6);            \
  _tile_loadd(5, x + 32, stride);      \
  _tile_zero(LOW);                     \
  _tile_dpbsud(LOW, 5, 6);

// Begins the product of both planes of a block, or of half of one, into the tiles of a pair.
template <int Pair>
inline void begin_product(const uint8_t* w, const int8_t* x, int64_t stride) {
  asm volatile("" ::: "memory");  // what is loaded has been stored
  if constexpr (Pair == 0) {
    KVASIR_TILE_PRODUCT(0, 1)
  } else {
    KVASIR_TILE_PRODUCT(2, 3)
  }
}
#undef KVASIR_TILE_PRODUCT

using Sums = int32_t[2][kTileRows][kGroup];  // of the high plane, and of the low one

template <int Pair>
inline void end_product(Sums& to) {
  if constexpr (Pair == 0) {
    _tile_stored(0, to[0], 64);
    _tile_stored(1, to[1], 64);
  } else {
    _tile_stored(2, to[0], 64);
    _tile_stored(3, to[1], 64);
  }
}

// A row's sum with those of one block.
template <Packing P>
inline V::F scaled(const Sums* sums, int t, const Scales<P>& s, const QuantBlock& k, V::F a) {
  for (int h = 0; h <= packing_info(P).halves; ++h) {
    __m512i v =
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[h][0][t]), 8), _mm512_load_si512(sums[h][1][t]));
    if constexpr (P == Packing::n8_zero) v = _mm512_add_epi32(v, _mm512_set1_epi32(k.minus128));
    a = V::fma(V::mul(s.d[h], V::set_f(k.d)), V::to_float(v), a);
    if constexpr (P != Packing::n8_zero) a = V::fma(s.m[h], V::set_f(k.sum[h]), a);
  }
  return a;
}

// Up to 16 rows of activations against blocks [first, last) of a group.
struct TileWork {
  const uint8_t *w, *quants, *scales;  // w: from block `first` on, as tiles
  int64_t first, last;
  const int8_t* x;
  const QuantBlock* xb;
  int64_t cols;
  int rows;
  float (*acc)[kGroup];
  int64_t ahead;  // bytes to the same block of the next group, which is fetched meanwhile; 0: it has been
};

template <bool halves, int Turn>
[[gnu::always_inline]] inline void begin_block(const TileWork& k, int64_t b) {
  const uint8_t* w = k.w + 512 * (b - k.first);
  begin_product<halves ? 0 : Turn>(w, k.x + 64 * b, 2 * k.cols);
  if constexpr (halves) begin_product<1>(w + 256, k.x + 64 * b + 16, 2 * k.cols);
}

template <bool halves, int Turn>
[[gnu::always_inline]] inline void end_block(Sums (*sums)[halves + 1]) {
  end_product<halves ? 0 : Turn>(sums[Turn][0]);
  if constexpr (halves) end_product<1>(sums[Turn][halves]);
}

// Scales block b, while the products of the next are stored and those of the one after it are under way.
template <Packing P, int T, int Turn>
[[gnu::always_inline]] inline void step(const TileWork& k, int64_t b, Sums (*sums)[packing_info(P).halves + 1],
                                        V::F* registers) {
  constexpr PackingInfo info = packing_info(P);
  if (b + 1 < k.last) end_block<info.halves, 1 - Turn>(sums);
  if (b + 2 < k.last) begin_block<info.halves, Turn>(k, b + 2);
  if (k.ahead) {
#pragma GCC unroll 8
    for (int i = 0; i < info.quant_bytes; i += 64)
      __builtin_prefetch(k.quants + b * info.quant_bytes + k.ahead + i, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < info.scale_bytes; i += 64)
      __builtin_prefetch(k.scales + b * info.scale_bytes + k.ahead + i, 0, 2);
  }
  Scales<P> s;
  s.load(k.scales + b * info.scale_bytes, 0);
  const QuantBlock* xb = k.xb + b;
  const int64_t stride = k.cols / 32;
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) registers[t] = scaled(sums[Turn], t, s, xb[t * stride], registers[t]);
  if constexpr (T == 0)
    for (int t = 0; t < k.rows; ++t) {
      V::F a = b == 0 ? V::set_f(0.0f) : V::load_f(k.acc[t]);
      V::store_f(k.acc[t], scaled(sums[Turn], t, s, xb[t * stride], a));
    }
}

// acc[t] takes the blocks of T rows; T = 0: of k.rows, whose sums stay in memory.
template <Packing P, int T>
void tile(const TileWork& k) {
  constexpr bool halves = packing_info(P).halves;
  alignas(64) Sums sums[2][halves + 1];  // by turns
  V::F registers[T > 0 ? T : 1];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) registers[t] = k.first == 0 ? V::set_f(0.0f) : V::load_f(k.acc[t]);
  begin_block<halves, 0>(k, k.first);
  end_block<halves, 0>(sums);
  if (k.first + 1 < k.last) begin_block<halves, 1>(k, k.first + 1);
  for (int64_t b = k.first; b < k.last; b += 2) {
    step<P, T, 0>(k, b, sums, registers);
    if (b + 1 < k.last) step<P, T, 1>(k, b + 1, sums, registers);
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) V::store_f(k.acc[t], registers[t]);
}

template <Packing P>
void tile_rows(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
               int64_t y_stride, int valid, bool add) {
  constexpr PackingInfo info = packing_info(P);
  alignas(64) uint8_t room[info.quant_bytes == 512 ? 64 : 512 * kChunk];
  alignas(64) float acc[kSpan][kGroup];
  int64_t whole = rows % kTileRows < kLeastRows ? rows - rows % kTileRows : rows;
  int configured = 0;
  for (int64_t span = 0; span < whole; span += kSpan) {
    int64_t n = whole - span < kSpan ? whole - span : kSpan;
    for (int64_t b = 0; b < m.blocks; b += kChunk) {
      int64_t last = m.blocks - b < kChunk ? m.blocks : b + kChunk;
      const uint8_t* w = tile_weights<P>(m.quants(group) + b * info.quant_bytes, last - b, room);
      for (int64_t t = 0; t < n; t += kTileRows) {
        int some = int(n - t < kTileRows ? n - t : kTileRows);
        if (some != configured) configure(some, info.halves ? 16 : 32), configured = some;
        float* to = y + (span + t) * y_stride;
        if (last == m.blocks)
          for (int i = 0; i < some; ++i) __builtin_prefetch(to + i * y_stride, 1);
        int64_t row = first + span + t;
        auto run = some == kTileRows ? tile<P, kTileRows> : tile<P, 0>;
        run({w, m.quants(group), m.scales(group), b, last, x.q + 2 * row * x.cols, x.blocks + row * (x.cols / 32),
             x.cols, some, acc + t, span + t == 0 ? m.group_bytes : 0});
        if (last == m.blocks)
          for (int i = 0; i < some; ++i) store_lanes(V::load_f(acc[t + i]), 0, to + i * y_stride, valid, add);
      }
    }
  }
  _tile_release();
  if (whole < rows)
    integer_rows<P>(m, group, x, first + whole, rows - whole, y + whole * y_stride, y_stride, valid, add);
}

void tiled_integer(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
                   int64_t y_stride, int valid, bool add) {
  if (rows < kLeastRows) return integer(m, group, x, first, rows, y, y_stride, valid, add);
  switch (m.packing) {
    case Packing::n4_zero: return tile_rows<Packing::n4_zero>(m, group, x, first, rows, y, y_stride, valid, add);
    case Packing::n4_min: return tile_rows<Packing::n4_min>(m, group, x, first, rows, y, y_stride, valid, add);
    case Packing::n4_wide: return tile_rows<Packing::n4_wide>(m, group, x, first, rows, y, y_stride, valid, add);
    case Packing::n4_halves: return tile_rows<Packing::n4_halves>(m, group, x, first, rows, y, y_stride, valid, add);
    case Packing::n8_zero: return tile_rows<Packing::n8_zero>(m, group, x, first, rows, y, y_stride, valid, add);
    case Packing::n8_wide: return tile_rows<Packing::n8_wide>(m, group, x, first, rows, y, y_stride, valid, add);
    case Packing::n8_halves: return tile_rows<Packing::n8_halves>(m, group, x, first, rows, y, y_stride, valid, add);
    default: return;
  }
}

constexpr Kernels amx_kernels() {
  Kernels k = make_kernels("amx");
  k.integer = tiled_integer;
  return k;
}

}  // namespace

const Kernels kKernelsAmx = amx_kernels();

}  // namespace kvasir::model::cpu
