// int8 and int4 caches whose scales meet sums instead of elements: of a key the sum over each group, of a value the
// key's weight. What is multiplied is the integers as floats, so that a group costs one multiplication and each further
// row nothing but its FMAs.
//
//   score[j]  = for each lane, over the groups in order, fma of (chain of fma over the group's elements) by the scale;
//               then the tree of the lanes' sums
//   out[d]    = out[d] * correction, then fma over the tile's keys of weight * scale; int4 begins at 0 and is added
//
// int4 stands as `raw` vectors, two for sixteen elements: u = the even ones + 8, and t = 16 * the odd ones + u, which a
// conversion of whole bytes gives. Queries are divided, and sums of values split, so that it comes to the same.
#pragma once

#include "attention/cpu/group_keys.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

// ---- values ---------------------------------------------------------------------------------------

// o[r][n..] of 2 * P vectors.
template <DType T, int R, int P>
inline void add_some_values(const float* weights, const KvRows& v, const float* correction, float* o, int o_stride,
                            int n, Prefetcher& ahead) {
  constexpr int kEvery = 16 / P;
  V acc[R][P][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
        acc[r][i][h] =
            T == DType::i4 ? zero() : mul(load(o + r * o_stride + n + i * kPair + h * W), set1(correction[r]));
  for (int k = v.begin; k < v.end;) {
    prefetch(ahead);
    for (const int stop = k + kEvery < v.end ? k + kEvery : v.end; k < stop; ++k) {
      const uint8_t* at = v.row[k];
      V w[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) w[r] = set1(weights[r * kTile + k]);
#pragma GCC unroll 8
      for (int i = 0; i < P; ++i) {
        V x[2];
        read_pair<T>(at, n + i * kPair, x);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          for (int h = 0; h < 2; ++h) acc[r][i][h] = fma_v(w[r], x[h], acc[r][i][h]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < P; ++i)
      for (int h = 0; h < 2; ++h) store(o + r * o_stride + n + i * kPair + h * W, acc[r][i][h]);
}

template <DType T, int R, int P>
inline void add_values_to(const float* weights, const KvRows& v, const float* correction, float* o, int o_stride, int n,
                          int n1, Prefetcher& ahead) {
  for (; n + P * kPair <= n1; n += P * kPair) add_some_values<T, R, P>(weights, v, correction, o, o_stride, n, ahead);
  if constexpr (P > 1) add_values_to<T, R, P / 2>(weights, v, correction, o, o_stride, n, n1, ahead);
}

template <DType T, int R, int P>
[[gnu::noinline]] void add_values(const float* weights, const KvRows& v, const float* correction, float* o,
                                  int o_stride, int n, int n1, Prefetcher& ahead) {
  add_values_to<T, R, P>(weights, v, correction, o, o_stride, n, n1, ahead);
}

// The same for three rows and more.
template <DType T, int R>
[[gnu::noinline]] void add_paired_values(const float* weights, const KvRows& v, const float* correction, float* o,
                                         int o_stride, int n, int n1, Prefetcher& ahead) {
  for (; n < n1; n += kPair)
    two_vectors_by_blocks<R>(
        weights, v.begin, v.end, o + n, o_stride, ahead,
        [&](int r, int h) {
          return T == DType::i4 ? zero() : mul(load(o + r * o_stride + n + h * W), set1(correction[r]));
        },
        [&](int k, V(&x)[2]) { read_pair<T>(v.row[k], n, x); });
}

// Sums of raw vectors, with all their weights' sum, to what the elements' sums are.
inline void split_sums(const float* sums, int n, float all, float correction, float* o) {
  const V before = set1(correction);
  for (int d = 0; d < n; d += kPair) {
    const V u = load(sums + d), odd = mul(sub(load(sums + d + W), u), set1(0.0625f));
    V a, b;
    interleave(fma_v(set1(-8.0f), set1(all), u), odd, a, b);
    store(o + d, fma_v(load(o + d), before, a));
    store(o + d + W, fma_v(load(o + d + W), before, b));
  }
}

template <DType T>
void group_values_of(const float* p, int rows, const KvRows& v, const float* correction, float* o, int o_stride,
                     const GroupSums& m, Prefetcher& ahead) {
  const int dim = m.head_dim, begin = v.begin / W * W;
  const bool split = T == DType::i4;
  float* to = split ? m.sums : o;
  const int to_stride = split ? dim : o_stride;
  if (rows > kFewRows)
    for (int j = v.begin; j < v.end; ++j) {
      prefetch(ahead);
      for (int d = 0; d < dim; d += kPair) {
        V x[2];
        read_pair<T>(v.row[j], d, x);
        store(m.tile + j * dim + d, x[0]), store(m.tile + j * dim + d + W, x[1]);
      }
    }
  with_scales(v, m.groups, [&](const float* scales) {
    for (int g = 0; g < m.groups; ++g) {
      const int n = g * m.group, n1 = n + m.group;
      alignas(64) float lanes[W];
      for (int r = 0; r < rows; ++r) {
        V sum = zero();
        for (int j = begin; j < v.end; j += W) {
          const V w = mul(load(p + r * kTile + j), load(scales + g * kTile + j));
          store(m.weights + r * kTile + j, w);
          sum = add(sum, w);
        }
        if (!split) continue;
        store(lanes, sum);
        m.all[r] = 0;
        for (float lane : lanes) m.all[r] += lane;
      }
      if (rows > kFewRows)
        product_all<false>(m.weights, rows, Packed{m.tile, dim}, v.begin, v.end, split ? nullptr : correction, to,
                           to_stride, n, n1, ahead);
      else
        by_few_rows(rows, [&](auto count) {
          constexpr int R = decltype(count)::value;
          if constexpr (R > 2)
            add_paired_values<T, R>(m.weights, v, correction, to, to_stride, n, n1, ahead);
          else
            add_values<T, R, R == 1 ? 4 : 2>(m.weights, v, correction, to, to_stride, n, n1, ahead);
        });
      if (split)
        for (int r = 0; r < rows; ++r)
          split_sums(m.sums + r * dim + n, m.group, m.all[r], correction[r], o + r * o_stride + n);
    }
  });
}

void group_values(const float* p, int rows, const KvRows& v, const KvRows*, const float* correction, float* o,
                  int o_stride, uint8_t* memory, Prefetcher* ahead) {
  if (v.dtype == DType::i8)
    group_values_of<DType::i8>(p, rows, v, correction, o, o_stride, group_sums(memory), *ahead);
  else
    group_values_of<DType::i4>(p, rows, v, correction, o, o_stride, group_sums(memory), *ahead);
}

bool group_sums_take(const CacheKind& kind) {
  const bool type = kind.dtype == DType::i8 || (kind.dtype == DType::i4 && kind.grouped);
  return type && kind.head_dim % kPair == 0 && (!kind.grouped || kind.group >= kLeastGroup);
}
bool group_sums_pay(const CacheKind&) { return true; }

int group_sums_stops(int head_dim) { return block_stops(head_dim); }

// int8's larger tiles are read for as long as they are worked on.
Reach group_sums_reach(const KvRows& keys) {
  return keys.dtype == DType::i8 && keys.head_dim >= 128 ? Reach::all : Reach::next;
}

constexpr TileKernel kGroupSums = {group_sums_take, group_sums_pay, group_sums_bytes, group_sums_begin, group_sums_end,
                                   group_scores,    group_values,   group_sums_stops, group_sums_reach};

}  // namespace
}  // namespace kvasir::attention::cpu
