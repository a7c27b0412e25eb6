// float16 caches on matrix units: bfloat16 products of the two parts of an element (amx_halves_parts.h) by the parts of
// a query, which stand beside each other as columns, or by the two of a weight, which stand below each other as rows:
// one product takes both parts of eight rows.
//
// The sums of a row, fixed whoever shares the call:
//   score[j] = ((the sum for the query's first part + for its second) + for its third) * what its unit is worth, each
//              over 32 elements at a time, over parts of the key; the third meets the keys' upper parts only
//   out[d]   = out[d] * correction + (the sum for the weights' first parts + for their second), each over 32 keys at a
//              time, over parts of the value
#include "attention/cpu/amx_halves.h"

#include "core/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "attention/cpu/amx_halves_feed.h"

namespace kvasir::attention::cpu {
namespace {

// 2^n, n in [-126, 127].
inline float power_of_two(int n) {
  const uint32_t bits = uint32_t(n + 127) << 23;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// The largest power of two in a row, of those that are 1 or more.
int size_of(const float* q, int n) {
  __m512i most = _mm512_setzero_si512();
  for (int d = 0; d < n; d += 16)
    most = _mm512_max_epu32(most, _mm512_srli_epi32(_mm512_slli_epi32(_mm512_loadu_si512(q + d), 1), 24));
  const int power = int(_mm512_reduce_max_epu32(most)) - 127;
  return power < 0 ? 0 : power > 127 ? 127 : power;
}

// 32 elements, times 2^power, as three parts.
inline void query_parts(const float* q, int power, __m512i (&parts)[3]) {
  const __m512 by = _mm512_set1_ps(power_of_two(power));
  __m512 a = _mm512_mul_ps(_mm512_loadu_ps(q), by), b = _mm512_mul_ps(_mm512_loadu_ps(q + 16), by);
  for (__m512i& part : parts) {
    part = upper_halves(a, b);
    a = _mm512_sub_ps(a, top_half(a)), b = _mm512_sub_ps(b, top_half(b));
  }
}

// Queries as the second operand: a register's row is a pair of elements, its columns are eight rows' first parts and
// their second.
void begin(const float* q, int rows, int q_stride, const CacheKind& kind, uint8_t* memory) {
  const int groups = groups_of(rows), chunks = kind.head_dim / 32;
  AmxHalvesScratch& m = cut(memory);
  m.chunks = chunks;
  m.thirds = m.key_ready = m.value_ready = false;
  m.many = groups > 1, m.key_stage = m.value_stage = 0;
  m.worth = reinterpret_cast<float*>(memory + (sizeof(AmxHalvesScratch) + 63) / 64 * 64);
  m.queries = reinterpret_cast<uint8_t*>(m.worth) + (groups * kTogether * 4 + 63) / 64 * 64;
  m.blocks = m.queries + groups * chunks * kQueryUnits * kUnit;
  m.weights = m.blocks + (2 * chunks + kValueBlocks) * kBlockBytes;
  m.sums = reinterpret_cast<float*>(m.weights + groups * kWeightUnits * kUnit);
  __builtin_memset(m.weights, 0, size_t(groups) * kWeightUnits * kUnit);
  __m512i any_third = _mm512_setzero_si512();
  for (int g = 0; g < groups; ++g) {
    const int here = rows - g * kTogether < kTogether ? rows - g * kTogether : kTogether;
    int size[kTogether] = {};
    for (int r = 0; r < here; ++r) {
      size[r] = size_of(q + (g * kTogether + r) * q_stride, kind.head_dim);
      m.worth[g * kTogether + r] = power_of_two(size[r]);
    }
    for (int c = 0; c < chunks; ++c) {
      __m512i unit[kQueryUnits][16] = {};
      for (int r = 0; r < here; ++r) {
        const float* at = q + (g * kTogether + r) * q_stride + c * 32;
        __m512i high[3], low[3];
        query_parts(at, kHighPower - size[r], high);
        query_parts(at, kLowPower - size[r], low);
        unit[0][r] = high[0], unit[0][r + kTogether] = high[1];
        unit[1][r] = low[0], unit[1][r + kTogether] = low[1];
        unit[2][r] = high[2], unit[3][r] = low[2];
        any_third = _mm512_or_si512(any_third, high[2]);
      }
      for (int u = 0; u < kQueryUnits; ++u) {
        transpose(unit[u]);
        uint8_t* to = m.queries + ((g * chunks + c) * kQueryUnits + u) * kUnit;
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, unit[u][i]);
      }
    }
  }
  m.thirds = _mm512_test_epi16_mask(any_third, _mm512_set1_epi16(0x7fff)) != 0;
  configure();
}

// ---- scores ---------------------------------------------------------------------------------------

// Sixteen keys by sixteen columns: their first eight columns, the others added to them, keys i and i + 8 together.
inline __m512 two_keys(const float* sums) {
  const __m512d low = _mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_load_pd(reinterpret_cast<const double*>(sums))),
                                         _mm256_load_pd(reinterpret_cast<const double*>(sums + 8 * 16)), 1);
  return _mm512_castpd_ps(low);
}

// Scores of eight rows by sixteen keys, from sums of keys by columns.
inline void transpose_sums(const float* sums, const float* thirds, __m512 (&rows)[kTogether]) {
  __m512 x[8];
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_add_ps(two_keys(sums + i * 16), two_keys(sums + i * 16 + 8));
    if (thirds) x[i] = _mm512_add_ps(x[i], two_keys(thirds + i * 16));
  }
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  __m512d four[2][4];  // lanes of four keys: columns 0 to 3, and 4 to 7 beside them
  for (int h = 0; h < 2; ++h) {
    const __m512* a = x + 4 * h;
    const __m512d p = _mm512_castps_pd(_mm512_unpacklo_ps(a[0], a[1])),
                  r = _mm512_castps_pd(_mm512_unpacklo_ps(a[2], a[3]));
    const __m512d s = _mm512_castps_pd(_mm512_unpackhi_ps(a[0], a[1])),
                  t = _mm512_castps_pd(_mm512_unpackhi_ps(a[2], a[3]));
    four[h][0] = _mm512_unpacklo_pd(p, r), four[h][1] = _mm512_unpackhi_pd(p, r);
    four[h][2] = _mm512_unpacklo_pd(s, t), four[h][3] = _mm512_unpackhi_pd(s, t);
  }
  for (int r = 0; r < 4; ++r) {
    rows[r] = _mm512_castpd_ps(_mm512_permutex2var_pd(four[0][r], first, four[1][r]));
    rows[r + 4] = _mm512_castpd_ps(_mm512_permutex2var_pd(four[0][r], second, four[1][r]));
  }
}

// Sums that the matrix unit may still be at.
struct PendingSums {
  const float* sums = nullptr;
  int group = 0, key = 0;
};

struct ScoreRows {
  int row, rows;
  float* s;
  const float* worth;
  bool thirds;
  void finish(const PendingSums& w) const {
    if (!w.sums) return;
    for (int block = 0; block < 2; ++block) {
      __m512 transposed[kTogether];
      transpose_sums(w.sums + block * 256, thirds ? w.sums + (2 + block) * 256 : nullptr, transposed);
      for (int i = 0; i < kTogether; ++i) {
        const int r = w.group * kTogether + i;
        if (r < row || r >= row + rows) continue;
        _mm512_storeu_ps(s + (r - row) * kTile + w.key + block * 16,
                         _mm512_mul_ps(transposed[i], _mm512_set1_ps(worth[r])));
      }
    }
  }
};

// 32 elements of 32 keys by eight rows; beside() is what vectors do while the matrix unit is at a product.
template <class F>
[[gnu::always_inline]] inline void multiply_keys(const Block& keys, const uint8_t* q, bool thirds, const F& beside) {
  const int parts = *keys.has_apart ? kHalfParts : 2;
  tile_load<6>(q);
  each_sum(0, 2, [&](auto t) {
    tile_load<4 + t.value>(keys.at + t.value * kUnit);
    tile_product<t.value, 4 + t.value, 6>();
    beside();
  });
  if (thirds) {
    tile_load<7>(q + 2 * kUnit);
    each_sum(0, 2, [&](auto t) { tile_product<2 + t.value, 4 + t.value, 7>(); });
  }
  tile_load<6>(q + kUnit);
  for (int part = 1; part < parts; ++part) {
    if (thirds && part == 2) tile_load<7>(q + 3 * kUnit);
    each_sum(0, 2, [&](auto t) {
      tile_load<4 + t.value>(keys.at + part * kPartBytes + t.value * kUnit);
      tile_product<t.value, 4 + t.value, 6>();
      if (thirds && part == 2) tile_product<2 + t.value, 4 + t.value, 7>();
      beside();
    });
  }
}

template <DType T>
void scores_of(int row, int rows, const KvRows& k, const KvRows& v, float* s, AmxHalvesScratch& m, Prefetcher& ahead) {
  const int chunks = m.chunks, first = row / kTogether, last = (row + rows - 1) / kTogether;
  const ScoreRows to = {row, rows, s, m.worth, m.thirds};
  KeyFeed<T> feed(k, m);
  if (m.key_ready)
    feed.pass();
  else
    make_whole(feed, ahead);
  m.key_ready = false;
  if (m.many)
    while (feed.chunk > 0) make_whole(feed, ahead);

  PendingSums waiting;
  int sums = 0;
  for (int half = k.begin / 32; half * 32 < k.end; ++half, m.key_stage += uint32_t(chunks))
    for (int g = first; g <= last; ++g) {
      each_sum(0, 2, [](auto t) { tile_zero<t.value>(); });
      if (m.thirds) each_sum(0, 2, [](auto t) { tile_zero<2 + t.value>(); });
      for (int c = 0; c < chunks; ++c) {
        const Block keys = m.of_keys(m.key_stage + uint32_t(c));
        const uint8_t* q = m.queries + (g * chunks + c) * kQueryUnits * kUnit;
        // Vectors make the parts that come next while the matrix unit is at those.
        if (half * 32 + 32 >= k.end && g == last && c + 1 == chunks) {
          if (!m.many) m.value_stage = m.key_stage + uint32_t(chunks);
          ValueFeed<T> values(v, m);
          values.start();
          multiply_keys(keys, q, m.thirds, [&] { values.at_work.some(ahead); });
        } else if (feed.busy() && (!m.many || feed.half == half + 1)) {
          feed.start();
          multiply_keys(keys, q, m.thirds, [&] { feed.at_work.some(ahead); });
        } else {
          multiply_keys(keys, q, m.thirds, [] {});
        }
      }
      to.finish(waiting);
      float* out = m.sums + sums * 4 * 256;
      sums ^= 1;
      waiting = {out, g, half * 32};
      each_sum(0, 2, [&](auto t) { tile_store<t.value>(out + t.value * 256); });
      if (m.thirds) each_sum(0, 2, [&](auto t) { tile_store<2 + t.value>(out + (2 + t.value) * 256); });
    }
  m.value_ready = true;
  to.finish(waiting);
}

// ---- values ---------------------------------------------------------------------------------------

inline __m512 rounded(__m512 x) {  // to the nearest bfloat16
  return top_half(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000))));
}
// The upper halves of a and b: a's below b's.
inline __m512i pairs(__m512 a, __m512 b) {
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b),
                                   _mm512_set1_epi32(int(0xffff0000)), 0xf8 /* a | (b & c) */);
}

void pack_weights(const float* p, int rows, int from, int to, uint8_t* weights) {
  const __m512 up = _mm512_set1_ps(power_of_two(kHighPower)),
               down = _mm512_set1_ps(power_of_two(kLowPower - kHighPower));
  for (int r = 0; r < rows; ++r)
    for (int h = from; h < to; ++h) {
      const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(p + r * kTile + h * 32), up);
      const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(p + r * kTile + h * 32 + 16), up);
      const __m512 first_a = rounded(a), first_b = rounded(b);
      const __m512 second_a = _mm512_sub_ps(a, first_a), second_b = _mm512_sub_ps(b, first_b);
      const __m512 third_a = rounded(second_a), third_b = rounded(second_b);
      uint8_t* out = weights + ((r / kTogether * 2 + h) * 2) * kUnit + r % kTogether * 64;
      constexpr int kSecond = kTogether * 64;
      _mm512_store_si512(out, pairs(first_a, first_b));
      _mm512_store_si512(out + kSecond, pairs(third_a, third_b));
      _mm512_store_si512(out + kUnit, pairs(_mm512_mul_ps(first_a, down), _mm512_mul_ps(first_b, down)));
      _mm512_store_si512(out + kUnit + kSecond, pairs(_mm512_mul_ps(third_a, down), _mm512_mul_ps(third_b, down)));
    }
}

// The weights of eight rows stay in registers 4 to 7.
inline void load_weights(const uint8_t* at, int from, int to) {
  each_sum(from, to, [&](auto h) {
    tile_load<4 + 2 * h.value>(at + h.value * 2 * kUnit);
    tile_load<5 + 2 * h.value>(at + (h.value * 2 + 1) * kUnit);
  });
}

// Weights of 32 keys by their 32 elements.
template <int kHalf, class F>
[[gnu::always_inline]] inline void multiply_values(const Block& values, const F& beside) {
  constexpr int kWeights = 4 + 2 * kHalf;
  const int parts = *values.has_apart ? kHalfParts : 2;
  each_sum(0, 2, [&](auto d) {
    tile_load<2 + d.value>(values.at + d.value * kUnit);
    tile_product<d.value, kWeights, 2 + d.value>();
    beside();
  });
  for (int part = 1; part < parts; ++part)
    each_sum(0, 2, [&](auto d) {
      tile_load<2 + d.value>(values.at + part * kPartBytes + d.value * kUnit);
      tile_product<d.value, kWeights + 1, 2 + d.value>();
      beside();
    });
}

// Where sums go that the matrix unit may still be at: eight rows of 32 elements.
struct Adding {
  const float* sums = nullptr;
  int rows = 0;
  const float* correction = nullptr;
  float* o = nullptr;

  void finish(int o_stride) const {
    if (!sums) return;
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                  second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int r = 0; r < rows; ++r) {
      __m512d x[2];
      for (int d = 0; d < 2; ++d)
        x[d] = _mm512_castps_pd(_mm512_add_ps(_mm512_load_ps(sums + d * 256 + r * 16),
                                              _mm512_load_ps(sums + d * 256 + (r + kTogether) * 16)));
      const __m512 by = _mm512_set1_ps(correction[r]);
      float* at = o + r * o_stride;
      const __m512 low = _mm512_castpd_ps(_mm512_permutex2var_pd(x[0], first, x[1]));
      const __m512 high = _mm512_castpd_ps(_mm512_permutex2var_pd(x[0], second, x[1]));
      _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_loadu_ps(at), by, low));
      _mm512_storeu_ps(at + 16, _mm512_fmadd_ps(_mm512_loadu_ps(at + 16), by, high));
    }
  }
};

template <DType T>
void accumulate_of(const float* p, int rows, const KvRows& v, const KvRows* next_keys, const float* correction,
                   float* o, int o_stride, AmxHalvesScratch& m, Prefetcher& ahead) {
  const int from = v.begin / 32, to = (v.end + 31) / 32, chunks = m.chunks, groups = groups_of(rows);
  ValueFeed<T> feed(v, m);
  int made = 0;
  if (m.value_ready) feed.pass(), made = 1;
  for (const int lead = m.many ? to - from : 1; made < lead; ++made) make_whole(feed, ahead);
  m.value_ready = false;
  pack_weights(p, rows, from, to, m.weights);
  fence();
  Adding adding;
  int sums = 0;
  for (int c = 0; c < chunks; ++c, m.value_stage += uint32_t(to - from))
    for (int g = 0; g < groups; ++g) {
      if (c == 0 || groups > 1) load_weights(m.weights + g * kWeightUnits * kUnit, from, to);
      tile_zero<0>();
      tile_zero<1>();
      each_sum(from, to, [&](auto h) {
        const Block values = m.of_values(m.value_stage + uint32_t(h.value - from));
        if (g == 0 && feed.busy()) {
          feed.start();
          multiply_values<h.value>(values, [&] { feed.at_work.some(ahead); });
        } else if (!m.many && next_keys && h.value + 1 == to) {
          m.key_stage = feed.stage, m.key_ready = true;
          KeyFeed<T> keys(*next_keys, m);
          keys.start();
          multiply_values<h.value>(values, [&] { keys.at_work.some(ahead); });
        } else {
          multiply_values<h.value>(values, [] {});
        }
      });
      float* at = m.sums + sums * 4 * 256;
      sums ^= 1;
      tile_store<0>(at);
      tile_store<1>(at + 256);
      adding.finish(o_stride);
      const int left = rows - g * kTogether;
      adding = {at, left < kTogether ? left : kTogether, correction + g * kTogether,
                o + g * kTogether * o_stride + c * 32};
    }
  if (!m.many) m.key_stage = m.value_stage;
  adding.finish(o_stride);
}

void scores(int row, int rows, const KvRows& k, const KvRows& v, float* s, uint8_t* memory, Prefetcher* ahead) {
  if (k.dtype == DType::f16) return scores_of<DType::f16>(row, rows, k, v, s, cut(memory), *ahead);
  scores_of<DType::f32>(row, rows, k, v, s, cut(memory), *ahead);
}
void accumulate(const float* p, int rows, const KvRows& v, const KvRows* next_keys, const float* correction, float* o,
                int o_stride, uint8_t* memory, Prefetcher* ahead) {
  if (v.dtype == DType::f16)
    return accumulate_of<DType::f16>(p, rows, v, next_keys, correction, o, o_stride, cut(memory), *ahead);
  accumulate_of<DType::f32>(p, rows, v, next_keys, correction, o, o_stride, cut(memory), *ahead);
}

bool takes(const CacheKind& kind) {
  return kind.dtype == DType::f16 && kind.head_dim % 32 == 0 && kind.head_dim <= 32 * kMostChunks;
}
// A decode at four heads takes .9 of the tokens that it has with vectors, at eight heads as many or more.
bool pays(const CacheKind& kind) { return kind.query_heads >= 8; }
int stops(int head_dim) { return head_dim / 2; }  // one for eight keys' 32 elements
Reach reach(const KvRows&) { return Reach::all; }

}  // namespace

const TileKernel* amx_halves_kernel() {
  static const TileKernel matrix = {takes, pays, bytes, begin, release, scores, accumulate, stops, reach};
  return &matrix;
}

}  // namespace kvasir::attention::cpu
#else
namespace kvasir::attention::cpu {
const TileKernel* amx_halves_kernel() { return nullptr; }
}  // namespace kvasir::attention::cpu
#endif
