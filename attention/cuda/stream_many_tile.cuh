// A warp's tile of 16 * kRowTiles query rows in registers, and the stages that a tile of keys goes through: product
// with K, score transform, softmax, product with V. Lane = 4 * g + tid holds q, scores (of keys 8 * n + 2 * tid and the
// next), sums and results of rows 16 * m + 8 * h + g.
#pragma once

#include "attention/cuda/epilogue.cuh"
#include "attention/cuda/score.cuh"
#include "attention/cuda/softmax.cuh"
#include "attention/cuda/stream_kind.cuh"
#include "attention/cuda/stream_rotated.cuh"
#include "attention/cuda/stream_rows.cuh"

namespace kvasir::attention::cuda {

template <class K, int kD, int kRowTiles, bool kRotated>
struct ManyTile {
  using T = typename K::T;
  static constexpr int kTile = K::kTile, kN = kTile / 8;  // columns of 8 keys
  static constexpr float kShift = kWeightShift<T>;
  int g, tid, lane;
  uint32_t q[kRowTiles][kD / 16][4];
  ScoreRow row[kRowTiles][2];
  float top[kRowTiles][2], sum[kRowTiles][2], out[kRowTiles][kD / 8][4];
  int safe_begin, safe_end;  // keys that all rows see
  int last_rank, sinks;  // kRotated: of the run's keys; and those of its keys that rows see whatever they begin with

  __device__ __forceinline__ void begin_rows(const Shape& s, const StepView& v, const Layer& l, const Segment& seg,
                                             int kv_head) {
    safe_begin = 0, safe_end = 0x7fffffff;
    if constexpr (kRotated)
      last_rank = seg.kv_end - 1 - max(seg.ranked_from, 0), sinks = seg.ranked_from == kSinkRun ? s.sinks : 0;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = m * 16 + h * 8 + g;
        const bool live = r < seg.row_count;
        const int flat = seg.row_begin + (live ? r : 0);
        const QueryRow from = v.rows[seg.tokens + flat / s.group];
        const int head = kv_head * s.group + flat % s.group;
        row[m][h].begin = from.begin, row[m][h].end = from.end, row[m][h].own = from.own;
        safe_begin = max(safe_begin, from.begin);
        safe_end = min(safe_end, from.end);
        row[m][h].slope = alibi_slope(s, head);
        row[m][h].mask = head * l.mask_head + int64_t(from.token) * l.mask_row + from.column;
        top[m][h] = -INFINITY, sum[m][h] = 0.0f;

        uint32_t raw[kD / 16][2];
        load_query<K>(static_cast<const uint16_t*>(l.q) + (int64_t(from.token) * s.heads + head) * kD, live, tid, raw);
        if constexpr (kRotated) {
          const int rank = from.own - (seg.ranked_from == kSinkRun ? max(from.begin - s.sinks, 0) : seg.ranked_from);
          turn_query<K, kD>(s, l, rank, tid, raw);
        }
        float unit = 1.0f;
        if (__is_same(T, Half) && s.work == DType::bf16) unit = brain_to_half(raw);
        row[m][h].scale = s.scale * unit * (s.softcap > 0.0f ? 1.0f : kLog2e) / K::kCarry * l.cache.k_scale;
#pragma unroll
        for (int k = 0; k < kD / 16; ++k)
#pragma unroll
          for (int reg = 0; reg < 2; ++reg) q[m][k][reg * 2 + h] = raw[k][reg];
      }
    for (int o = 4; o < 32; o <<= 1) {
      safe_begin = max(safe_begin, __shfl_xor_sync(0xffffffffu, safe_begin, o));
      safe_end = min(safe_end, __shfl_xor_sync(0xffffffffu, safe_end, o));
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int e = 0; e < kD / 2; ++e) out[m][e / 4][e % 4] = 0.0f;
  }

  // Products with the keys of a stage. Groups of 32 and more scale the sums, which is exact; smaller ones were scaled
  // as they were widened.
  __device__ __forceinline__ void multiply_keys_groups(const uint8_t* stage, const TileScales& scales,
                                                       float (&score)[kRowTiles][kN][4]) const {
    const bool sums = scales.group_shift >= 5;
#pragma unroll
    for (int half = 0; half < kN / 2; ++half) {
      float part[kRowTiles][2][4] = {};
#pragma unroll
      for (int kk = 0; kk < kD / 32; ++kk) {
        uint32_t b[2][2][2];
        K::template keys<kD>(stage, half * 16, lane, kk, scales, b);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            T::mma(part[m][n], q[m][kk * 2], b[n][0][0], b[n][0][1]);
            T::mma(part[m][n], q[m][kk * 2 + 1], b[n][1][0], b[n][1][1]);
          }
        if (sums ? (((kk + 1) * 32) & ((1 << scales.group_shift) - 1)) == 0 : kk + 1 == kD / 32) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int key = half * 16 + n * 8 + tid * 2;
            const float even = sums ? scales.get(key, kk * 32) : 1.0f;
            const float odd = sums ? scales.get(key + 1, kk * 32) : 1.0f;
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                score[m][half * 2 + n][e] += part[m][n][e] * (e % 2 ? odd : even);
                part[m][n][e] = 0.0f;
              }
          }
        }
      }
    }
  }
  __device__ __forceinline__ void multiply_keys(const uint8_t* stage, const TileScales& scales,
                                                float (&score)[kRowTiles][kN][4]) const {
    if constexpr (K::kGroup) {
      multiply_keys_groups(stage, scales, score);
      return;
    }
    float other[kRowTiles][kN][4] = {};  // two chains of additions instead of one twice as long
#pragma unroll
    for (int kk = 0; kk < kD / 32; ++kk)
#pragma unroll
      for (int half = 0; half < kN / 2; ++half) {
        uint32_t b[2][2][2];
        K::template keys<kD>(stage, half * 16, lane, kk, scales, b);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            T::mma(score[m][half * 2 + n], q[m][kk * 2], b[n][0][0], b[n][0][1]);
            T::mma(other[m][half * 2 + n], q[m][kk * 2 + 1], b[n][1][0], b[n][1][1]);
          }
      }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[m][n][e] += other[m][n][e];
  }

  // The same with keys that are rotated on their way: the first of them has rank `rank`.
  __device__ __forceinline__ void multiply_rotated_keys(const Shape& s, const uint8_t* stage, const TileScales& scales,
                                                        int rank, float (&score)[kRowTiles][kN][4]) const {
    prefetch_angles<kD, kTile>(reinterpret_cast<const float2*>(s.rope_ranks), rank + kTile, last_rank, lane);
#pragma unroll
    for (int half = 0; half < kN / 2; ++half) {
      const float2* angles[2];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        angles[n] = reinterpret_cast<const float2*>(s.rope_ranks) +
                    int64_t(min(max(rank + half * 16 + n * 8 + g, 0), last_rank)) * (kD / 2);
#pragma unroll
      for (int kk = 0; kk < kD / 64; ++kk) {
        uint32_t x[2][2][2], y[2][2][2];  // elements half a row apart
        K::template keys<kD, true, true>(stage, half * 16, lane, kk, scales, x);
        K::template keys<kD, true, true>(stage, half * 16, lane, kk + kD / 64, scales, y);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          turn_elements<K, kD>(s.rope_style, angles[n], kk, tid, __is_same(T, Brain), nullptr, x[n], y[n]);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              T::mma(score[m][half * 2 + n], q[m][kk * 2 + k], x[n][k][0], x[n][k][1]);
              T::mma(score[m][half * 2 + n], q[m][(kk + kD / 64) * 2 + k], y[n][k][0], y[n][k][1]);
            }
        }
      }
    }
  }

  // Scores of the keys from `key` on through the score transform, row by row, and their weights into `p`, as the
  // product with V takes them; `kv_end`: of the run.
  __device__ __forceinline__ void softmax(const Shape& s, const Layer& l, bool extra, int key, int kv_end,
                                          const float (&score)[kRowTiles][kN][4], uint32_t (&p)[kRowTiles][kN / 2][4]) {
    const bool whole = key >= safe_begin && key + kTile <= min(safe_end, kv_end);
    const auto key_of = [&](int e) { return key + (e / 2) * 8 + tid * 2 + e % 2; };
    bool grew = false;
    float rescale[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x[kN * 2];
#pragma unroll
        for (int e = 0; e < kN * 2; ++e) x[e] = score[m][e / 2][h * 2 + e % 2] * row[m][h].scale;
        if (extra) transform_scores(s, l, row[m][h], kv_end, x, key_of);
        if (!whole) hide_unseen(kRotated ? sinks : s.sinks, row[m][h], kv_end, x, key_of);
        const float next = fmaxf(top[m][h], lanes_max<1, 2>(largest(x)));
        grew |= next > top[m][h];
        rescale[m][h] = move_maximum(top[m][h], next, 1.0f, kShift);
        sum[m][h] = sum[m][h] * rescale[m][h] + weigh_scores(x, weight_base(next) - kShift, 0.0f);
#pragma unroll
        for (int k = 0; k < kN / 2; ++k) {
          p[m][k][h] = T::pack(x[k * 4], x[k * 4 + 1]);
          p[m][k][2 + h] = T::pack(x[k * 4 + 2], x[k * 4 + 3]);
        }
      }
    if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kD / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) out[m][n][e] *= rescale[m][e / 2];
    }
  }

  // Products of the weights with the values of a stage, which begin at `values`.
  __device__ __forceinline__ void multiply_values(const uint8_t* values, const TileScales& scales,
                                                  const uint32_t (&p)[kRowTiles][kN / 2][4]) {
    constexpr int kStep = kD == 96 ? 4 : 8;
#pragma unroll
    for (int n = 0; n < kD / 8; n += kStep)
#pragma unroll
      for (int k = 0; k < kN / 2; ++k) {
        uint32_t b[kStep][2];
        K::template values<kD, kStep>(values, k * 16, lane, n, scales, b);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int i = 0; i < kStep; ++i) T::mma(out[m][n + i], p[m][k], b[i][0], b[i][1]);
      }
  }

  // The run's result leaves, to the output or as a part to be merged.
  __device__ __forceinline__ void store(const Shape& s, const StepView& v, const Layer& l, const Segment& seg,
                                        int kv_head) const {
    const float value_scale = l.cache.v_scale / K::kCarry;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float total = lanes_sum<1, 2>(sum[m][h]);
        const int r = m * 16 + h * 8 + g;
        if (r >= seg.row_count) continue;
        const auto store_elements = [&](bool partial, int64_t row_at, float f) {
          void* to = partial ? static_cast<void*>(l.partial) : l.out;
          const DType type = partial ? DType::f32 : s.out;
          if constexpr (K::kBits == 16) {
#pragma unroll
            for (int n = 0; n < kD / 8; ++n)
              store_run<2>(to, type, row_at * kD + n * 8 + tid * 2, {out[m][n][h * 2] * f, out[m][n][h * 2 + 1] * f});
          } else {
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
              for (int n = 0; n < kD / 8; n += 4)
                store_run<4>(to, type, row_at * kD + K::template value_dim<kD>(n, tid * 2 + e),
                             {out[m][n][h * 2 + e] * f, out[m][n + 1][h * 2 + e] * f, out[m][n + 2][h * 2 + e] * f,
                              out[m][n + 3][h * 2 + e] * f});
          }
        };
        finish_row(s, v, l, seg, kv_head, r, top[m][h] - kShift, total, value_scale, tid == 0, store_elements);
      }
  }
};

}  // namespace kvasir::attention::cuda
