// What group_sums.h works on: its memory, raw elements, queries and scales.
#pragma once

#include "attention/cpu/read.h"
#include "simd/avx2.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

constexpr int kPair = 2 * W;  // elements that are read together
constexpr int kLeastGroup = kPair;

struct GroupSums {
  int head_dim, group, groups, q_stride;
  const float* queries;  // [row][q_stride], raw
  float* own;            // where those of int4 are made
  float* first;          // [row][group][lane]: what a sum begins with
  float* weights;        // [row][key] of one group
  float* all;            // [row]: the sum of those
  float* tile;           // keys [raw element][key], and then values [key][raw element], as floats
  float* sums;           // [row][raw element] of int4's values
  float* worth;          // [row]: what a score's unit is (group_words.h)
};

inline GroupSums& group_sums(uint8_t* memory) { return *reinterpret_cast<GroupSums*>(memory); }

template <class F>
inline void each_part(int rows, int head_dim, const F& f) {
  f(&GroupSums::own, rows * head_dim);
  f(&GroupSums::first, rows * (head_dim / kLeastGroup) * W);
  f(&GroupSums::weights, rows * kTile);
  f(&GroupSums::all, rows);
  f(&GroupSums::tile, kTile * head_dim);
  f(&GroupSums::sums, rows * head_dim);
  f(&GroupSums::worth, rows);
}

int64_t group_sums_bytes(int rows, int head_dim) {
  int64_t n = 128;
  each_part(rows, head_dim, [&](auto, int64_t floats) { n += (floats * 4 + 63) / 64 * 64; });
  return n;
}

// ---- elements -------------------------------------------------------------------------------------

// Of bytes: u and t as above.
inline void split_bytes(__m256i bytes, V& u, V& t) {
  const __m256i odd_and_u = _mm256_xor_si256(bytes, _mm256_set1_epi32(8));
  u = _mm256_cvtepi32_ps(_mm256_and_si256(odd_and_u, _mm256_set1_epi32(15)));
  t = _mm256_cvtepi32_ps(odd_and_u);
}

template <DType T>
[[gnu::always_inline]] inline void read_pair(const uint8_t* row, int d, V (&x)[2]) {
  if constexpr (T == DType::i8) {
    x[0] = load_i8(row + d), x[1] = load_i8(row + d + W);
  } else {
    split_bytes(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + d / 2))), x[0], x[1]);
  }
}

inline void deinterleave(V a, V b, V& even, V& odd) {
  auto in_order = [](V x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8)); };
  even = in_order(_mm256_shuffle_ps(a, b, 0x88)), odd = in_order(_mm256_shuffle_ps(a, b, 0xdd));
}
inline void interleave(V even, V odd, V& a, V& b) {
  const V low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  a = _mm256_permute2f128_ps(low, high, 0x20), b = _mm256_permute2f128_ps(low, high, 0x31);
}

inline void cut_group_sums(int rows, const CacheKind& kind, uint8_t* memory) {
  GroupSums& m = group_sums(memory);
  const int dim = kind.head_dim;
  m.head_dim = dim, m.group = kind.grouped ? kind.group : dim, m.groups = dim / m.group;
  uint8_t* at = memory + 128;
  each_part(rows, dim, [&](auto member, int64_t floats) {
    m.*member = reinterpret_cast<float*>(at);
    at += (floats * 4 + 63) / 64 * 64;
  });
}

void group_sums_begin(const float* q, int rows, int q_stride, const CacheKind& kind, uint8_t* memory) {
  cut_group_sums(rows, kind, memory);
  GroupSums& m = group_sums(memory);
  const int dim = m.head_dim;
  m.queries = q, m.q_stride = q_stride;
  if (kind.dtype == DType::i8) return;
  m.queries = m.own, m.q_stride = dim;
  for (int r = 0; r < rows; ++r)
    for (int g = 0; g < m.groups; ++g) {
      V less = zero();
      for (int d = g * m.group; d < (g + 1) * m.group; d += kPair) {
        V even, odd;
        deinterleave(load(q + r * q_stride + d), load(q + r * q_stride + d + W), even, odd);
        odd = mul(odd, set1(0.0625f));
        less = fma_v(set1(-8.0f), even, less);
        store(m.own + r * dim + d, sub(even, odd));
        store(m.own + r * dim + d + W, odd);
      }
      store(m.first + (r * m.groups + g) * W, less);
    }
}
void group_sums_end() {}

inline int half_at(const uint8_t* at) {
  uint16_t half;
  __builtin_memcpy(&half, at, 2);
  return half;
}

// Whether eight rows lie one behind the other, every `step` bytes.
inline bool in_step(const uint8_t* const* rows, int step) {
  const __m256i first = _mm256_set1_epi64x(reinterpret_cast<int64_t>(rows[0]));
  const __m256i offset = _mm256_mul_epu32(_mm256_setr_epi64x(0, 1, 2, 3), _mm256_set1_epi64x(step));
  const __m256i low = _mm256_add_epi64(first, offset), high = _mm256_add_epi64(low, _mm256_set1_epi64x(4 * step));
  const __m256i* at = reinterpret_cast<const __m256i*>(rows);
  const __m256i off = _mm256_or_si256(_mm256_xor_si256(low, _mm256_loadu_si256(at)),
                                      _mm256_xor_si256(high, _mm256_loadu_si256(at + 1)));
  return _mm256_testz_si256(off, off) != 0;
}

// Two groups' float16 scales, which lie together, as [group][key].
inline void two_groups_scales(const KvRows& k, int step, int offset, float* to) {
  const int begin = k.begin / W * W, end = (k.end + W - 1) / W * W;
  for (int j = begin; j < end; j += W) {
    __m256i x;
    if (step == 4 && in_step(k.scales + j, 4)) {
      x = load_words(k.scales[j]);
    } else {
      int32_t word[W];
      for (int i = 0; i < W; ++i) __builtin_memcpy(word + i, k.scales[j + i] + offset, 4);
      x = _mm256_setr_epi32(word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]);
    }
    const __m256i halves =
        _mm256_packus_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(x, 16));
    const __m256i in_order = _mm256_permute4x64_epi64(halves, 0xd8);
    store(to + j, _mm256_cvtph_ps(_mm256_castsi256_si128(in_order)));
    store(to + kTile + j, _mm256_cvtph_ps(_mm256_extracti128_si256(in_order, 1)));
  }
}

// One group's float16 scales.
inline void one_groups_scales(const KvRows& k, float* to) {
  const int begin = k.begin / W * W, end = (k.end + W - 1) / W * W;
  for (int j = begin; j < end; j += W) {
    if (in_step(k.scales + j, 2)) {
      store(to + j, load_f16(k.scales[j]));
      continue;
    }
    __m128i x = _mm_setzero_si128();
    auto take = [&](auto i) { x = _mm_insert_epi16(x, half_at(k.scales[j + decltype(i)::value]), decltype(i)::value); };
    take(Count<0>{}), take(Count<1>{}), take(Count<2>{}), take(Count<3>{});
    take(Count<4>{}), take(Count<5>{}), take(Count<6>{}), take(Count<7>{});
    store(to + j, _mm256_cvtph_ps(x));
  }
}

// f(scales of the tile as [group][key]).
template <class F>
inline void with_scales(const KvRows& k, int groups, const F& f) {
  alignas(64) float table[kTile * (kMaxHeadDim / kLeastGroup)];
  if (!k.grouped) {
    for (int j = 0; j < kTile; j += W) store(table + j, set1(k.scale));
    return f(table);
  }
  if (groups == 1 && k.scale_dtype == DType::f16) {
    one_groups_scales(k, table);
    return f(table);
  }
  if (k.scale_dtype != DType::f16 || groups % 2 != 0) return f(ScaleTable<false>(k).at);
  for (int g = 0; g < groups; g += 2) two_groups_scales(k, 2 * groups, 2 * g, table + g * kTile);
  f(table);
}

}  // namespace
}  // namespace kvasir::attention::cpu
