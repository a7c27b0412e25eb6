// Small matrix products whose every element is one chain of FMAs in order.
#pragma once

#include "attention/cpu/folded.h"
#include "attention/cpu/read.h"
#include "attention/cpu/row_blocks.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

// Vectors of sums that stay in registers: of several rows, of one and two, of rows whose reads are dear; sums of rows.
constexpr int kColumns = kRegisters >= 32 ? 4 : 2, kFewColumns = kRegisters / 4;
constexpr int kWideColumns = kRegisters >= 32 ? 2 : 1, kRowSums = kRegisters >= 32 ? 16 : 8;

struct Packed {
  static constexpr bool kFour = false;
  const float* b;
  int stride;
  struct TileRow {
    const float* at;
    V operator()(int n) const { return load(at + n); }
  };
  TileRow row(int k) const { return {b + k * stride}; }
};

// acc[r] += *w * x, row r of R. A broadcast that a product makes of its operand is free, but reads for each of them;
// one of its own reads once and takes a third of a product's place: in turn they fit beside all else that is read.
template <int R, int C>
[[gnu::always_inline]] inline void add_products([[maybe_unused]] int r, const float* w, const V (&x)[C], V (&acc)[C]) {
#if KVASIR_SIMD_FMA_BROADCASTS
  if (R > 2 && r % 2 == 1) {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) acc[i] = fma_at(w, x[i], acc[i]);
    return;
  }
#endif
  const V by = set1(*w);
#pragma GCC unroll 8
  for (int i = 0; i < C; ++i) acc[i] = fma_v(by, x[i], acc[i]);
}

// c[r][n..] = c * correction (or 0) + sum over k in [k0, k1) of a[r][k] * b.row(k)(n..), in order of k; kTile weights a
// row. A function of its own, or the pointers of all of them would compete for registers.
template <int R, int C, int kEvery, class B>
[[gnu::noinline]] void product(const float* a, const B b, int k0, int k1, const float* correction, float* c,
                               int c_stride, int n, Prefetcher& ahead) {
  V acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i)
      acc[r][i] = correction ? mul(load(c + r * c_stride + n + i * W), set1(correction[r])) : zero();
  auto step = [&](int k) __attribute__((always_inline)) {
    V x[C];
    const auto row = b.row(k);
    if constexpr (B::kFour && C % 4 == 0) {
      for (int i = 0; i < C; i += 4) {
        V some[4];
        row.four(n + i * W, some);
        for (int v = 0; v < 4; ++v) x[i + v] = some[v];
      }
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < C; ++i) x[i] = row(n + i * W);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) add_products<R>(r, a + r * kTile + k, x, acc[r]);
  };
  int k = k0;
  for (; k + kEvery <= k1; k += kEvery) {
    prefetch(ahead);
#pragma GCC unroll 2
    for (int i = 0; i < kEvery; ++i) step(k + i);
  }
  if (k < k1) prefetch(ahead);
  for (; k < k1; ++k) step(k);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) store(c + r * c_stride + n + i * W, acc[r][i]);
}

template <int R, int C, int kEvery, class B>
inline void product_columns(const float* a, const B& b, int k0, int k1, const float* correction, float* c, int c_stride,
                            int n, int n1, Prefetcher& ahead) {
  for (; n + C * W <= n1; n += C * W) product<R, C, kEvery>(a, b, k0, k1, correction, c, c_stride, n, ahead);
  if constexpr (C > 1) product_columns<R, C / 2, kEvery>(a, b, k0, k1, correction, c, c_stride, n, n1, ahead);
}

// The more rows, the more work there is between two prefetches.
constexpr int prefetch_every(int rows) { return rows <= 2 ? 1 : 2; }

// product() for five to eight rows of kTile weights each.
template <int R, class B>
[[gnu::noinline]] void wide_rows_by_blocks(const float* a, const B b, int k0, int k1, const float* correction, float* c,
                                           int c_stride, int n, int n1, Prefetcher& ahead) {
  for (; n < n1; n += kBlockPair)
    two_vectors_by_blocks<R>(
        a, k0, k1, c + n, c_stride, ahead,
        [&](int r, int v) { return mul(load(c + r * c_stride + n + v * W), set1(correction[r])); },
        [&](int k, V(&x)[2]) {
          const auto row = b.row(k);
          x[0] = row(n), x[1] = row(n + W);
        });
}

// kWideRows: reading b costs more than a load, so that up to eight rows share each read.
template <bool kWideRows, class B>
inline void product_all(const float* a, int rows, const B& b, int k0, int k1, const float* correction, float* c,
                        int c_stride, int n0, int n1, Prefetcher& ahead) {
  int r = 0;
  auto go = [&](auto count) {
    constexpr int R = decltype(count)::value, kVectors = R <= 2 ? kFewColumns : kColumns;
    constexpr int C = kWideRows && R > 4 ? kWideColumns : kVectors;
    if constexpr (kRowBlocks && kWideRows && R > 4) {
      if ((n1 - n0) % kBlockPair == 0)
        return wide_rows_by_blocks<R>(a, b, k0, k1, correction, c, c_stride, n0, n1, ahead);
    }
    product_columns<R, C, kWideRows ? prefetch_every(R) : kPackedEvery>(
        a + r * kTile, b, k0, k1, correction ? correction + r : nullptr, c + r * c_stride, c_stride, n0, n1, ahead);
  };
  for (; rows - r > 8; r += 6) go(Count<6>{});
  if constexpr (kWideRows) {
    if (rows - r == 8) return go(Count<8>{});
    if (rows - r == 7) return go(Count<7>{});
  }
  if (rows - r > 6) go(Count<4>{}), r += 4;
  switch (rows - r) {
    case 6: return go(Count<6>{});
    case 5: return go(Count<5>{});
    case 4: return go(Count<4>{});
    case 3: return go(Count<3>{});
    case 2: return go(Count<2>{});
    case 1: return go(Count<1>{});
    default: return;
  }
}

// ---- scores ---------------------------------------------------------------------------------------
// A score is W chains of FMAs, one for each lane d % W, and the tree of their sums that sum_rows takes: neighbours
// W/2 apart first. Few rows read keys as they lie, one key's d along the lanes; many share transposed keys.

constexpr int reversed_bits(int i) {
  int r = 0;
  for (int bit = 1; bit < W; bit *= 2) r = 2 * r + (i & bit ? 1 : 0);
  return r;
}

// Two lanes W/2 apart at once, so that their sum need not leave the registers: f(lane, low, high) gives their sums.
template <int R, int C, class F>
inline void by_lane_pairs(float* s, int n, Prefetcher& ahead, const F& f) {
  constexpr int kLevels = W == 16 ? 4 : W == 8 ? 3 : 2;
  V waiting[kLevels][R][C];  // sums whose neighbour is still to come
  int depth = 0;
  for (int pair = 0; pair < W / 2; ++pair) {
    prefetch(ahead);
    V low[R][C], high[R][C];
    f(reversed_bits(2 * pair), low, high);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i) low[r][i] = add(low[r][i], high[r][i]);
    for (int done = pair; done & 1; done >>= 1) {
      --depth;
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < C; ++i) low[r][i] = add(waiting[depth][r][i], low[r][i]);
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i) waiting[depth][r][i] = low[r][i];
    ++depth;
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) store(s + r * kTile + n + i * W, waiting[0][r][i]);
}

// With sixteen registers, sums of two vectors of keys and one lane at a time: a load of a key serves as many rows, and
// one of a query two vectors.
constexpr bool kLanesApart = W == 8;
constexpr int kTransposedColumns = kLanesApart ? 2 : kColumns / 2;

template <int R, int C>
inline void transposed_scores(const float* q, int q_stride, int head_dim, const float* kt, float* s, int n,
                              Prefetcher& ahead) {
  by_lane_pairs<R, C>(s, n, ahead, [&](int d, V(&low)[R][C], V(&high)[R][C]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i) low[r][i] = high[r][i] = zero();
    auto step = [&](int at, V(&acc)[R][C]) {
      V x[C];
      for (int i = 0; i < C; ++i) x[i] = load(kt + at * kTile + n + i * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) add_products<R>(r, q + r * q_stride + at, x, acc[r]);
    };
    if constexpr (kLanesApart) {
      for (int at = d; at < head_dim; at += W) step(at, low);
      for (int at = d + W / 2; at < head_dim; at += W) step(at, high);
      return;
    }
    for (; d + W / 2 < head_dim; d += W) {
      step(d, low);
      step(d + W / 2, high);
    }
    if (d < head_dim) step(d, low);
  });
}

void scores(const float* q, int rows, int q_stride, int head_dim, const float* kt, int begin, int end, float* s,
            Prefetcher* ahead) {
  begin = begin / W * W, end = (end + W - 1) / W * W;
  auto go = [&](auto count) {
    constexpr int R = decltype(count)::value;
    constexpr int C = kTransposedColumns;
    int n = begin;
    for (; n + C * W <= end; n += C * W) transposed_scores<R, C>(q, q_stride, head_dim, kt, s, n, *ahead);
    for (; n < end; n += W) transposed_scores<R, 1>(q, q_stride, head_dim, kt, s, n, *ahead);
    q += R * q_stride, s += R * kTile, rows -= R;
  };
  while (rows >= 6) go(Count<6>{});
  if (rows >= 4) go(Count<4>{});
  if (rows >= 2) go(Count<2>{});
  if (rows >= 1) go(Count<1>{});
}

// How many keys R rows look at in one go: their sums stay in registers.
constexpr int keys_at_once(int rows) {
  int keys = W < 8 ? W : 8;
  while (keys > 1 && keys * rows > kRowSums) keys /= 2;
  return keys;
}

template <int R, class Reader>
[[gnu::noinline]] void scores_by_blocks(const float* q, int q_stride, const Reader keys, int head_dim, int begin,
                                        int end, float* s, Prefetcher& ahead) {
  alignas(64) float lanes[R * W * W], kept[2 * kMaxHeadDim];
  for (int j = begin; j < end; j += W) {
    for (int k = 0; k < W; k += 2) {
      const auto a = keys.row(j + k), b = keys.row(j + k + 1);
      const auto read = [&](int d, V(&x)[2][2]) {
        if (d % kStopEvery == 0) prefetch(ahead);
        x[0][0] = a(d), x[0][1] = a(d + W), x[1][0] = b(d), x[1][1] = b(d + W);
      };
      two_keys_by_blocks<R>(kept, read, [&](auto block, auto count, const auto& reads) {
        constexpr int kFirst = decltype(block)::value, kRows = decltype(count)::value;
        V sum[2][kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[0][r] = sum[1][r] = zero();
        add_two_keys<kRows>(q + kFirst * q_stride, q_stride, 0, head_dim, sum, reads);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          for (int i = 0; i < 2; ++i) store(lanes + ((kFirst + r) * W + k + i) * W, sum[i][r]);
      });
    }
    for (int r = 0; r < R; ++r) store(s + r * kTile + j, sum_rows(lanes + r * W * W));
  }
}

template <int R, class Reader>
inline void scores_of_rows(const float* q, int q_stride, const Reader keys, int head_dim, int begin, int end, float* s,
                           Prefetcher& ahead) {
#if KVASIR_SIMD_FOLDS
  if constexpr (folds<R, Reader>())
    if (head_dim >= kLeastFolded) return folded_scores_of_rows<R>(q, q_stride, keys, head_dim, begin, end, s, ahead);
#endif
  constexpr int K = keys_at_once(R);
  alignas(64) float lanes[R * W * W];
  if constexpr (kRowBlocks && R > 4)
    if (head_dim % kBlockPair == 0) return scores_by_blocks<R>(q, q_stride, keys, head_dim, begin, end, s, ahead);
  for (int j = begin; j < end; j += W) {
    for (int k = 0; k < W; k += K) {
      V acc[K][R];
      for (int i = 0; i < K; ++i)
        for (int r = 0; r < R; ++r) acc[i][r] = zero();
      if constexpr (Reader::kFour && R <= 2) {
        for (int d = 0; d < head_dim; d += 4 * W) {
          V w[4][R];
          for (int v = 0; v < 4; ++v)
            for (int r = 0; r < R; ++r) w[v][r] = hold(load(q + r * q_stride + d + v * W));
          for (int i = 0; i < K; ++i) {
            if (i % 2 == 0) prefetch(ahead);
            V x[4];
            keys.row(j + k + i).four(d, x);
            for (int v = 0; v < 4; ++v)
              for (int r = 0; r < R; ++r) acc[i][r] = fma_v(w[v][r], x[v], acc[i][r]);
          }
        }
      } else {
        const uint8_t* at[K];  // read once: the compiler cannot know that prefetch() leaves them alone
        for (int i = 0; i < K; ++i) at[i] = keys.row(j + k + i).at;
        auto row = [&](int i, int d) {
          auto it = keys.row(j + k + i);
          it.at = at[i];
          return it(d);
        };
        auto step = [&](int d) {
          if constexpr (K >= R) {
            V w[R];
            for (int r = 0; r < R; ++r) w[r] = hold(load(q + r * q_stride + d));
            for (int i = 0; i < K; ++i) {
              const V x = row(i, d);
              for (int r = 0; r < R; ++r) acc[i][r] = fma_v(w[r], x, acc[i][r]);
            }
          } else {
            V x[K];
            for (int i = 0; i < K; ++i) x[i] = row(i, d);
            for (int r = 0; r < R; ++r) {
              const V w = hold(load(q + r * q_stride + d));
              for (int i = 0; i < K; ++i) acc[i][r] = fma_v(w, x[i], acc[i][r]);
            }
          }
        };
        for (int d = 0; d < head_dim; d += W) {
          prefetch(ahead);
          step(d);
          if (R > 2 && (d += W) < head_dim) step(d);
        }
      }
      for (int i = 0; i < K; ++i)
        for (int r = 0; r < R; ++r) store(lanes + (r * W + k + i) * W, acc[i][r]);
    }
    for (int r = 0; r < R; ++r) store(s + r * kTile + j, sum_rows(lanes + r * W * W));
  }
}

void scores_rows(const float* q, int rows, int q_stride, const KvRows& k, float* s, Prefetcher* ahead) {
  const int head_dim = k.head_dim, begin = k.begin / W * W, end = (k.end + W - 1) / W * W;
  with_reader(k, [&](const auto& keys) {
    by_few_rows(rows, [&](auto count) {
      scores_of_rows<decltype(count)::value>(q, q_stride, keys, head_dim, begin, end, s, *ahead);
    });
  });
}

// How often the loops of a tile prefetch, about.
int stops(int rows, int head_dim) {
  const int blocks = (rows + 5) / 6, vectors = (head_dim + W - 1) / W;
  auto passes = [](int n, int columns) { return n < columns * W ? 1 : n / (columns * W); };
  if (rows > kFewRows)
    return kTile + blocks * (kTile / kTransposedColumns / 2 + passes(head_dim, kColumns) * kTile / kPackedEvery);
  if (kRowBlocks && rows > 4 && head_dim % kBlockPair == 0) return block_stops(head_dim);
  const int columns = rows <= 2 ? kFewColumns : rows <= 4 ? kColumns : kWideColumns;
  return (kTile / keys_at_once(rows) * vectors + passes(head_dim, columns) * kTile) / prefetch_every(rows);
}

// Prefetching costs instructions: it pays where reading a line takes longer than the work on it.
Reach reach(int rows, const KvRows& k) {
  const int work = 512 / bits_of(k.dtype) / W * rows;  // vectors a line
  if (work > 16 || (work > 8 && rows > 4) || (k.grouped && W < 16)) return Reach::next;
  return k.grouped || work > 8 ? Reach::later : Reach::all;
}

// ---- values ---------------------------------------------------------------------------------------

void accumulate(const float* p, int rows, const float* v, int v_stride, int begin, int end, const float* correction,
                float* o, int o_stride, Prefetcher* ahead) {
  product_all<false>(p, rows, Packed{v, v_stride}, begin, end, correction, o, o_stride, 0, o_stride, *ahead);
}

void accumulate_rows(const float* p, int rows, const KvRows& v, const float* correction, float* o, int o_stride,
                     Prefetcher* ahead) {
  int n = (v.head_dim + W - 1) / W * W;
  with_reader(v, [&](const auto& read) {
    product_all<true>(p, rows, read, v.begin, v.end, correction, o, o_stride, 0, n, *ahead);
  });
}

}  // namespace
}  // namespace kvasir::attention::cpu
