// The values of group_words.h.
#pragma once

#include "attention/cpu/group_sums.h"
#include "attention/cpu/group_word_elements.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

// Sums of raw vectors v0 to v0 + N of the block at n (of int8's also of the next block) for R rows.
template <DType T, int R, int N, int v0, bool kAsks>
[[gnu::always_inline]] inline void sum_word_values(const float* weights, const KvRows& v, float* to, int to_stride,
                                                   int n, Prefetcher& ahead) {
  constexpr int kAll = kWordVectors<T>, kBlocks = N > kAll ? N / kAll : 1, kIn = N / kBlocks, kEvery = 32 / N;
  V acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) acc[r][i] = zero();
  const int byte = n / kAll * 4;
  for (int k = v.begin; k < v.end;) {
    if constexpr (kAsks) prefetch(ahead);
    for (const int stop = k + kEvery < v.end ? k + kEvery : v.end; k < stop; ++k) {
      const uint8_t* at = v.row[k] + byte;
      each_of<0, kBlocks>([&](auto block) __attribute__((always_inline)) {
        constexpr int b = decltype(block)::value;
        const __m256i word = load_block<T>(at + b * 32);
        if constexpr (R == 1) {
          const V w = set1(weights[k]);
          each_of<0, kIn>([&](auto i) __attribute__((always_inline)) {
            constexpr int c = decltype(i)::value;
            acc[0][b * kIn + c] = add_product(acc[0][b * kIn + c], w, raw_of<T, v0 + c>(word));
          });
        } else {
          V x[kIn];
          each_of<0, kIn>([&](auto i) __attribute__((always_inline)) {
            x[decltype(i)::value] = raw_of<T, v0 + decltype(i)::value>(word);
          });
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const V w = set1(weights[r * kTile + k]);
#pragma GCC unroll 8
            for (int i = 0; i < kIn; ++i) acc[r][b * kIn + i] = add_product(acc[r][b * kIn + i], w, x[i]);
          }
        }
      });
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) store(to + r * to_stride + n + (v0 + i) * W, acc[r][i]);
}

inline float lanes_sum(V x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// All of a group's raw vectors, [n, n1).
template <DType T, int R>
[[gnu::noinline]] void word_values(const float* weights, const KvRows& v, float* to, int to_stride, int n, int n1,
                                   Prefetcher& ahead) {
  constexpr int kAll = kWordVectors<T>;
  if constexpr (R == 1) {
    for (; n + 8 * W <= n1; n += 8 * W) sum_word_values<T, R, 8, 0, true>(weights, v, to, to_stride, n, ahead);
    for (; n < n1; n += kBlockOf<T>) sum_word_values<T, R, kAll, 0, true>(weights, v, to, to_stride, n, ahead);
  } else {
    constexpr int kFirst = first_block(R), kRest = R - kFirst, N = R == 2 ? 4 : 2;
    for (; n < n1; n += kBlockOf<T>)
      each_of<0, kAll / N>([&](auto part) {
        constexpr int v0 = decltype(part)::value * N;
        sum_word_values<T, kFirst, N, v0, true>(weights, v, to, to_stride, n, ahead);
        if constexpr (kRest > 0)
          sum_word_values<T, kRest, N, v0, false>(weights + kFirst * kTile, v, to + kFirst * to_stride, to_stride, n,
                                                  ahead);
      });
  }
}

// o * correction and what the sums of raw vectors, with their weights' sum, come to.
template <DType T>
inline void part_word_sums(const float* sums, int n, float all, float correction, float* o) {
  constexpr int kAll = kWordVectors<T>;
  const V before = set1(correction), less = set1(-kBias<T> / kWeightUp * all);
  for (int d = 0; d < n; d += kBlockOf<T>) {
    V x[kAll], u[kAll], of[kAll];
    for (int v = 0; v < kAll; ++v) x[v] = load(sums + d + v * W);
    part_raw<T>(x, u);
    for (int v = 0; v < kAll; ++v) u[v] = fma_v(u[v], set1(0x1p89f), less);
    if constexpr (T == DType::i8) {
      V low[2], high[2], a[4];
      for (int i = 0; i < 2; ++i) {
        low[i] = _mm256_unpacklo_ps(u[2 * i], u[2 * i + 1]), high[i] = _mm256_unpackhi_ps(u[2 * i], u[2 * i + 1]);
      }
      auto pairs = [](V y, V z, V& first, V& second) {
        first = _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(y), _mm256_castps_pd(z)));
        second = _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(y), _mm256_castps_pd(z)));
      };
      pairs(low[0], low[1], a[0], a[1]), pairs(high[0], high[1], a[2], a[3]);
      for (int i = 0; i < 2; ++i) {
        of[i] = _mm256_permute2f128_ps(a[2 * i], a[2 * i + 1], 0x20);
        of[i + 2] = _mm256_permute2f128_ps(a[2 * i], a[2 * i + 1], 0x31);
      }
    } else {
      Words transposed[W];
      for (int v = 0; v < W; ++v) transposed[v] = _mm256_castps_si256(u[v]);
      transpose(transposed);
      for (int v = 0; v < W; ++v) of[v] = _mm256_castsi256_ps(transposed[v]);
    }
    for (int v = 0; v < kAll; ++v) store(o + d + v * W, fma_v(load(o + d + v * W), before, of[v]));
  }
}

template <DType T>
void word_values_of(const float* p, int rows, const KvRows& v, const float* correction, float* o, int o_stride,
                    const GroupSums& m, Prefetcher& ahead) {
  const int dim = m.head_dim, begin = v.begin / W * W;
  if (rows > kFewRows)
    for (int j = v.begin; j < v.end; ++j) {
      prefetch(ahead);
      for (int d = 0; d < dim; d += kBlockOf<T>) {
        const __m256i word = load_block<T>(v.row[j] + d / kWordVectors<T> * 4);
        each_of<0, kWordVectors<T>>(
            [&](auto i) { store(m.tile + j * dim + d + decltype(i)::value * W, raw_of<T, decltype(i)::value>(word)); });
      }
    }
  with_scales(v, m.groups, [&](const float* scales) {
    for (int g = 0; g < m.groups; ++g) {
      const int n = g * m.group, n1 = n + m.group;
      const float* by = scales + g * kTile;
      for (int r = 0; r < rows; ++r) {
        const float* from = p + r * kTile;
        float* weights = m.weights + r * kTile;
        V sum = zero();
        auto weigh = [&](int j) {
          const V w = mul(mul(load(from + j), set1(kWeightUp)), load(by + j));
          store(weights + j, w);
          sum = add(sum, w);
        };
        if (begin == 0 && v.end > kTile - W)
#pragma GCC unroll 8
          for (int j = 0; j < kTile; j += W) weigh(j);
        else
          for (int j = begin; j < v.end; j += W) weigh(j);
        m.all[r] = lanes_sum(sum);
      }
      if (rows > kFewRows)
        product_all<false>(m.weights, rows, Packed{m.tile, dim}, v.begin, v.end, nullptr, m.sums, dim, n, n1, ahead);
      else
        by_few_rows(
            rows, [&](auto count) { word_values<T, decltype(count)::value>(m.weights, v, m.sums, dim, n, n1, ahead); });
      for (int r = 0; r < rows; ++r)
        part_word_sums<T>(m.sums + r * dim + n, m.group, m.all[r], correction[r], o + r * o_stride + n);
    }
  });
}

}  // namespace
}  // namespace kvasir::attention::cpu
