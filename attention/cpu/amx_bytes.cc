// int8 and int4 caches on matrix units: AMX multiplies bytes, twice as many a cycle as bfloat16, and takes the cache's
// as they are. Queries and weights are integers of three bytes (amx_bytes_cache.h), so that the sums of a scale's
// elements, or of a tile's keys, are exact, and only then float32.
//
// The sums of a row, fixed whoever shares the call:
//   score[j] = (for each digit: over scales in order, fma) combined from the highest digit, by what the query's unit is
//   worth out[d]   = out[d] * correction + (sum over the tile's keys) * what the weights' unit is worth
#include "attention/cpu/amx_bytes.h"
#include "attention/cpu/byte_vectors.h"
#include "core/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "attention/cpu/amx_bytes_cache.h"
#include "attention/cpu/prefetch.h"
#include "simd/transpose16.h"

namespace kvasir::attention::cpu {
namespace {

using simd::transpose;

constexpr int kUnitRows = 16;    // rows of an item that are multiplied together
constexpr int kColumnTiles = 3;  // their digits: sixteen rows by three
constexpr int kFewRowsTogether = 8;
constexpr int kMostSteps = 8;
constexpr int kStages =
    4;  // of products under way: the matrix unit takes long for the first, and little more for others

// One product of keys by queries: up to 64 elements that share a scale.
struct ProductStep {
  int32_t offset;  // of its bytes in a key's row
  int32_t begin, end;
};

// One thread's memory, cut up.
struct AmxBytesScratch {
  int32_t head_dim, rows, steps, groups;
  float* worth;         // [row]: of the query's unit
  uint8_t* queries;     // [unit][step][column tile]
  uint8_t* keys;        // [16 keys of 64][bytes]: those that cannot be read where they lie
  uint8_t* values;      // [16 elements][4 keys of 64]
  uint8_t* weights;     // [group][row of a unit][digit][64 keys]
  float* weight_worth;  // [group][row of a unit]
  int32_t* sums;        // keys: [16 of 64][group][column tile][16][16]; values: [stage][column tile][16][16]
  float* scales;        // [group][key]
  float byte_worth;
  ProductStep step[kMostSteps];
};

inline AmxBytesScratch& cut(uint8_t* memory) { return *reinterpret_cast<AmxBytesScratch*>(memory); }

// Where what a thread needs lies: f(pointer member, bytes) for each part of it.
template <class F>
void each_part(int rows, int head_dim, int groups_or_steps, const F& f) {
  const int64_t units = (rows + kUnitRows - 1) / kUnitRows, wide = rounded_up(head_dim);
  f(&AmxBytesScratch::worth, rounded_up(rows * 4 + 64));
  f(&AmxBytesScratch::queries, units * groups_or_steps * kColumnTiles * kUnit);
  f(&AmxBytesScratch::keys, kTile * wide);
  f(&AmxBytesScratch::values, kTile * wide);
  f(&AmxBytesScratch::weights, groups_or_steps * kColumnTiles * int64_t(kUnit));
  f(&AmxBytesScratch::weight_worth, groups_or_steps * int64_t(64));
  f(&AmxBytesScratch::sums, kStages * groups_or_steps * kColumnTiles * int64_t(kUnit));
  f(&AmxBytesScratch::scales, groups_or_steps * kTile * int64_t(4));
}

int64_t bytes(int rows, int head_dim) {
  int64_t n = rounded_up(sizeof(AmxBytesScratch));
  each_part(rows, head_dim, kMostSteps, [&](auto, int64_t size) { n += size; });
  return n;
}

// Few rows stand digit by digit beside each other, so that they fill fewer registers; more of them digit by digit
// apart, so that they are combined before they are transposed.
constexpr int column_of(int rows, int r, int digit) {
  return rows > kFewRowsTogether ? digit * 16 + r : r * kDigits + digit;
}
constexpr int column_tiles(int rows) { return rows > kFewRowsTogether ? kColumnTiles : (rows * kDigits + 15) / 16; }
inline int rows_of_unit(const AmxBytesScratch& m, int unit) {
  return m.rows - unit * kUnitRows < kUnitRows ? m.rows - unit * kUnitRows : kUnitRows;
}

// Queries as the second operand: a register's row is four elements, its columns are digits of rows.
template <DType T>
void pack_queries(const float* q, int q_stride, AmxBytesScratch& m) {
  const __m512i places = element_at_place<T>();
  alignas(64) int8_t digits[kUnitRows][kDigits * (kMaxHeadDim + 64)];
  constexpr int kStride = kMaxHeadDim + 64;
  for (int unit = 0; unit * kUnitRows < m.rows; ++unit) {
    const int rows = rows_of_unit(m, unit);
    for (int r = 0; r < rows; ++r)
      m.worth[unit * kUnitRows + r] =
          m.byte_worth * query_digits(q + (unit * kUnitRows + r) * q_stride, m.head_dim, digits[r], kStride);
    for (int s = 0; s < m.steps; ++s) {
      const ProductStep step = m.step[s];
      const __mmask64 wanted = first_bytes(step.end - step.offset) & ~first_bytes(step.begin - step.offset);
      for (int t = 0; t < column_tiles(rows); ++t) {
        __m512i columns[16] = {};
        for (int r = 0; r < rows; ++r)
          for (int p = 0; p < kDigits; ++p) {
            const int column = column_of(rows, r, p) - 16 * t;
            if (column < 0 || column >= 16) continue;
            const __m512i x = _mm512_maskz_loadu_epi8(wanted, digits[r] + p * kStride + step.offset);
            columns[column] = T == DType::i8 ? x : _mm512_permutexvar_epi8(places, x);
          }
        transpose(columns);
        uint8_t* to = m.queries + ((unit * m.steps + s) * kColumnTiles + t) * kUnit;
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, columns[i]);
      }
    }
  }
}

void begin(const float* q, int rows, int q_stride, const CacheKind& kind, uint8_t* memory) {
  AmxBytesScratch& m = cut(memory);
  m.head_dim = kind.head_dim, m.rows = rows;
  m.byte_worth = kind.dtype == DType::i4 ? 0.0625f : 1.0f;
  const int group = kind.grouped ? kind.group : kind.head_dim, each = group < 64 ? group : 64;
  m.groups = kind.head_dim / group;
  m.steps = 0;
  for (int d = 0; d < kind.head_dim; d += each) {
    ProductStep& step = m.step[m.steps++];
    step.begin = d, step.end = d + each < kind.head_dim ? d + each : kind.head_dim;
    step.offset = d / 64 * 64;
    // A row is read 64 bytes at a time, and not past its end.
    if (kind.dtype == DType::i8 && kind.head_dim >= 64 && step.offset > kind.head_dim - 64)
      step.offset = kind.head_dim - 64;
  }
  uint8_t* at = memory + rounded_up(sizeof(AmxBytesScratch));
  each_part(rows, kind.head_dim, m.steps, [&](auto member, int64_t size) {
    m.*member = reinterpret_cast<std::remove_reference_t<decltype(m.*member)>>(at);
    at += size;
  });
  kind.dtype == DType::i8 ? pack_queries<DType::i8>(q, q_stride, m) : pack_queries<DType::i4>(q, q_stride, m);
  configure();
}

// ---- scores ---------------------------------------------------------------------------------------

// Sixteen keys by the digits of a unit's rows, for each group of elements.
template <int N>
void multiply_keys(const KeyBlock& keys, const uint8_t* queries, const AmxBytesScratch& m, int32_t* sums) {
  const int steps_a_group = m.steps / m.groups;
  for (int g = 0, s = 0; g < m.groups; ++g) {
    each_of<N>([](auto t) { tile_zero<t.value>(); });
    for (const int last = s + steps_a_group; s < last; ++s) {
      tile_load_rows<3>(keys.at + m.step[s].offset, keys.step);
      each_of<N>([&](auto t) {
        tile_load<4 + t.value>(queries + (s * kColumnTiles + t.value) * kUnit);
        tile_product_bytes<t.value, 3, 4 + t.value>();
      });
    }
    each_of<N>([&](auto t) { tile_store<t.value>(sums + (g * kColumnTiles + t.value) * 256); });
  }
}

inline __m512 combine(__m512 low, __m512 middle, __m512 high) {
  return _mm512_fmadd_ps(high, _mm512_set1_ps(65536.0f), _mm512_fmadd_ps(middle, _mm512_set1_ps(256.0f), low));
}

// Sums of sixteen keys by their scales, and over groups.
template <int N, int kGroups>
inline void scale_sums(const int32_t* sums, const float* scales, int groups, float* scaled, Prefetcher& ahead) {
  const auto by = [](const int32_t* at) { return _mm512_cvtepi32_ps(_mm512_load_si512(at)); };
  for (int i = 0; i < 16; i += 4) {
    prefetch(ahead);
#pragma GCC unroll 4
    for (int k = i; k < i + 4; ++k) {
      __m512 x[N], scale = _mm512_set1_ps(scales[k]);
      for (int t = 0; t < N; ++t) x[t] = _mm512_mul_ps(by(sums + t * 256 + k * 16), scale);
      for (int g = 1; g < (kGroups > 0 ? kGroups : groups); ++g) {
        scale = _mm512_set1_ps(scales[g * kTile + k]);
        for (int t = 0; t < N; ++t)
          x[t] = _mm512_fmadd_ps(by(sums + (g * kColumnTiles + t) * 256 + k * 16), scale, x[t]);
      }
      for (int t = 0; t < N; ++t) _mm512_store_ps(scaled + t * 256 + k * 16, x[t]);
    }
  }
}

// The scores of sixteen keys from their sums: rows [low, high) of the unit, s being its first row's.
template <int N>
void scale_and_transpose(const AmxBytesScratch& m, int unit, const int32_t* sums, const float* scales, int low,
                         int high, float* s, Prefetcher& ahead) {
  alignas(64) float scaled[N][256];
  switch (m.groups) {
    case 1: scale_sums<N, 1>(sums, scales, 1, scaled[0], ahead); break;
    case 2: scale_sums<N, 2>(sums, scales, 2, scaled[0], ahead); break;
    default: scale_sums<N, 0>(sums, scales, m.groups, scaled[0], ahead);
  }
  const float* worth = m.worth + unit * kUnitRows;
  if constexpr (N == kColumnTiles) {
    __m512i keys[16];
    const __m512 by = _mm512_load_ps(worth);
    for (int i = 0; i < 16; ++i)
      keys[i] = _mm512_castps_si512(
          _mm512_mul_ps(combine(_mm512_load_ps(scaled[0] + i * 16), _mm512_load_ps(scaled[1] + i * 16),
                                _mm512_load_ps(scaled[2] + i * 16)),
                        by));
    transpose(keys);
    for (int r = low; r < high; ++r) _mm512_storeu_si512(s + r * kTile, keys[r]);
    return;
  }
  alignas(64) float columns[kFewRowsTogether * kDigits][16];
  for (int c = low * kDigits / 4 * 4; c < high * kDigits; c += 4) {
    __m512 four[4];
    transpose_four(scaled[c / 16] + c % 16, four);
    for (int i = 0; i < 4; ++i) _mm512_store_ps(columns[c + i], four[i]);
  }
  for (int r = low; r < high; ++r) {
    const float(*of)[16] = columns + r * kDigits;
    const __m512 x = combine(_mm512_load_ps(of[0]), _mm512_load_ps(of[1]), _mm512_load_ps(of[2]));
    _mm512_storeu_ps(s + r * kTile, _mm512_mul_ps(x, _mm512_set1_ps(worth[r])));
  }
}

// f(Count<column tiles>) for so many rows of a unit.
template <class F>
inline void by_tiles(int rows, const F& f) {
  switch (column_tiles(rows)) {
    case 1: return f(Count<1>{});
    case 2: return f(Count<2>{});
    default: return f(Count<3>{});
  }
}

template <DType T>
void scores_of(int row, int rows, const KvRows& k, const KvRows& v, float* s, AmxBytesScratch& m, Prefetcher& ahead) {
  const int begin = k.begin / 16 * 16, end = (k.end + 15) / 16 * 16, size = m.groups * kColumnTiles * 256;
  KeyBlock blocks[kTile / 16];
  for (int j = begin; j < end; j += 16) blocks[j / 16] = key_block<T>(k, j, m.keys + j * rounded_up(m.head_dim));
  fence();
  for (int unit = row / kUnitRows; unit * kUnitRows < row + rows; ++unit) {
    const int first = unit * kUnitRows, low = row > first ? row - first : 0;
    const int high = row + rows < first + kUnitRows ? row + rows - first : kUnitRows;
    by_tiles(rows_of_unit(m, unit), [&](auto tiles) {
      constexpr int N = decltype(tiles)::value;
      for (int j = begin; j < end; j += 16)
        multiply_keys<N>(blocks[j / 16], m.queries + unit * m.steps * kColumnTiles * kUnit, m, m.sums + j / 16 * size);
      // The matrix unit takes a while: what can be done without its sums comes first.
      if (first <= row) {
        collect_scales(k, m.groups, m.scales);
        value_bytes<T>(v, m.values, ahead);
      }
      for (int j = begin; j < end; j += 16)
        scale_and_transpose<N>(m, unit, m.sums + j / 16 * size, m.scales + j, low, high, s + (first - row) * kTile + j,
                               ahead);
    });
  }
}

void scores(int row, int rows, const KvRows& keys, const KvRows& values, float* s, uint8_t* memory, Prefetcher* ahead) {
  if (keys.dtype == DType::i8)
    scores_of<DType::i8>(row, rows, keys, values, s, cut(memory), *ahead);
  else
    scores_of<DType::i4>(row, rows, keys, values, s, cut(memory), *ahead);
}

// ---- values ---------------------------------------------------------------------------------------

template <int N>
[[gnu::always_inline]] inline void multiply_values(const uint8_t* values, int32_t* sums) {
  tile_load<3>(values);
  each_of<N>([&](auto t) {
    tile_zero<t.value>();
    tile_product_bytes<t.value, 4 + t.value, 3>();
  });
  each_of<N>([&](auto t) { tile_store<t.value>(sums + t.value * 256); });
}

inline void add_sums(const int32_t* sums, const float* worth, const float* correction, int rows, float* o,
                     int o_stride) {
  for (int r = 0; r < rows; ++r, sums += kDigits * 16, o += o_stride) {
    const __m512i below = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums + 16), 8), _mm512_load_si512(sums));
    const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + 32)), _mm512_set1_ps(65536.0f),
                                       _mm512_cvtepi32_ps(below));
    const __m512 before = _mm512_mul_ps(_mm512_loadu_ps(o), _mm512_set1_ps(correction[r]));
    _mm512_storeu_ps(o, _mm512_fmadd_ps(sum, _mm512_set1_ps(worth[r]), before));
  }
}

template <int N>
void accumulate_unit(const float* p, int rows, const float* correction, float* o, int o_stride, AmxBytesScratch& m) {
  const int tiles = m.head_dim / 16, each = tiles / m.groups;
  constexpr int kBehind = 2, kSums = kColumnTiles * 256;
  for (int g = 0; g < m.groups; ++g)
    for (int r = 0; r < rows; ++r)
      m.weight_worth[g * 16 + r] =
          m.byte_worth *
          weight_digits(p + r * kTile, m.scales + g * kTile, m.weights + g * kColumnTiles * kUnit + r * kDigits * 64);
  fence();
  for (int i = 0; i < tiles + kBehind; ++i) {
    if (i < tiles) {
      const int g = i / each;
      if (i == g * each)
        each_of<N>([&](auto t) { tile_load<4 + t.value>(m.weights + (g * kColumnTiles + t.value) * kUnit); });
      multiply_values<N>(m.values + i * kUnit, m.sums + i % kStages * kSums);
    }
    if (const int done = i - kBehind; done >= 0)
      add_sums(m.sums + done % kStages * kSums, m.weight_worth + done / each * 16, correction, rows, o + done * 16,
               o_stride);
  }
}

// Scores of the same keys came before: their values stand ready.
void accumulate(const float* p, int rows, const KvRows& v, const KvRows*, const float* correction, float* o,
                int o_stride, uint8_t* memory, Prefetcher*) {
  AmxBytesScratch& m = cut(memory);
  collect_scales(v, m.groups, m.scales);
  for (int r = 0; r < rows; r += kUnitRows) {
    const int n = rows - r < kUnitRows ? rows - r : kUnitRows;
    const auto go = [&](auto tiles) {
      accumulate_unit<decltype(tiles)::value>(p + r * kTile, n, correction + r, o + r * o_stride, o_stride, m);
    };
    switch ((n * kDigits + 15) / 16) {
      case 1: go(Count<1>{}); break;
      case 2: go(Count<2>{}); break;
      default: go(Count<3>{});
    }
  }
}

bool takes(const CacheKind& kind) {
  return (kind.dtype == DType::i8 || kind.dtype == DType::i4) && kind.head_dim % 32 == 0 && kind.head_dim <= 256 &&
         (!kind.grouped || kind.group % 32 == 0);
}
// With fewer query heads what the matrix unit takes until its first sums weighs more than what it saves.
// Unless items of few rows go to vectors: at eight heads those take half as long again.
constexpr int kFewForVectors = 4;
bool pays(const CacheKind& kind) { return kind.query_heads >= 4 || (byte_vectors() && byte_vectors()->takes(kind)); }

int stops(int head_dim) {
  return 16 + (head_dim + 63) / 64 * 16;
}  // one for four keys, and one for 256 bytes of values

}  // namespace

const TileKernel* amx_bytes_kernel() {
  static const TileKernel matrix = {takes,      pays,  bytes,   begin,          release,       scores,
                                    accumulate, stops, nullptr, byte_vectors(), kFewForVectors};
  return kvasir::cpu().amx_int8 ? &matrix : nullptr;
}

}  // namespace kvasir::attention::cpu
#endif
