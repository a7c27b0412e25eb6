// The stream kernel for tiles of up to 16 or 32 query rows of one kv head: rows of q are the matrix units' tall side.
#pragma once

#include "attention/cuda/stream_feed.cuh"
#include "attention/cuda/stream_rows.cuh"

namespace kvasir::attention::cuda {

template <class K, int kD, int kRowTiles>
__global__ void __launch_bounds__(kStreamWarps * 32, StreamSize<K, kD>::kBlocks)
    many_rows_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v,
                     const __grid_constant__ Layer l, const __grid_constant__ StreamList list, int scale_bytes) {
  using T = typename K::T;
  using Size = StreamSize<K, kD>;
  constexpr int kTile = Size::kTile, kStages = Size::kStages, kRow = Size::kRow;
  constexpr float kShift = __is_same(T, Half) ? 10.0f : 0.0f;  // keeps small weights normal in float16
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, tid = lane & 3;
  const int stage_bytes = Size::stage_bytes(scale_bytes);
  uint8_t* ring = shared + warp * kStages * stage_bytes;

  const int index = blockIdx.x * kStreamWarps + warp, kv_head = index % s.kv_heads, part = index / s.kv_heads;
  // The plan lies in memory since before the kernel ahead of this one: it is read while that one still runs.
  const PartHead head = part < list.count ? list.heads[part] : PartHead{};
  const CacheLayer& c = l.cache;
  Feed<K, kD, Size, false> feed(s, v, c, list, head, ring, stage_bytes, scale_bytes, kv_head, lane);
  feed.ask_ahead();
  wait_for_kernel_ahead();
  let_next_kernel_start();
  if (head.begin == head.end) return;
  for (int i = 0; i < kStages - 1; ++i) feed.issue();

  // ---- computing ----
  int use = 0;
  for (int segment = head.begin; segment < head.end; ++segment) {
    const Segment seg = segment == head.begin ? head.first : list.segments[segment];
    uint32_t q[kRowTiles][kD / 16][4];
    float row_scale[kRowTiles][2], row_slope[kRowTiles][2], top[kRowTiles][2], sum[kRowTiles][2];
    int row_begin[kRowTiles][2], row_end[kRowTiles][2], row_own[kRowTiles][2];
    int64_t row_mask[kRowTiles][2];
    int safe_begin = 0, safe_end = 0x7fffffff;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = m * 16 + h * 8 + g;
        const bool live = r < seg.row_count;
        const int flat = seg.row_begin + (live ? r : 0);
        const Row row = v.rows[seg.tokens + flat / s.group];
        const int head = kv_head * s.group + flat % s.group;
        row_begin[m][h] = row.begin, row_end[m][h] = row.end, row_own[m][h] = row.own;
        safe_begin = max(safe_begin, row.begin);
        safe_end = min(safe_end, row.end);
        row_slope[m][h] = s.slopes ? s.slopes[head] * kLog2e : 0.0f;
        row_mask[m][h] = head * l.mask_head + int64_t(row.token) * l.mask_row + row.column;
        top[m][h] = -INFINITY, sum[m][h] = 0.0f;

        const uint16_t* from = static_cast<const uint16_t*>(l.q) + (int64_t(row.token) * s.heads + head) * kD;
        uint32_t raw[kD / 16][2];
#pragma unroll
        for (int k = 0; k < kD / 16; ++k)
#pragma unroll
          for (int reg = 0; reg < 2; ++reg) {
            const int d0 = K::query_dim(k / 2, k % 2, reg, 0, tid), d1 = K::query_dim(k / 2, k % 2, reg, 1, tid);
            if constexpr (K::kBits >= 8)
              raw[k][reg] = live ? *reinterpret_cast<const uint32_t*>(from + d0) : 0;
            else
              raw[k][reg] = live ? from[d0] | uint32_t(from[d1]) << 16 : 0;
          }
        float unit = 1.0f;
        if (__is_same(T, Half) && s.work == DType::bf16) unit = brain_to_half(raw);
        row_scale[m][h] = s.scale * unit * (s.softcap > 0.0f ? 1.0f : kLog2e) / K::kCarry * c.k_scale;
#pragma unroll
        for (int k = 0; k < kD / 16; ++k)
#pragma unroll
          for (int reg = 0; reg < 2; ++reg) q[m][k][reg * 2 + h] = raw[k][reg];
      }
    for (int o = 4; o < 32; o <<= 1) {
      safe_begin = max(safe_begin, __shfl_xor_sync(0xffffffffu, safe_begin, o));
      safe_end = min(safe_end, __shfl_xor_sync(0xffffffffu, safe_end, o));
    }
    const bool extra = s.softcap > 0.0f || s.slopes || l.mask;
    float out[kRowTiles][kD / 8][4] = {};

    for (int key = seg.kv_begin; key < seg.kv_end; key += kTile) {
      copies_wait<kStages - 2>();
      __syncwarp();
      feed.issue();
      const uint8_t* stage = ring + use * stage_bytes;
      use = use + 1 == kStages ? 0 : use + 1;
      const TileScales scales{stage + Size::kTileBytes, scale_bytes, c.group_shift, c.scale_dtype == DType::f16};

      constexpr int kN = kTile / 8;  // columns of 8 keys
      float score[kRowTiles][kN][4] = {};
      if constexpr (K::kGroup) {
        // Groups of 32 and more scale the sums, which is exact; smaller ones were scaled as they were widened.
        const bool sums = c.group_shift >= 5;
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
            if (sums ? (((kk + 1) * 32) & ((1 << c.group_shift) - 1)) == 0 : kk + 1 == kD / 32) {
#pragma unroll
              for (int n = 0; n < 2; ++n) {
                const int row = half * 16 + n * 8 + tid * 2;
                const float even = sums ? scales.get(row, kk * 32) : 1.0f;
                const float odd = sums ? scales.get(row + 1, kk * 32) : 1.0f;
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
      } else {
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
      const bool whole = key >= safe_begin && key + kTile <= min(safe_end, seg.kv_end);
      bool grew = false;
      float shrink[kRowTiles][2];
      uint32_t p[kRowTiles][kN / 2][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x[kN * 2];
#pragma unroll
          for (int e = 0; e < kN * 2; ++e) x[e] = score[m][e / 2][h * 2 + e % 2] * row_scale[m][h];
          if (extra) {
            for (int e = 0; e < kN * 2; ++e) {
              const int j = key + (e / 2) * 8 + tid * 2 + e % 2;
              float y = x[e];
              if (s.softcap > 0.0f) y = s.softcap * tanhf(y / s.softcap) * kLog2e;
              y += row_slope[m][h] * float(j - row_own[m][h]);
              if (l.mask && j < seg.kv_end) y += load_float(l.mask, s.work, row_mask[m][h] + j) * kLog2e;
              x[e] = y;
            }
          }
          if (!whole) {
#pragma unroll
            for (int e = 0; e < kN * 2; ++e) {
              const int j = key + (e / 2) * 8 + tid * 2 + e % 2;
              const bool seen = j < min(row_end[m][h], seg.kv_end) && (j >= row_begin[m][h] || j < s.sinks);
              if (!seen) x[e] = -INFINITY;
            }
          }
          float most = x[0];
#pragma unroll
          for (int e = 1; e < kN * 2; ++e) most = fmaxf(most, x[e]);
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
          const float next = fmaxf(top[m][h], most), base = (next == -INFINITY ? 0.0f : next) - kShift;
          grew |= next > top[m][h];
          shrink[m][h] = exp2_fast(top[m][h] - kShift - base);
          top[m][h] = next;
          float more = 0.0f;
#pragma unroll
          for (int e = 0; e < kN * 2; ++e) {
            x[e] = exp2_fast(x[e] - base);
            more += x[e];
          }
          sum[m][h] = sum[m][h] * shrink[m][h] + more;
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
            for (int e = 0; e < 4; ++e) out[m][n][e] *= shrink[m][e / 2];
      }
      constexpr int kStep = kD == 96 ? 4 : 8;
#pragma unroll
      for (int n = 0; n < kD / 8; n += kStep)
#pragma unroll
        for (int k = 0; k < kN / 2; ++k) {
          uint32_t b[kStep][2];
          K::template values<kD, kStep>(stage + kTile * kRow, k * 16, lane, n, scales, b);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int i = 0; i < kStep; ++i) T::mma(out[m][n + i], p[m][k], b[i][0], b[i][1]);
        }
    }

    // ---- the run's result leaves, to the output or as a part to be merged ----
    const float value_scale = c.v_scale / K::kCarry;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float total = sum[m][h];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const int r = m * 16 + h * 8 + g;
        if (r >= seg.row_count) continue;
        const int flat = seg.row_begin + r, query = flat / s.group, head = kv_head * s.group + flat % s.group;
        const bool masked = !(total > 0.0f);
        const float base = top[m][h] - kShift;  // log2 of what `total` is counted in
        const bool partial = seg.slot >= 0;
        const int64_t row = int64_t(partial ? seg.slot + query : v.rows[seg.tokens + query].token) * s.heads + head;
        if (!partial && l.sink_logits && !masked) total += exp2f(l.sink_logits[head] * kLog2e - base);
        const float f = masked ? 0.0f : value_scale / total * (partial ? 1.0f : s.out_inv_scale);
        void* to = partial ? static_cast<void*>(l.partial) : l.out;
        const DType type = partial ? DType::f32 : s.out;
        if constexpr (K::kBits == 16) {
#pragma unroll
          for (int n = 0; n < kD / 8; ++n)
            store_run<2>(to, type, row * kD + n * 8 + tid * 2, {out[m][n][h * 2] * f, out[m][n][h * 2 + 1] * f});
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int n = 0; n < kD / 8; n += 4)
              store_run<4>(to, type, row * kD + K::template value_dim<kD>(n, tid * 2 + e),
                           {out[m][n][h * 2 + e] * f, out[m][n + 1][h * 2 + e] * f, out[m][n + 2][h * 2 + e] * f,
                            out[m][n + 3][h * 2 + e] * f});
        }
        float* lse = partial ? l.partial_lse : l.lse;
        if (lse && tid == 0) lse[row] = masked ? -INFINITY : base * kLn2 + logf(total);
      }
    if (seg.merges > 0) merge_if_last<kD>(s, v, l, seg, kv_head, lane);
  }
}

}  // namespace kvasir::attention::cuda
