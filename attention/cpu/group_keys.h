// The scores of group_sums.h. One and two rows take eight and four keys at once, up to eight rows two keys in
// blocks (row_blocks.h), and more of them share keys that are transposed.
#pragma once

#include "attention/cpu/group_elements.h"
#include "attention/cpu/product.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

template <DType T, int R>
[[gnu::noinline]] void direct_sums(const GroupSums& m, int row, const KvRows& keys, const float* scales, float* s,
                                   Prefetcher& ahead) {
  constexpr int K = keys_at_once(R);
  const int group = m.group, groups = m.groups, stride = m.q_stride;
  const float* q = m.queries + row * stride;
  const float* first = m.first + row * groups * W;
  const int end = (keys.end + W - 1) / W * W;
  alignas(64) float lanes[R * W * W];
  for (int j = keys.begin / W * W; j < end; j += W) {
    for (int k = 0; k < W; k += K) {
      const uint8_t* at[K];
      for (int i = 0; i < K; ++i) at[i] = keys.row[j + k + i];
      auto add_group = [&](int g, auto is_first) {
        V acc[K][R];
        for (int r = 0; r < R; ++r) {
          const V begin = T == DType::i4 ? load(first + (r * groups + g) * W) : zero();
          for (int i = 0; i < K; ++i) acc[i][r] = begin;
        }
        for (int d = g * group; d < (g + 1) * group; d += kPair) {
          if (k == 0) prefetch(ahead);
          const float* of_d = q + d;
          V w[2][R];
          for (int v = 0; v < 2; ++v)
            for (int r = 0; r < R; ++r) w[v][r] = hold(load(of_d + r * stride + v * W));
          for (int i = 0; i < K; ++i) {
            V x[2];
            read_pair<T>(at[i], d, x);
            for (int v = 0; v < 2; ++v)
              for (int r = 0; r < R; ++r) acc[i][r] = fma_v(w[v][r], x[v], acc[i][r]);
          }
        }
#pragma GCC unroll 8
        for (int i = 0; i < K; ++i) {
          const V scale = set1(scales[g * kTile + j + k + i]);
          for (int r = 0; r < R; ++r) {
            float* total = lanes + (r * W + k + i) * W;
            V before = zero();
            if constexpr (!decltype(is_first)::value) before = load(total);
            store(total, fma_v(acc[i][r], scale, before));
          }
        }
      };
      add_group(0, Count<1>{});
      for (int g = 1; g < groups; ++g) add_group(g, Count<0>{});
    }
    for (int r = 0; r < R; ++r) store(s + r * kTile + j, sum_rows(lanes + r * W * W));
  }
}

template <DType T, int R>
[[gnu::noinline]] void paired_sums(const GroupSums& m, int row, const KvRows& keys, const float* scales, float* s,
                                   Prefetcher& ahead) {
  const int group = m.group, groups = m.groups, stride = m.q_stride;
  const float* q = m.queries + row * stride;
  const float* first = m.first + row * groups * W;
  const int end = (keys.end + W - 1) / W * W;
  alignas(64) float lanes[R * W * W], kept[2 * kMaxHeadDim];
  for (int j = keys.begin / W * W; j < end; j += W) {
    for (int k = 0; k < W; k += 2) {
      const uint8_t *a = keys.row[j + k], *b = keys.row[j + k + 1];
      const auto read = [&](int d, V(&x)[2][2]) {
        if (d % kStopEvery == 0) prefetch(ahead);
        read_pair<T>(a, d, x[0]), read_pair<T>(b, d, x[1]);
      };
      two_keys_by_blocks<R>(kept, read, [&](auto block, auto count, const auto& reads) {
        constexpr int kFirst = decltype(block)::value, kRows = decltype(count)::value;
        for (int g = 0; g < groups; ++g) {
          V sum[2][kRows];
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r)
            sum[0][r] = sum[1][r] = T == DType::i4 ? load(first + ((kFirst + r) * groups + g) * W) : zero();
          add_two_keys<kRows>(q + kFirst * stride, stride, g * group, (g + 1) * group, sum, reads);
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) {
            const V scale = set1(scales[g * kTile + j + k + i]);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
              float* total = lanes + ((kFirst + r) * W + k + i) * W;
              store(total, fma_v(sum[i][r], scale, g == 0 ? zero() : load(total)));
            }
          }
        }
      });
    }
    for (int r = 0; r < R; ++r) store(s + r * kTile + j, sum_rows(lanes + r * W * W));
  }
}

// The tile's wanted keys as raw floats, a key a lane.
template <DType T>
void transpose_keys(const GroupSums& m, const KvRows& keys, Prefetcher& ahead) {
  constexpr int kStep = W * 32 / bits_of(T);
  alignas(64) uint32_t words[W * W];
  for (int j = keys.begin / W * W; j < keys.end; j += W)
    for (int d0 = 0; d0 < m.head_dim; d0 += kStep) {
      transpose_words<T>(keys.row + j, d0, m.head_dim, words, ahead);
      const int bytes = (m.head_dim - d0 < kStep ? m.head_dim - d0 : kStep) * bits_of(T) / 8;
      for (int b = 0; b < bytes; b += 4) {
        const __m256i word = load_words(reinterpret_cast<const uint8_t*>(words + b / 4 * W));
        each_element<4>(4, [&](auto e) {
          constexpr int kByte = decltype(e)::value;
          const __m256i x = _mm256_srai_epi32(_mm256_slli_epi32(word, 24 - 8 * kByte), 24);
          if constexpr (T == DType::i8) {
            store(m.tile + (d0 + b + kByte) * kTile + j, _mm256_cvtepi32_ps(x));
          } else {
            V u, t;
            split_bytes(x, u, t);
            float* to = m.tile + (d0 + (b + kByte) / W * kPair + (b + kByte) % W) * kTile + j;
            store(to, u), store(to + W * kTile, t);
          }
        });
      }
    }
}

// kFrom: sums begin with m.first.
template <bool kFrom, int R, int C>
inline void transposed_sums(const GroupSums& m, int row, const float* scales, float* s, int n, Prefetcher& ahead) {
  const int group = m.group, groups = m.groups, stride = m.q_stride;
  const float* q = m.queries + row * stride;
  const float* first = m.first + row * groups * W;
  by_lane_pairs<R, C>(s, n, ahead, [&](int lane, V(&low)[R][C], V(&high)[R][C]) {
    const auto one = [&](int at, V(&all)[R][C]) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < C; ++i) all[r][i] = zero();
      for (int g = 0; g < groups; ++g) {
        V sum[R][C];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          for (int i = 0; i < C; ++i) sum[r][i] = kFrom ? set1(first[(r * groups + g) * W + at]) : zero();
        for (int d = g * group + at; d < (g + 1) * group; d += W) {
          V x[C];
          for (int i = 0; i < C; ++i) x[i] = load(m.tile + d * kTile + n + i * W);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const V w = set1(q[r * stride + d]);
            for (int i = 0; i < C; ++i) sum[r][i] = fma_v(w, x[i], sum[r][i]);
          }
        }
        for (int i = 0; i < C; ++i) {
          const V scale = load(scales + g * kTile + n + i * W);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) all[r][i] = fma_v(sum[r][i], scale, all[r][i]);
        }
      }
    };
    one(lane, low);
    one(lane + W / 2, high);
  });
}

template <bool kFrom>
void transposed_rows(const GroupSums& m, int row, int rows, const KvRows& k, const float* scales, float* s,
                     Prefetcher& ahead) {
  auto go = [&](auto count, int r) {
    constexpr int R = decltype(count)::value, C = kTransposedColumns;
    int n = k.begin / W * W;
    for (; n + C * W <= (k.end + W - 1) / W * W; n += C * W)
      transposed_sums<kFrom, R, C>(m, row + r, scales, s + r * kTile, n, ahead);
    for (; n < k.end; n += W) transposed_sums<kFrom, R, 1>(m, row + r, scales, s + r * kTile, n, ahead);
  };
  int r = 0;
  for (; rows - r >= 6; r += 6) go(Count<6>{}, r);
  if (rows - r >= 4) go(Count<4>{}, r), r += 4;
  if (rows - r >= 2) go(Count<2>{}, r), r += 2;
  if (rows - r >= 1) go(Count<1>{}, r);
}

template <DType T>
void group_scores_of(int row, int rows, const KvRows& k, float* s, const GroupSums& m, Prefetcher& ahead) {
  with_scales(k, m.groups, [&](const float* scales) {
    if (rows <= kFewRows)
      return by_few_rows(rows, [&](auto count) {
        constexpr int R = decltype(count)::value;
        if constexpr (R <= 2)
          direct_sums<T, R>(m, row, k, scales, s, ahead);
        else
          paired_sums<T, R>(m, row, k, scales, s, ahead);
      });
    transpose_keys<T>(m, k, ahead);
    transposed_rows<T == DType::i4>(m, row, rows, k, scales, s, ahead);
  });
}

void group_scores(int row, int rows, const KvRows& keys, const KvRows&, float* s, uint8_t* memory, Prefetcher* ahead) {
  if (keys.dtype == DType::i8)
    group_scores_of<DType::i8>(row, rows, keys, s, group_sums(memory), *ahead);
  else
    group_scores_of<DType::i4>(row, rows, keys, s, group_sums(memory), *ahead);
}

}  // namespace
}  // namespace kvasir::attention::cpu
