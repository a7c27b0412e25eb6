// The scores of group_words.h, by eight, four or two keys at once.
#pragma once

#include "attention/cpu/group_word_elements.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

// A row's scores from its sums.
inline V worth_of(V sums, float worth) { return mul(mul(sums, set1(0x1p89f)), set1(worth)); }

// Queries of R rows as [raw vector][row], so that each stands at a fixed distance from the others, and what their sums
// begin with as [group][row].
template <int R>
struct NearQueries {
  alignas(64) float q[kMaxHeadDim * R];
  alignas(64) float first[kMaxHeadDim / kLeastGroup * W * R];
  NearQueries(const GroupSums& m, int row) {
    for (int r = 0; r < R; ++r) {
      const float* from = m.queries + (row + r) * m.q_stride;
      for (int d = 0; d < m.head_dim; d += W)
        store(q + d * R + r * W, hold(load(from + d)));  // held: no call to copy memory
      for (int g = 0; g < m.groups; ++g)
        store(first + (g * R + r) * W, hold(load(m.first + ((row + r) * m.groups + g) * W)));
    }
  }
};

// K keys from `rows` on by R rows: lanes[r][key of eight]. kBlocks: of a group,
// 0 where that is not known.
template <DType T, int R, int K, int kBlocks>
[[gnu::always_inline]] inline void strip_words(const NearQueries<R>& near, int group, int groups,
                                               const uint8_t* const* rows, const float* scales, float* lanes,
                                               Prefetcher& ahead) {
  constexpr int kAll = kWordVectors<T>, N = R == 1 ? 4 : 2;
  const uint8_t* at[K];
#pragma GCC unroll 8
  for (int i = 0; i < K; ++i) at[i] = rows[i];
  const float *q = near.q, *from = near.first;
  int byte = 0;
  auto add_block = [&](V(&acc)[K][R], const float* of, int offset) __attribute__((always_inline)) {
    each_of<0, kAll / N>([&](auto part) __attribute__((always_inline)) {
      constexpr int v0 = decltype(part)::value * N;
      if constexpr (R == 1 && v0 % 4 == 0) prefetch(ahead);
      if constexpr (K > 2) {
        V w[N][R];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) w[n][r] = hold(load(of + ((v0 + n) * R + r) * W));
#pragma GCC unroll 8
        for (int i = 0; i < K; ++i) {
          const __m256i word = load_block<T>(at[i] + offset);
          each_of<0, N>([&](auto n) __attribute__((always_inline)) {
            constexpr int kN = decltype(n)::value;
            const V x = raw_of<T, v0 + kN>(word);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) acc[i][r] = add_product(acc[i][r], w[kN][r], x);
          });
        }
      } else {
        __m256i word[K];
#pragma GCC unroll 8
        for (int i = 0; i < K; ++i) word[i] = load_block<T>(at[i] + offset);
        each_of<0, N>([&](auto n) __attribute__((always_inline)) {
          constexpr int kN = decltype(n)::value;
          V x[K];
#pragma GCC unroll 8
          for (int i = 0; i < K; ++i) x[i] = raw_of<T, v0 + kN>(word[i]);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const V w = hold(load(of + ((v0 + kN) * R + r) * W));
#pragma GCC unroll 8
            for (int i = 0; i < K; ++i) acc[i][r] = add_product(acc[i][r], w, x[i]);
          }
        });
      }
    });
  };
  auto add_group = [&](auto is_first) __attribute__((always_inline)) {
    V acc[K][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V begin = load(from + r * W);
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) acc[i][r] = begin;
    }
    if constexpr (kBlocks > 0) {
      each_of<0, kBlocks>([&](auto b) __attribute__((always_inline)) {
        add_block(acc, q + decltype(b)::value * kAll * R * W, byte + decltype(b)::value * 32);
      });
      q += kBlocks * kAll * R * W, byte += kBlocks * 32;
    } else {
      for (const int stop = byte + group / kAll * 4; byte < stop; byte += 32, q += kAll * R * W)
        add_block(acc, q, byte);
    }
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) {
      const V scale = set1(scales[i]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float* total = lanes + (r * W + i) * W;
        if constexpr (decltype(is_first)::value)
          store(total, mul(acc[i][r], scale));
        else
          store(total, fma_v(acc[i][r], scale, load(total)));
      }
    }
    from += R * W, scales += kTile;
  };
  add_group(Count<1>{});
  for (int g = 1; g < groups; ++g) add_group(Count<0>{});
}

// Scores of R rows of up to eight that work on a tile one after another.
template <DType T, int R, int kShare, int kBlocks>
[[gnu::noinline]] void some_word_scores(const GroupSums& m, int row, const KvRows& keys, const float* scales, float* s,
                                        Prefetcher& ahead) {
  constexpr int K = R == 1 ? 8 : R == 2 ? 4 : 2;
  const int end = (keys.end + W - 1) / W * W, group = m.group, groups = m.groups;
  alignas(64) float lanes[R * W * W];
  const NearQueries<R> near(m, row);
  const float* worth = m.worth + row;
  for (int j = keys.begin / W * W; j < end; j += W) {
    for (int k = 0; k < W; k += K) {
      if (R > 1 && (kShare == 1 || k % (2 * K) == 0)) prefetch(ahead);
      if constexpr (R == 2) prefetch(ahead);
      strip_words<T, R, K, kBlocks>(near, group, groups, keys.row + j + k, scales + j + k, lanes + k * W, ahead);
    }
    for (int r = 0; r < R; ++r) store(s + r * kTile + j, worth_of(sum_rows(lanes + r * W * W), worth[r]));
  }
}

template <DType T, int R>
inline void word_scores(const GroupSums& m, int row, const KvRows& keys, const float* scales, float* s,
                        Prefetcher& ahead) {
  constexpr int kFirst = first_block(R), kRest = R - kFirst;
  auto go = [&](auto blocks) {
    constexpr int kBlocks = decltype(blocks)::value, kShare = kRest > 0 ? 2 : 1;
    some_word_scores<T, kFirst, kShare, kBlocks>(m, row, keys, scales, s, ahead);
    if constexpr (kRest > 0)
      some_word_scores<T, kRest, kShare, kBlocks>(m, row + kFirst, keys, scales, s + kFirst * kTile, ahead);
  };
  if (m.group == 8 * W)
    go(Count<8 / kWordVectors<T>>{});
  else
    go(Count<0>{});
}

// The tile's wanted keys as raw floats, a key a lane.
template <DType T>
void transpose_key_words(const GroupSums& m, const KvRows& keys, Prefetcher& ahead) {
  alignas(64) uint32_t words[W * W];
  for (int j = keys.begin / W * W; j < keys.end; j += W)
    for (int d0 = 0; d0 < m.head_dim; d0 += kBlockOf<T>) {
      transpose_words<T>(keys.row + j, d0, m.head_dim, words, ahead);
      for (int l = 0; l < W; ++l) {
        const __m256i word = load_block<T>(reinterpret_cast<const uint8_t*>(words + l * W));
        each_of<0, kWordVectors<T>>([&](auto v) {
          store(m.tile + (d0 + decltype(v)::value * W + l) * kTile + j, raw_of<T, decltype(v)::value>(word));
        });
      }
    }
}

}  // namespace
}  // namespace kvasir::attention::cpu
