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
// Blocks whose products are under way while one is scaled.
constexpr int kAhead = 2;
// Rows whose sums wait between two chunks.
constexpr int kSpan = 128;

// Tiles 0 to 3 hold sums, 4 and 5 activations, 6 weights.
void configure(int rows, int inputs) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } c;
  for (int t = 0; t < 4; ++t) c.bytes[t] = 64, c.rows[t] = uint8_t(rows);
  for (int t = 4; t < 6; ++t) c.bytes[t] = uint16_t(inputs), c.rows[t] = uint8_t(rows);
  c.bytes[6] = 64, c.rows[6] = uint8_t(inputs / 4);
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
  _tile_zero(HIGH);                    \
  _tile_zero(LOW);                     \
  _tile_dpbsud(HIGH, 4, 6);            \
  _tile_dpbsud(LOW, 5, 6);             \
  _tile_stored(HIGH, high, 64);        \
  _tile_stored(LOW, low, 64)

// The sums of one block, or of its half H, for the configured rows: both planes, into memory.
template <bool halves, int H>
inline void multiply(const uint8_t* w, const int8_t* x, int64_t stride, int32_t* high, int32_t* low) {
  constexpr int inputs = halves ? 16 : 32;
  asm volatile("" ::: "memory");  // what is loaded has been stored
  _tile_loadd(6, w + 256 * H, 64);
  _tile_loadd(4, x + inputs * H, stride);
  _tile_loadd(5, x + 32 + inputs * H, stride);
  if constexpr (H == 0) {
    KVASIR_TILE_PRODUCT(0, 1);
  } else {
    KVASIR_TILE_PRODUCT(2, 3);
  }
}
#undef KVASIR_TILE_PRODUCT

// acc[t] takes blocks [first, last) of T rows; T = 0: of `rows`, whose sums stay in memory.
template <Packing P, int T>
void tile(const uint8_t* w, const uint8_t* scales, int64_t first, int64_t last, const int8_t* x, const QuantBlock* xb,
          int64_t cols, int rows, float (*acc)[kGroup]) {
  constexpr PackingInfo info = packing_info(P);
  constexpr int halves = info.halves;
  alignas(64) int32_t sums[4][halves + 1][2][kTileRows][kGroup];  // by turns, half, plane
  auto start = [&](int64_t b) {
    auto& s = sums[b & 3];
    const uint8_t* wb = w + 512 * (b - first);
    multiply<halves, 0>(wb, x + 64 * b, 2 * cols, s[0][0][0], s[0][1][0]);
    if constexpr (halves) multiply<true, 1>(wb, x + 64 * b, 2 * cols, s[halves][0][0], s[halves][1][0]);
  };
  V::F registers[T > 0 ? T : 1];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) registers[t] = V::load_f(acc[t]);
  for (int64_t b = first; b < first + kAhead && b < last; ++b) start(b);
  for (int64_t b = first; b < last; ++b) {
    if (b + kAhead < last) start(b + kAhead);  // runs while this block's sums are scaled
    Scales<P> s;
    s.load(scales + b * info.scale_bytes, 0);
    auto scaled = [&](int t, V::F a) {
      const QuantBlock& k = xb[t * (cols / 32) + b];
#pragma GCC unroll 2
      for (int h = 0; h <= halves; ++h) {
        __m512i v = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[b & 3][h][0][t]), 8),
                                     _mm512_load_si512(sums[b & 3][h][1][t]));
        if constexpr (P == Packing::n8_zero) v = _mm512_add_epi32(v, _mm512_set1_epi32(k.minus128));
        a = V::fma(V::mul(s.d[h], V::set_f(k.d)), V::to_float(v), a);
        if constexpr (P != Packing::n8_zero) a = V::fma(s.m[h], V::set_f(k.sum[h]), a);
      }
      return a;
    };
    if constexpr (T > 0) {
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) registers[t] = scaled(t, registers[t]);
    } else {
      for (int t = 0; t < rows; ++t) V::store_f(acc[t], scaled(t, V::load_f(acc[t])));
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) V::store_f(acc[t], registers[t]);
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
    __builtin_memset(acc, 0, size_t(n) * sizeof acc[0]);
    for (int64_t b = 0; b < m.blocks; b += kChunk) {
      int64_t last = m.blocks - b < kChunk ? m.blocks : b + kChunk;
      const uint8_t* w = tile_weights<P>(m.quants(group) + b * info.quant_bytes, last - b, room);
      for (int64_t t = 0; t < n; t += kTileRows) {
        int some = int(n - t < kTileRows ? n - t : kTileRows);
        if (some != configured) configure(some, info.halves ? 16 : 32), configured = some;
        int64_t row = first + span + t;
        auto run = some == kTileRows ? tile<P, kTileRows> : tile<P, 0>;
        run(w, m.scales(group), b, last, x.q + 2 * row * x.cols, x.blocks + row * (x.cols / 32), x.cols, some, acc + t);
      }
    }
    for (int64_t t = 0; t < n; ++t) store_lanes(V::load_f(acc[t]), 0, y + (span + t) * y_stride, valid, add);
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
