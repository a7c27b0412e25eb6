// Three to eight rows that read the cache themselves, where sixteen registers hold the sums of four of them: every load
// of a query serves two keys, every load of a weight two vectors. Of more rows than four a second block reads what the
// first one made of the cache and left in L1, so that it is converted once. The sums are the chains that one block
// would have.
#pragma once

#include "attention/cpu/prefetch.h"
#include "simd/simd.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

constexpr bool kRowBlocks = W == 8;
constexpr int kBlockPair = 2 * W;  // elements that are read together

constexpr int kStopEvery = 64;  // elements of two keys between two prefetches
constexpr int block_stops(int head_dim) { return kTile / 2 * head_dim / kStopEvery + head_dim / kBlockPair * 4; }

constexpr int first_block(int rows) { return rows <= 4 ? rows : (rows + 1) / 2; }

// f(first row, rows, the block's own way to read): `read(at, x)` gives x of the cache.
template <int R, class F, class Read, class Keep, class Again>
[[gnu::always_inline]] inline void by_row_blocks(const F& f, const Read& read, const Keep& keep, const Again& again) {
  constexpr int kFirst = first_block(R);
  if constexpr (kFirst == R) {
    f(Count<0>{}, Count<R>{}, read);
  } else {
    f(Count<0>{}, Count<kFirst>{}, keep);
    f(Count<kFirst>{}, Count<R - kFirst>{}, again);
  }
}

// ---- keys -----------------------------------------------------------------------------------------

// Two keys' products with R rows of q over [d0, d1), on top of the sums; read(d, x) gives two vectors of each key.
template <int R, class Read>
[[gnu::always_inline]] inline void add_two_keys(const float* q, int q_stride, int d0, int d1, V (&sum)[2][R],
                                                const Read& read) {
  for (int d = d0; d < d1; d += kBlockPair) {
    V x[2][2];
    read(d, x);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V w = hold(load(q + r * q_stride + d + v * W));
        sum[0][r] = fma_v(w, x[0][v], sum[0][r]);
        sum[1][r] = fma_v(w, x[1][v], sum[1][r]);
      }
  }
}

// f as above, for two keys; `kept` has room for both of them.
template <int R, class F, class Read>
[[gnu::always_inline]] inline void two_keys_by_blocks(float* kept, const Read& read, const F& f) {
  by_row_blocks<R>(
      f, read,
      [&](int d, V(&x)[2][2]) {
        read(d, x);
        for (int i = 0; i < 4; ++i) store(kept + 2 * d + i * W, x[i / 2][i % 2]);
      },
      [&](int d, V(&x)[2][2]) {
        for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = load(kept + 2 * d + i * W);
      });
}

// ---- values ---------------------------------------------------------------------------------------

// Two vectors of o for R rows: begin(r, v) gives what a sum begins with, read(k, x) two vectors of key k.
template <int R, int kEvery, class Begin, class Read>
[[gnu::always_inline]] inline void add_two_vectors(const float* weights, int k0, int k1, float* o, int o_stride,
                                                   Prefetcher& ahead, const Begin& begin, const Read& read) {
  V sum[R][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sum[r][0] = begin(r, 0), sum[r][1] = begin(r, 1);
  for (int k = k0; k < k1;) {
    if constexpr (kEvery < kTile) prefetch(ahead);
    for (const int stop = k + kEvery < k1 ? k + kEvery : k1; k < stop; ++k) {
      V x[2];
      read(k, x);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V w = set1(weights[r * kTile + k]);
        sum[r][0] = fma_v(w, x[0], sum[r][0]);
        sum[r][1] = fma_v(w, x[1], sum[r][1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) store(o + r * o_stride, sum[r][0]), store(o + r * o_stride + W, sum[r][1]);
}

// begin(r, v) and read(k, x) as above, of all R rows.
template <int R, class Begin, class Read>
[[gnu::always_inline]] inline void two_vectors_by_blocks(const float* weights, int k0, int k1, float* o, int o_stride,
                                                         Prefetcher& ahead, const Begin& begin, const Read& read) {
  alignas(64) float kept[kTile * kBlockPair];
  by_row_blocks<R>(
      [&](auto first, auto count, const auto& reads) {
        constexpr int kFirst = decltype(first)::value, kEvery = kFirst == 0 ? kTile / 4 : kTile;
        add_two_vectors<decltype(count)::value, kEvery>(
            weights + kFirst * kTile, k0, k1, o + kFirst * o_stride, o_stride, ahead,
            [&](int r, int v) { return begin(kFirst + r, v); }, reads);
      },
      read,
      [&](int k, V(&x)[2]) {
        read(k, x);
        store(kept + k * kBlockPair, x[0]), store(kept + k * kBlockPair + W, x[1]);
      },
      [&](int k, V(&x)[2]) { x[0] = load(kept + k * kBlockPair), x[1] = load(kept + k * kBlockPair + W); });
}

}  // namespace
}  // namespace kvasir::attention::cpu
