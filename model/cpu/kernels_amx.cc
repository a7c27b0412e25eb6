// AMX: products of tiles of 16 rows, by the weights' packing. AVX-512's kernels do single rows and all else.
#include <new>

#include "model/cpu/amx_blocks.h"
#include "model/cpu/amx_few_rows.h"
#include "model/cpu/amx_pairs.h"
#include "model/cpu/amx_row_sums.h"
#include "model/cpu/few_rows_avx512.h"

namespace kvasir::model::cpu {
namespace {

// What amx_few_rows.h multiplies: its tiles of 8 bits are of two blocks, as they lie.
bool are_few(const PackingInfo& info, const QuantRows& x) {
  return x.rows <= 8 && (info.of_rows ? x.rows > 2 : x.rows > 1 && (info.halves || x.cols % 64 == 0));
}
// Fewer rows are not worth setting tiles up for.
bool are_plain(const PackingInfo& info, const QuantRows& x) { return x.rows < 3 && !are_few(info, x); }

// Tiles 0 to 5 are as high as there are rows. `halves`: activations are 32 bytes wide and weights 8 high.
void configure(bool halves, int64_t rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } c;
  for (int t = 0; t < 8; ++t) c.bytes[t] = 64, c.rows[t] = uint8_t(t < 6 ? rows : kTileRows);
  if (halves)
    for (int t = 4; t < 6; ++t) c.bytes[t] = 32, c.rows[t + 2] = 8;
  asm volatile("" : "+m"(c));  // gcc 12 believes that only the first eight bytes are read
  _tile_loadconfig(&c);
}

template <Packing P>
void tiles(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first, int64_t rows,
           float* y, int64_t y_stride, bool add) {
  if constexpr (packing_info(P).of_rows) {
    if (x.rows > kTileRows) {
      for (int64_t g = 0; g < groups; ++g) sum_pairs<P>(m, group + g, x, first, rows, y + g * kGroup, y_stride, add);
    } else {
      configure(false, rows);
      sum_one_tile<P>(m, group, groups, x, first, rows, y, y_stride, add);
    }
  } else {
    configure(true, kTileRows);
    if (rows > kTileRows)
      for (int64_t g = 0; g < groups; ++g) many_tiles<P>(m, group + g, x, first, rows, y + g * kGroup, y_stride, add);
    else
      one_tile<P>(m, group, groups, x, first, rows, y, y_stride, add);
  }
  _tile_release();
}

template <Packing P>
void few(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, float* y, int64_t y_stride,
         bool add) {
  constexpr bool of_rows = packing_info(P).of_rows;
  with_few(x.rows, [&]<int R>() {
    if constexpr (of_rows && R > 2)
      few_rows<P, R>(m, group, groups, x, x.rows, y, y_stride, add);
    else if constexpr (!of_rows && R > 1)
      few_rows_of_blocks<P, R>(m, group, groups, x, x.rows, y, y_stride, add);
  });
  _tile_release();
}

// Groups of stored rows, expanded as far as they fit a second-level cache beside what else there is.
class Expanded {
 public:
  ~Expanded() { ::operator delete(room_, kLine); }
  template <Packing P, class F>
  void each(const PackedMatrix& m, int64_t group, int64_t groups, const F& f) {
    constexpr PackingInfo info = packing_info(P);
    PackedMatrix whole = m;
    whole.stored = Stored::none;
    whole.group_bytes = (m.blocks * (info.quant_bytes + info.scale_bytes) + 63) & ~int64_t(63);
    if (info.of_rows) whole.group_bytes += kGroup * 4;
    const int64_t most = whole.group_bytes < kBytes ? kBytes / whole.group_bytes : 1;
    reserve(size_t(most * whole.group_bytes));
    for (int64_t at = group; at < group + groups; at += most) {
      const int64_t some = group + groups - at < most ? group + groups - at : most;
      for (int64_t g = 0; g < some; ++g) expand_group<P>(m, at + g, room_ + g * whole.group_bytes, whole.group_bytes);
      whole.rows = m.rows - at * kGroup, whole.groups = some, whole.data = room_;
      f(whole, some, (at - group) * kGroup);
    }
  }

 private:
  static constexpr int64_t kBytes = 256 << 10;
  static constexpr std::align_val_t kLine{64};
  void reserve(size_t bytes) {
    if (room_ && size_ >= bytes) return;
    ::operator delete(room_, kLine);
    room_ = nullptr, size_ = 0;
    room_ = static_cast<uint8_t*>(::operator new(bytes, kLine));
    size_ = bytes;
  }
  uint8_t* room_ = nullptr;
  size_t size_ = 0;
};

void tiled_integer(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first,
                   int64_t rows, float* y, int64_t y_stride, bool add) {
  const PackingInfo info = packing_info(m.packing);
  with_packing(m.packing, [&]<Packing P>() {
    if constexpr (kMayBeStored<P>)
      if (m.narrow() && !are_plain(info, x)) {
        thread_local Expanded expanded;
        return expanded.each<P>(m, group, groups, [&](const PackedMatrix& whole, int64_t some, int64_t column) {
          tiled_integer(whole, 0, some, x, first, rows, y + column, y_stride, add);
        });
      }
    if constexpr (packing_info(P).of_rows)
      if (x.rows == 2 && !m.narrow()) return few_rows_by_vectors<P>(m, group, groups, x, first, rows, y, y_stride, add);
    if (are_plain(info, x)) return integer(m, group, groups, x, first, rows, y, y_stride, add);
    if constexpr (has_integers(P)) {
      if (are_few(info, x))
        few<P>(m, group, groups, x, y, y_stride, add);
      else
        tiles<P>(m, group, groups, x, first, rows, y, y_stride, add);
    }
  });
}

// Integers as two bytes: x = 256 * high + low, low from 0 to 255. Nobody needs their sums.
struct WholeBytes : Blocks {
  static void quantize_block(const float* x, float inverse, int8_t* high, int8_t* low) {
    const __m512i v = quantize_words(x, inverse);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_cvtepi16_epi8(_mm512_srai_epi16(v, 8)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_cvtepi16_epi8(v));
  }
  static void plane_sums(const int8_t*, const int8_t*, int32_t*) {}
};

// As tiles want it: blocks of 16 rows, where there are enough.
void quantize_for_tiles(const float* x, Packing packing, const QuantRows& to, int64_t row) {
  const PackingInfo info = packing_info(packing);
  if (are_plain(info, to)) return quantize(x, packing, to, row);
  if (are_few(info, to))
    return with_packing(packing, [&]<Packing P>() {
      if constexpr (has_integers(P))
        with_few(to.rows, [&]<int R>() {
          if constexpr (R > (packing_info(P).of_rows ? 2 : 1)) quantize_few<P, R>(x, to, row);
        });
    });
  if (info.of_rows && to.rows > kTileRows) return quantize_pair_row(x, to, row);
  const int64_t t = row % kTileRows, first = row - t, blocks = to.cols / 32;
  if (info.of_rows) {  // steps of two blocks
    const int64_t steps = (blocks + 1) / 2;
    int8_t* tile = to.q + first / kTileRows * steps * kStepBytes + 64 * t;
    auto place = [&](int64_t b) {
      int8_t* high = tile + b / 2 * kStepBytes + 32 * (b % 2);
      return BlockPlace{high, high + kStepBytes / 2, 0, 0};
    };
    quantize_to<WholeBytes>(x, to, row, place, [](int64_t, const BlockPlace&, const int32_t*) {});
    if (blocks % 2 != 0) {
      const BlockPlace rest = place(blocks);
      for (int8_t* half : {rest.high, rest.low})
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(half), _mm256_setzero_si256());
    }
  } else {
    const int64_t parts = info.halves ? 2 : 1;
    quantize_to<Blocks>(
        x, to, row,
        [&](int64_t b) {
          int8_t* q = to.q + 2 * first * to.cols + 1024 * b + 64 * t;
          return BlockPlace{q, q + 32, (first * blocks + kTileRows * b) * parts + t, kTileRows};
        },
        [&](int64_t, const BlockPlace& at, const int32_t* sums) { put_sums(info, at, sums, to); });
  }
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
