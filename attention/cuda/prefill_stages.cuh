// The stages that a tile of 128 keys goes through in prefill's warpgroups, between the two products: score transform
// and softmax. A thread has scores of two rows, in_tile and in_tile + 8: element e is of row (e / 2) % 2, and of key (e
// / 4) * 8 + 2 * tid + e % 2 of the tile.
#pragma once

#include "attention/cuda/launch.h"
#include "attention/cuda/prefill_feed.cuh"
#include "attention/cuda/score.cuh"
#include "attention/cuda/softmax.cuh"

namespace kvasir::attention::cuda {

// What a thread's two rows see, and what all rows of its warpgroup do.
struct RowsView {
  int own[2], begin[2], end[2], all_begin, all_end;
  float slope;
  __device__ __forceinline__ RowsView(const Shape& s, const PrefillTile& tile, int group, int in_tile, float alibi)
      : slope(alibi) {
    const DeviceSequence& seq = tile.of;
    for (int h = 0; h < 2; ++h) {
      own[h] = seq.start_pos + tile.row + in_tile + h * 8;
      const Range r = visible(s, seq, own[h]);
      begin[h] = r.begin, end[h] = r.end;
    }
    all_end = visible(s, seq, seq.start_pos + tile.row + group * 64).end;
    all_begin = visible(s, seq, seq.start_pos + tile.row + group * 64 + 63).begin;
  }
};

// Score transform of the i-th tile of the walk; `unit`: of a product, where there is more to it than the scale.
template <class M, bool kExtra>
__device__ __forceinline__ void transform_tile(const Shape& s, const Layer& l, const PrefillTile& tile,
                                               const TileWalk& walk, const RowsView& rows, int i, int head, int in_tile,
                                               int tid, float unit, float (&score)[kTileKeys / 2]) {
  const DeviceSequence& seq = tile.of;
  int t;
  const bool fresh = walk.at(i, &t);
  const int base = (fresh ? seq.start_pos : 0) + t * kTileKeys;
  const int limit = fresh || M::kGathered ? seq.kv_len : seq.start_pos;
  if constexpr (kExtra) {
#pragma unroll
    for (int e = 0; e < kTileKeys / 2; ++e) {
      const int j = base + (e / 4) * 8 + tid * 2 + e % 2, h = (e / 2) % 2;
      float x = score[e] * unit;
      if (s.softcap > 0.0f) x = fast_softcapped(x, s.softcap);
      const int r = tile.row + in_tile + h * 8;
      score[e] = biased(s, l, x * kLog2e, rows.slope, j - rows.own[h], j < limit && r < seq.q_len,
                        head * l.mask_head + int64_t(seq.q_begin + r) * l.mask_row + seq.kv_begin + j);
    }
  }
  if (!(base >= rows.all_begin && base + kTileKeys <= min(limit, rows.all_end))) {
    // Bounds from this lane's first column: the columns themselves are constants then.
    const int mine = base + tid * 2;
    const int last[2] = {min(limit, rows.end[0]) - mine, min(limit, rows.end[1]) - mine};
    if (s.window == 0) {
#pragma unroll
      for (int e = 0; e < kTileKeys / 2; ++e)
        if ((e / 4) * 8 + e % 2 >= last[(e / 2) % 2]) score[e] = -INFINITY;
    } else {
#pragma unroll
      for (int e = 0; e < kTileKeys / 2; ++e) {
        const int c = (e / 4) * 8 + e % 2, h = (e / 2) % 2;
        if (!(c < last[h] && (c >= rows.begin[h] - mine || c < s.sinks - mine))) score[e] = -INFINITY;
      }
    }
  }
}

// Moves the running maxima, leaves weights in place of scores; `rescale`: of sums and results so far.
template <class M>
__device__ __forceinline__ void softmax_tile(float scale, float (&score)[kTileKeys / 2], float (&top)[2],
                                             float (&sum)[2], float (&rescale)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float tops[M::kChains], more[M::kChains] = {};
#pragma unroll
    for (float& x : tops) x = top[h];
#pragma unroll
    for (int e = 0; e < kTileKeys / 2; ++e)
      if ((e / 2) % 2 == h) tops[(e / 4) % M::kChains] = fmaxf(tops[(e / 4) % M::kChains], score[e]);
    const float most = lanes_max<1, 2>(largest(tops));
    const float base = weight_base(most, scale);
    rescale[h] = move_maximum(top[h], most, scale);
#pragma unroll
    for (int e = 0; e < kTileKeys / 2; ++e)
      if ((e / 2) % 2 == h) {
        score[e] = exp2_fast(score[e] * scale - (base - M::kShift));
        if (M::kSums == 0) more[(e / 4) % M::kChains] += score[e];
      }
    float all = more[0];
#pragma unroll
    for (int c = 1; c < M::kChains; ++c) all += more[c];
    if (M::kSums == 0) sum[h] = sum[h] * rescale[h] + all;
  }
}

// The same by the maximum as it was, which moves only for rows that outgrow their limit (`limits`, of both rows), and
// then for all that are larger among the eight of a warp that lanes have as their first or their second: `moved`.
// Logarithms of two keys lie side by side, in float16. `step`: of a logarithm, in scores.
template <class M>
__device__ __forceinline__ void softmax_tile_by_logs(float scale, float step, uint32_t limits,
                                                     float (&score)[kTileKeys / 2], float (&top)[2],
                                                     float (&rescale)[2], bool (&moved)[2]) {
  const float by = scale * 8.0f;
  float base[2];
  uint32_t logs[kTileKeys / 4], most[2][2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) base[h] = M::base_of_logs(top[h] * scale);
  auto logs_of = [&](int p) {
    return M::pack_logs(__fmaf_rn(score[p * 2], by, -base[p % 2]), __fmaf_rn(score[p * 2 + 1], by, -base[p % 2]));
  };
#pragma unroll
  for (int p = 0; p < kTileKeys / 4; ++p) {
    logs[p] = logs_of(p);
    most[p % 2][p / 2 % 2] = M::larger(most[p % 2][p / 2 % 2], logs[p]);
  }
  const uint32_t first = M::larger(most[0][0], most[0][1]), second = M::larger(most[1][0], most[1][1]);
  uint32_t rows = M::larger(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
  moved[0] = moved[1] = false;
  const uint32_t over = M::larger(rows, limits) ^ limits;
  if (__any_sync(0xffffffffu, over != 0)) {
    moved[0] = __any_sync(0xffffffffu, (over & 0xffffu) != 0);
    moved[1] = __any_sync(0xffffffffu, over >> 16 != 0);
    rows = M::larger(rows, __shfl_xor_sync(0xffffffffu, rows, 1));
    rows = M::larger(rows, __shfl_xor_sync(0xffffffffu, rows, 2));
    // No key was seen before, or this one is far above them.
    const bool unknown[2] = {M::log_of(rows, 0) == INFINITY, M::log_of(rows, 1) == INFINITY};
    const bool some_unknown = __any_sync(0xffffffffu, unknown[0] || unknown[1]);
    const uint32_t excess = M::excess(rows);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!moved[h]) continue;
      const uint32_t both = unknown[h] ? 0 : __byte_perm(excess, excess, h ? 0x3232 : 0x1010);
      const float less = M::log_of(both, 0);
      rescale[h] = exp2_fast(less * -0.125f);
      top[h] += less * step;
      if (some_unknown) {
        float here = -INFINITY;
#pragma unroll
        for (int e = 0; e < kTileKeys / 2; ++e)
          if ((e / 2) % 2 == h) here = fmaxf(here, score[e]);
        here = lanes_max<1, 2>(here);
        if (unknown[h]) {
          top[h] = here, rescale[h] = 0.0f;
          base[h] = M::base_of_logs(top[h] * scale);
#pragma unroll
          for (int p = h; p < kTileKeys / 4; p += 2) logs[p] = logs_of(p);
        }
      }
#pragma unroll
      for (int p = h; p < kTileKeys / 4; p += 2) logs[p] = M::lower(logs[p], both);
    }
  }
#pragma unroll
  for (int p = 0; p < kTileKeys / 4; ++p) score[p * 2] = __uint_as_float(M::weights_of(logs[p]));
}

// Where a product sums the weights. Of one tile at a time: the matrix units keep 14 bits of a sum in FP8, and one of
// nothing but positive terms would come out the smaller the more there are. `nothing`: zero, but not a constant: one
// written into the sums of a product would have them all moved.
template <class M, int kOut>
__device__ __forceinline__ void add_sums(float nothing, float (&out)[kOut], float (&sum)[2]) {
  if constexpr (M::kSums > 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += out[M::kD / 2 + h * 2];
#pragma unroll
    for (int e = 0; e < M::kSums; ++e) out[M::kD / 2 + e] *= nothing;
  }
}

// Results so far of rows whose maximum moved.
template <class M, int kOut>
__device__ __forceinline__ void rescale_results(const bool (&moved)[2], const float (&rescale)[2], float (&out)[kOut],
                                                float (&sum)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!moved[h]) continue;
#pragma unroll
    for (int e = 0; e < M::kD / 2; ++e)
      if ((e / 2) % 2 == h) out[e] *= rescale[h];
    if (M::kSums > 0) sum[h] *= rescale[h];
  }
}

}  // namespace kvasir::attention::cuda
