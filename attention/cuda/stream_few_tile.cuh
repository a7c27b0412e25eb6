// A warp's tile of up to 8 query rows in registers, and the stages that a tile of keys goes through: product with K,
// score transform, softmax, product with V. Lane = 4 * g + tid holds q of row g, and scores (of keys 8 * e + g), sums
// and results of rows 2 * tid and 2 * tid + 1.
#pragma once

#include "attention/cuda/epilogue.cuh"
#include "attention/cuda/score.cuh"
#include "attention/cuda/softmax.cuh"
#include "attention/cuda/stream_kind.cuh"
#include "attention/cuda/stream_merge.cuh"
#include "attention/cuda/stream_rows.cuh"

namespace kvasir::attention::cuda {

template <class K, int kD>
struct FewTile {
  using T = typename K::T;
  static constexpr int kTile = K::kTile, kM = kTile / 16;  // tall tiles of keys
  static constexpr float kShift = kWeightShift<T>;
  static constexpr float kMostScale = 63.9f;  // times 2^kShift, still a float16
  int g, tid, lane;
  uint32_t q[kD / 16][2];
  ScoreRow row[2];
  float top[2], sum[2], out[kD / 16][4];
  int safe_begin, safe_end;  // keys that all rows see

  // q becomes what K's products take; gives the unit of row g.
  __device__ __forceinline__ float widen_query(const Shape& s) {
    if constexpr (K::kBytes) return to_bytes(q, s.work);
    if (__is_same(T, Half) && s.work == DType::bf16) return brain_to_half(q);
    return 1.0f;
  }

  __device__ __forceinline__ void begin_rows(const Shape& s, const Layer& l, const Segment& seg,
                                             const QueryRow (&rows)[2], int kv_head, float unit) {
    safe_begin = 0, safe_end = 0x7fffffff;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tid * 2 + h, flat = seg.row_begin + (r < seg.row_count ? r : 0);
      const QueryRow& from = rows[h];
      const int head = kv_head * s.group + flat % s.group;
      row[h].begin = from.begin, row[h].end = from.end, row[h].own = from.own;
      safe_begin = max(safe_begin, from.begin);
      safe_end = min(safe_end, from.end);
      row[h].slope = alibi_slope(s, head);
      row[h].mask = head * l.mask_head + int64_t(from.token) * l.mask_row + from.column;
      row[h].scale =
          s.scale * __shfl_sync(0xffffffffu, unit, r * 4) * (s.softcap > 0.0f ? 1.0f : kLog2e) * l.cache.k_scale;
      top[h] = -INFINITY, sum[h] = 0.0f;
    }
    for (int o = 1; o < 4; o <<= 1) {
      safe_begin = max(safe_begin, __shfl_xor_sync(0xffffffffu, safe_begin, o));
      safe_end = min(safe_end, __shfl_xor_sync(0xffffffffu, safe_end, o));
    }
#pragma unroll
    for (int e = 0; e < kD / 4; ++e) out[e / 4][e % 4] = 0.0f;
  }

  // Whether the product over elements up to 32 * kk + 31 ends a group of scales.
  __device__ __forceinline__ static bool ends_group(const TileScales& scales, int kk) {
    return (((kk + 1) * 32) & ((1 << scales.group_shift) - 1)) == 0;
  }

  // Products with the keys of a stage: int8 as the bytes they are, in 16-bit steps of q.
  __device__ __forceinline__ void multiply_keys_bytes(const uint8_t* stage, const TileScales& scales,
                                                      float (&score)[kM][4]) const {
    int upper[kM][4] = {}, lower[kM][4] = {};
#pragma unroll
    for (int kk = 0; kk < kD / 32; ++kk)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        uint32_t a[4];
        K::template key_bytes<kD>(stage, m * 16, lane, kk, a);
        mma_bytes(upper[m], a, q[kk * 2][0], q[kk * 2][1]);
        mma_bytes(lower[m], a, q[kk * 2 + 1][0], q[kk * 2 + 1][1]);
        if constexpr (K::kGroup) {
          if (ends_group(scales, kk)) {
            float by[2];
            scales.rows(m * 16 + g, kk * 32, by);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              score[m][e] += float(upper[m][e] * 256 + lower[m][e]) * by[e / 2];
              upper[m][e] = lower[m][e] = 0;
            }
          }
        }
      }
    if constexpr (!K::kGroup) {
#pragma unroll
      for (int e = 0; e < kM * 4; ++e) score[e / 4][e % 4] = float(upper[e / 4][e % 4] * 256 + lower[e / 4][e % 4]);
    }
  }
  // Others in 16 bits. Without groups, `other` is the second of two chains of additions, instead of one twice as long.
  __device__ __forceinline__ void multiply_keys_wide(const uint8_t* stage, const TileScales& scales,
                                                     float (&score)[kM][4], float (&other)[kM][4]) const {
#pragma unroll
    for (int kk = 0; kk < kD / 32; ++kk)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        uint32_t b[2][2][2];
        K::template keys<kD, false>(stage, m * 16, lane, kk, scales, b);
        const uint32_t low[4] = {b[0][0][0], b[1][0][0], b[0][0][1], b[1][0][1]};
        const uint32_t high[4] = {b[0][1][0], b[1][1][0], b[0][1][1], b[1][1][1]};
        auto& to = K::kGroup || kk % 2 ? other[m] : score[m];
        T::mma(to, low, q[kk * 2][0], q[kk * 2][1]);
        T::mma(to, high, q[kk * 2 + 1][0], q[kk * 2 + 1][1]);
        if constexpr (K::kGroup) {
          if (ends_group(scales, kk)) {
            float by[2];
            scales.rows(m * 16 + g, kk * 32, by);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              score[m][e] += other[m][e] * by[e / 2];
              other[m][e] = 0.0f;
            }
          }
        }
      }
  }

  // Scaled scores of both rows with the keys of a stage.
  __device__ __forceinline__ void multiply_keys(const uint8_t* stage, const TileScales& scales,
                                                float (&x)[2][kM * 2]) const {
    float score[kM][4] = {}, other[kM][4] = {};
    if constexpr (K::kBytes)
      multiply_keys_bytes(stage, scales, score);
    else
      multiply_keys_wide(stage, scales, score, other);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < kM * 2; ++e) {
        float y = score[e / 2][(e % 2) * 2 + h];
        if constexpr (!K::kGroup && !K::kBytes) y += other[e / 2][(e % 2) * 2 + h];
        x[h][e] = y * row[h].scale;
      }
  }

  // Scores of the keys from `key` on through the score transform; `kv_end`: of the run.
  __device__ __forceinline__ void transform(const Shape& s, const Layer& l, bool extra, int key, int kv_end,
                                            float (&x)[2][kM * 2]) const {
    const bool whole = key >= safe_begin && key + kTile <= min(safe_end, kv_end);
    const auto key_of = [&](int e) { return key + e * 8 + g; };
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (extra) transform_scores(s, l, row[h], kv_end, x[h], key_of);
      if (!whole) hide_unseen(s.sinks, row[h], kv_end, x[h], key_of);
    }
  }

  // Weights in place of scores. Maxima move, and results are rescaled, only where one grew in some row.
  __device__ __forceinline__ void softmax(float (&x)[2][kM * 2]) {
    float most[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) most[h] = largest(x[h]);
    if (__any_sync(0xffffffffu, most[0] > top[0] || most[1] > top[1])) {
      float rescale[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rescale[h] = move_maximum(top[h], fmaxf(top[h], lanes_max<4, 16>(most[h])));
        sum[h] *= rescale[h];
      }
#pragma unroll
      for (int n = 0; n < kD / 16; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][e] *= rescale[e % 2];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = weigh_scores(x[h], weight_base(top[h]) - kShift, sum[h]);
  }

  // Sixteen keys' values of 32 elements times their weights.
  __device__ __forceinline__ void add_values(const uint32_t (&b)[4][2], int block, uint32_t p0, uint32_t p1) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t a[4] = {b[i * 2][0], b[i * 2 + 1][0], b[i * 2][1], b[i * 2 + 1][1]};
      T::mma(out[block * 2 + i], a, p0, p1);
    }
  }
  // Products of the weights with the values of a stage, which begin at `values`.
  __device__ __forceinline__ void multiply_values(const uint8_t* values, const TileScales& scales,
                                                  const float (&x)[2][kM * 2]) {
    uint32_t p[kM * 2];
    if constexpr (!K::kGroup) {
#pragma unroll
      for (int e = 0; e < kM * 2; ++e) p[e] = transposed(T::pack(x[0][e], x[1][e]));
    }
    if constexpr (K::template kWide<kD>) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        uint4 rows[4];
        K::template wide_rows<kD>(values, m * 16, lane, rows);
#pragma unroll
        for (int block = 0; block < kD / 32; ++block) {
          uint32_t b[4][2];
          K::wide_columns(rows, block, b);
          add_values(b, block, p[m * 2], p[m * 2 + 1]);
        }
      }
    } else {
#pragma unroll
      for (int block = 0; block < kD / 32; ++block) {
        if constexpr (K::kGroup) {
          if (((block * 32) & ((1 << scales.group_shift) - 1)) == 0) {  // a group begins
            float by[kM * 2];
            scales.rows(kTile + g, block * 32, by);
#pragma unroll
            for (int e = 0; e < kM * 2; ++e) {
              const float f = fminf(by[e], kMostScale);
              p[e] = transposed(T::pack(x[0][e] * f, x[1][e] * f));
            }
          }
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          uint32_t b[4][2];
          K::template columns<kD>(values, m * 16, lane, block, b);
          add_values(b, block, p[m * 2], p[m * 2 + 1]);
        }
      }
    }
  }

  // Elements column_dim(block, 0..3, g) of row 2 * tid + h, times `f`.
  __device__ __forceinline__ void elements(int h, int block, float f, float (&y)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = out[block * 2 + i / 2][i % 2 * 2 + h] * f;
  }

  // The run's result leaves, to the output or as a part to be merged.
  __device__ __forceinline__ void store(const Shape& s, const StepView& v, const Layer& l, const Segment& seg,
                                        int kv_head) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = lanes_sum<4, 16>(sum[h]);
      if (tid * 2 + h >= seg.row_count) continue;
      const auto store_elements = [&](bool partial, int64_t to, float f) {
        with_type(partial ? DType::f32 : s.out, [&](auto type) {
          void* base = type.value == DType::f32 && partial ? l.partial : l.out;
#pragma unroll
          for (int block = 0; block < kD / 32; ++block) {
            float y[4];
            elements(h, block, f, y);
            if constexpr (K::kBits == 16) {
#pragma unroll
              for (int i = 0; i < 4; ++i)
                store_float(base, type.value, to * kD + K::template column_dim<kD>(block, i, g), y[i]);
            } else {
              store_run<4>(base, type.value, to * kD + K::template column_dim<kD>(block, 0, g),
                           {y[0], y[1], y[2], y[3]});
            }
          }
        });
      };
      finish_row(s, v, l, seg, kv_head, tid * 2 + h, top[h] - kShift, total, l.cache.v_scale, g == 0, store_elements);
    }
  }

  // The same, undivided, into shared memory, where the warps of a block merge theirs.
  __device__ __forceinline__ void leave(WarpResult<kD>& to, const QueryRow (&rows)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = lanes_sum<4, 16>(sum[h]);
      const int r = tid * 2 + h;
      if (g == 0) to.rows[r] = {top[h], total, rows[h].token, 0};
#pragma unroll
      for (int block = 0; block < kD / 32; ++block) {
        float* x = to.x + r * WarpResult<kD>::kStride;
        const float y[4] = {out[block * 2][h], out[block * 2][2 + h], out[block * 2 + 1][h], out[block * 2 + 1][2 + h]};
        if constexpr (K::kBits == 16) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[K::template column_dim<kD>(block, i, g)] = y[i];
        } else {
          *reinterpret_cast<float4*>(x + K::template column_dim<kD>(block, 0, g)) = {y[0], y[1], y[2], y[3]};
        }
      }
    }
  }
};

}  // namespace kvasir::attention::cuda
