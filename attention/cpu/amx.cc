// Matrix units: AMX multiplies 16 x 32 by 32 x 16 bfloat16 in 16 cycles, so that one query head costs what sixteen do.
// Numbers are split into bfloat16 parts (amx_convert.h), and every product of parts that matters is taken; sums are
// float32. Scores are keys times queries, as keys lie; outputs are weights times values, whose keys stand in pairs.
//
// The sums of a row, fixed whoever shares the call:
//   score[j] = over 32 elements at a time, over parts of the query, over parts of the key
//   out[d]   = out[d] * correction + (over 32 keys at a time, over parts of the weight, over parts of the value)
// Weights are rounded to 16 bits; a tensor's scale goes into them before. Bytes and float16 have products of their own:
// amx_bytes.cc, amx_halves.cc.
#include "attention/cpu/amx_bytes.h"
#include "attention/cpu/amx_halves.h"
#include "attention/cpu/kernels.h"
#include "core/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "attention/cpu/amx_feed.h"

namespace kvasir::attention::cpu {
namespace {

// Queries as the second operand: a register's row is a pair of elements, its columns are sixteen rows.
void begin(const float* q, int rows, int q_stride, const CacheKind& kind, uint8_t* memory) {
  const int tiles = (rows + 15) / 16, chunks = kind.head_dim / 32;
  AmxScratch& m = cut(memory);
  m.chunks = chunks, m.query_parts = 1;
  m.keys_ready = m.values_ready = false;
  m.many = tiles > 1, m.key_stage = 0;
  m.queries = memory + (sizeof(AmxScratch) + 63) / 64 * 64;
  m.keys = m.queries + tiles * chunks * kQueryParts * kUnit;
  m.values = m.keys + key_bytes(chunks);
  m.weights = m.values + 2 * kValueBlock;
  m.sums = reinterpret_cast<float*>(m.weights + tiles * 2 * kWeightParts * kUnit);
  alignas(64) int32_t even[16], odd[16];
  for (int i = 0; i < 16; ++i)
    even[i] = element_of_slot(kind.dtype, 2 * i), odd[i] = element_of_slot(kind.dtype, 2 * i + 1);
  const __m512i first = _mm512_load_si512(even), second = _mm512_load_si512(odd);
  __m512i any[kQueryParts] = {};
  for (int tile = 0; tile < tiles; ++tile)
    for (int c = 0; c < chunks; ++c) {
      __m512i transposed[kQueryParts][16];
      for (int n = 0; n < 16; ++n) {
        __m512i parts[kQueryParts] = {};
        if (tile * 16 + n < rows) {
          const float* at = q + (tile * 16 + n) * q_stride + c * 32;
          const __m512 low = _mm512_loadu_ps(at), high = _mm512_loadu_ps(at + 16);
          split<kQueryParts>(_mm512_permutex2var_ps(low, first, high), _mm512_permutex2var_ps(low, second, high),
                             parts);
        }
        for (int p = 0; p < kQueryParts; ++p) {
          transposed[p][n] = parts[p];
          any[p] = _mm512_or_si512(any[p], parts[p]);
        }
      }
      for (int p = 0; p < kQueryParts; ++p) {
        transpose(transposed[p]);
        uint8_t* to = m.queries + ((tile * chunks + c) * kQueryParts + p) * kUnit;
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, transposed[p][i]);
      }
    }
  // Parts that are all zero add nothing: queries that were float16 have two.
  for (int p = 1; p < kQueryParts; ++p)
    if (_mm512_test_epi16_mask(any[p], _mm512_set1_epi16(0x7fff))) m.query_parts = p + 1;
  configure();
}

// A scale for the whole tensor, which the sums meet.
constexpr bool is_scaled(DType type) { return type == DType::f8_e4m3; }
constexpr bool matters(int a, int b) { return a + b <= 2; }

// ---- scores ---------------------------------------------------------------------------------------

// Sums of sixteen keys by sixteen rows by the scale, transposed: rows [low, high) of s get sixteen keys each. Four rows
// at a time, for there may be no more.
template <DType T>
inline void transpose_sums(const float* sums, float scale, float* s, int low, int high) {
  for (int r = low / 4 * 4; r < high; r += 4) {
    __m512 four[4];
    transpose_four(sums + r, four);
    for (int i = 0; i < 4; ++i)
      if (r + i >= low && r + i < high)
        _mm512_storeu_ps(s + (r + i) * kTile, is_scaled(T) ? _mm512_mul_ps(four[i], _mm512_set1_ps(scale)) : four[i]);
  }
}

template <DType T>
void scores_of(int row, int rows, const KvRows& k, const KvRows& v, float* s, AmxScratch& m, Prefetcher& ahead) {
  using Feed = KeyFeed<T>;
  constexpr int kParts = parts_of(T), kWide = Feed::kWide;
  const int chunks = m.chunks, query_parts = m.query_parts;
  Feed feed(k, m);
  feed.first(m.key_stage);
  if (!m.keys_ready) feed.rest(ahead);
  m.keys_ready = false;
  feed.next();
  ValueFeed<T> values(v, m);
  values.start(0);
  m.values_ready = true;

  int stage = m.key_stage;
  for (int half = feed.from / 32; half * 32 < feed.to; ++half) {
    const int from = half * 32 < feed.from ? 1 : 0, to = half * 32 + 16 < feed.to ? 2 : 1;
    for (int tile = row / 16; tile * 16 < row + rows; ++tile) {
      const bool feeds = tile * 16 <= row;
      const int low = row > tile * 16 ? row - tile * 16 : 0;
      const int high = row + rows < tile * 16 + 16 ? row + rows - tile * 16 : 16;
      each_sum(from, to, [](auto t) { tile_zero<t.value>(); });
      for (int c = 0; c < chunks; ++c) {
        const uint8_t* q = m.queries + (tile * chunks + c) * kQueryParts * kUnit;
        const uint8_t* keys = Feed::room(m.keys, stage, m.many, chunks, c);
        auto multiply = [&](auto& beside) {
          for (int b = 0; b < query_parts; ++b) {
            tile_load<6>(q + b * kUnit);
            for (int a = 0; a < kParts && matters(a, b); ++a)
              each_sum(from, to, [&](auto t) {
                constexpr int kKeys = 2 + decltype(t)::value;
                if (a == 0) {
                  if (b == 0 || kParts > 2) tile_load<kKeys>(keys + t.value * kUnit);
                  tile_product<t.value, kKeys, 6>();
                } else {
                  if (b == 0 || kParts > 2) tile_load<kKeys + 2>(keys + (a * 2 + t.value) * kUnit);
                  tile_product<t.value, kKeys + 2, 6>();
                }
                beside.some(ahead);
              });
          }
        };
        if (feed.busy())
          multiply(feed);
        else
          multiply(values);
        if (c + 1 == chunks || (c + 1) % kWide == 0) {
          if (feeds) {
            feed.rest(ahead);
            feed.next();
          }
          if (!m.many) ++stage;
        }
      }
      each_sum(from, to, [&](auto t) { tile_store<t.value>(m.sums + t.value * 256); });
      if (half * 32 + 32 >= feed.to) values.rest(ahead);
      for (int t = from; t < to; ++t)
        transpose_sums<T>(m.sums + t * 256, k.scale, s + (tile * 16 - row) * kTile + half * 32 + t * 16, low, high);
    }
    if (m.many) ++stage;
  }
  m.key_stage = stage;
}

// ---- values ---------------------------------------------------------------------------------------

inline __m512 rounded(__m512 x) {  // to the nearest bfloat16
  return top_half(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000))));
}

template <DType T>
void pack_weights(const float* p, int rows, int from, int to, float scale, uint8_t* weights) {
  for (int r = 0; r < rows; ++r)
    for (int h = from; h < to; ++h) {
      __m512 a = _mm512_loadu_ps(p + r * kTile + h * 32), b = _mm512_loadu_ps(p + r * kTile + h * 32 + 16);
      if (is_scaled(T)) a = _mm512_mul_ps(a, _mm512_set1_ps(scale)), b = _mm512_mul_ps(b, _mm512_set1_ps(scale));
      uint8_t* out = weights + (r / 16 * 2 + h) * kWeightParts * kUnit + r % 16 * 64;
      const __m512 high_a = rounded(a), high_b = rounded(b);
      _mm512_store_si512(out, pair(high_a, high_b));
      _mm512_store_si512(out + kUnit, pair(rounded(_mm512_sub_ps(a, high_a)), rounded(_mm512_sub_ps(b, high_b))));
    }
}

// The weights of sixteen rows stay in registers 4 to 7.
inline void load_weights(const uint8_t* at, int from, int to) {
  each_sum(from, to, [&](auto h) {
    tile_load<4 + 2 * h.value>(at + h.value * kWeightParts * kUnit);
    tile_load<5 + 2 * h.value>(at + (h.value * kWeightParts + 1) * kUnit);
  });
}

template <DType T, class Feed>
[[gnu::always_inline]] inline void multiply_values(const uint8_t* values, int from, int to, Feed& beside,
                                                   Prefetcher& ahead) {
  constexpr int kParts = parts_of(T);
  tile_zero<0>();
  tile_zero<1>();
  each_sum(from, to, [&](auto h) {
    for (int b = 0; b < kParts; ++b)
      each_sum(0, 2, [&](auto d) {
        constexpr int kWeights = 4 + 2 * decltype(h)::value, kValues = 2 + decltype(d)::value;
        tile_load<kValues>(values + ((h.value * 2 + d.value) * kParts + b) * kUnit);
        tile_product<d.value, kWeights, kValues>();
        beside.some(ahead);
        if (!matters(1, b)) return;
        tile_product<d.value, kWeights + 1, kValues>();
        beside.some(ahead);
      });
  });
}

inline void add_sums(const float* sums, int rows, const float* correction, float* o, int o_stride) {
  for (int r = 0; r < rows; ++r) {
    const __m512 by = _mm512_set1_ps(correction[r]);
    float* at = o + r * o_stride;
    for (int d = 0; d < 2; ++d)
      _mm512_storeu_ps(at + d * 16,
                       _mm512_fmadd_ps(_mm512_loadu_ps(at + d * 16), by, _mm512_load_ps(sums + d * 256 + r * 16)));
  }
}

template <DType T>
void accumulate_of(const float* p, int rows, const KvRows& k, const KvRows* next_keys, const float* correction,
                   float* o, int o_stride, AmxScratch& m, Prefetcher& ahead) {
  const int from = k.begin / 32, to = (k.end + 31) / 32, chunks = m.chunks, tiles = (rows + 15) / 16;
  ValueFeed<T> feed(k, m);
  KeyFeed<T> keys(next_keys ? *next_keys : k, m);
  if (next_keys) keys.first(m.key_stage);
  if (!m.values_ready) {
    feed.start(0);
    feed.rest(ahead);
  }
  m.values_ready = false, m.keys_ready = next_keys != nullptr;

  pack_weights<T>(p, rows, from, to, k.scale, m.weights);
  fence();
  for (int c = 0; c < chunks; ++c) {
    const bool last = c + 1 == chunks;
    if (!last) feed.start(c + 1);
    const uint8_t* values = m.values + c % 2 * kValueBlock;
    for (int tile = 0; tile < tiles; ++tile) {
      if (c == 0 || tiles > 1) load_weights(m.weights + tile * 2 * kWeightParts * kUnit, from, to);
      if (last)
        multiply_values<T>(values, from, to, keys, ahead);
      else
        multiply_values<T>(values, from, to, feed, ahead);
      float* sums = m.sums + (c + tile) % 2 * 2 * 256;
      tile_store<0>(sums);
      tile_store<1>(sums + 256);
      add_sums(sums, rows - tile * 16 < 16 ? rows - tile * 16 : 16, correction + tile * 16,
               o + tile * 16 * o_stride + c * 32, o_stride);
    }
    if (last)
      keys.rest(ahead);
    else
      feed.rest(ahead);
  }
}

template <class F>
inline void by_type(DType type, const F& f) {
  switch (type) {
    case DType::f32: return f.template operator()<DType::f32>();
    case DType::bf16: return f.template operator()<DType::bf16>();
    default: return f.template operator()<DType::f8_e4m3>();
  }
}

void scores(int row, int rows, const KvRows& keys, const KvRows& values, float* s, uint8_t* memory, Prefetcher* ahead) {
  by_type(keys.dtype, [&]<DType T>() { scores_of<T>(row, rows, keys, values, s, cut(memory), *ahead); });
}
void accumulate(const float* p, int rows, const KvRows& values, const KvRows* next_keys, const float* correction,
                float* o, int o_stride, uint8_t* memory, Prefetcher* ahead) {
  by_type(values.dtype, [&]<DType T>() {
    accumulate_of<T>(p, rows, values, next_keys, correction, o, o_stride, cut(memory), *ahead);
  });
}

bool takes(const CacheKind& kind) {
  const bool whole = kind.dtype == DType::f32 || kind.dtype == DType::bf16 || kind.dtype == DType::f8_e4m3;
  return whole && kind.head_dim % 32 == 0 && kind.head_dim <= 256;
}

// Where a decode costs about what it costs with vectors, whose work grows with the query heads: at 8 of them bfloat16
// decodes 16 % slower, for a prefill that is faster by three quarters (seen at 4). Vectors are slow at FP8 even for one
// head; float32 has three parts.
bool pays(const CacheKind& kind) {
  return kind.dtype == DType::f8_e4m3 || (kind.dtype != DType::f32 && kind.query_heads >= 8);
}

int stops(int head_dim) { return head_dim; }  // one for four keys' 32 elements, and for two pairs'

constexpr TileKernel kTileKernel = {takes, pays, bytes, begin, release, scores, accumulate, stops};

}  // namespace

const Kernels* kernels_amx() {
  static const Kernels* const found = []() -> const Kernels* {
    const Kernels* vectors = kernels_avx512_vbmi();
    if (!vectors || !kvasir::cpu().amx_bf16 || !enable_amx()) return nullptr;
    static Kernels table = *vectors;
    table.name = "amx";
    table.tile_kernels[0] = amx_bytes_kernel();
    table.tile_kernels[1] = amx_halves_kernel();
    table.tile_kernels[2] = &kTileKernel;
    return &table;
  }();
  return found;
}

}  // namespace kvasir::attention::cpu
#else
namespace kvasir::attention::cpu {
const Kernels* kernels_amx() { return nullptr; }
}  // namespace kvasir::attention::cpu
#endif
