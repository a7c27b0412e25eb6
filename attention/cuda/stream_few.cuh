// The stream kernel for tiles of up to 8 query rows of one kv head, which is what decoding with grouped heads has. Keys
// are the matrix units' tall side and the rows of q their narrow one: scores come out as [keys x rows], results as
// [elements of V x rows], with half the instructions and half the registers of the other way round. A scale a group
// multiplies K's sums and V's weights, never an element, so groups are of 32 and more.
#pragma once

#include "attention/cuda/stream_append.cuh"
#include "attention/cuda/stream_feed.cuh"
#include "attention/cuda/stream_join.cuh"
#include "attention/cuda/stream_rows.cuh"

namespace kvasir::attention::cuda {

// Narrow kinds wait for arithmetic as much as for memory: three blocks of two or more stages where registers allow.
template <class K, int kD>
struct FewSize : StreamSize<K, kD> {
  using All = StreamSize<K, kD>;
  static constexpr bool kThree = K::kBits < 16 && kD <= 128;
  static constexpr int kStages = !kThree ? All::kStages : 17408 / All::kTileBytes > 4 ? 4 : 17408 / All::kTileBytes;
  static constexpr int kBlocks = kThree ? 3 : All::kBlocks;
  static int bytes(int scale_bytes) { return All::stage_bytes(scale_bytes) * kStages * kStreamWarps; }
  static constexpr int kJoinedWarps = kBlocks * kStreamWarps;  // of a block that has a multiprocessor to itself
  static_assert(kStages * All::kTileBytes >= int(sizeof(Joined<kD>)));
};

// kOwn: the warps append what their runs of keys end with, and turn their queries in registers (Layer::appended_here,
// where no blocks are joined). A kernel of its own, so that the others keep their registers.
template <class K, int kD, bool kOwn = false>
__global__ void __launch_bounds__(FewSize<K, kD>::kJoinedWarps * 32, 1)
    few_rows_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v,
                    const __grid_constant__ Layer l, const __grid_constant__ StreamList list, int given_scale_bytes) {
  using T = typename K::T;
  using Size = FewSize<K, kD>;
  constexpr int kTile = Size::kTile, kStages = Size::kStages, kRow = Size::kRow;
  constexpr int kM = kTile / 16;                               // tall tiles of keys
  constexpr float kShift = __is_same(T, Half) ? 10.0f : 0.0f;  // keeps small weights normal in float16
  constexpr float kMostScale = 63.9f;                          // times 2^kShift, still a float16
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, tid = lane & 3;
  const int scale_bytes = K::kShift > 0 ? (kD >> K::kShift) * 2 : given_scale_bytes;
  const int stage_bytes = Size::stage_bytes(scale_bytes);
  uint8_t* ring = shared + warp * kStages * stage_bytes;

  const int warps = blockDim.x / 32, index = blockIdx.x * warps + warp;
  int kv_head = index % s.kv_heads, part = index / s.kv_heads;
  if (list.joined > 0) {  // so many blocks have one kv head of an item
    const int pair = blockIdx.x / list.joined;
    kv_head = pair % s.kv_heads;
    part = (pair / s.kv_heads * list.joined + blockIdx.x % list.joined) * warps + warp;
  }
  // The plan lies in memory since before the kernel ahead of this one: it is read while that one still runs.
  const PartHead head = part < list.count ? list.heads[part] : PartHead{};
  const CacheLayer& c = l.cache;
  Feed<K, kD, Size, true> feed(s, v, c, list, head, ring, stage_bytes, scale_bytes, kv_head, lane);
  feed.ask_ahead();
  // A lane holds q of row g, and scores, sums and results of rows 2 * tid and 2 * tid + 1.
  Segment seg = head.first;
  Row rows[2];
  int q_token = 0;
  auto look = [&] {
    q_token = v.rows[seg.tokens + (seg.row_begin + (g < seg.row_count ? g : 0)) / s.group].token;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      rows[h] = v.rows[seg.tokens + (seg.row_begin + (tid * 2 + h < seg.row_count ? tid * 2 + h : 0)) / s.group];
  };
  if (head.begin < head.end) look();
  wait_for_kernel_ahead();
  let_next_kernel_start();
  if constexpr (kOwn) append_runs<kD>(s, v, l, list, head, kv_head, lane);
  // Into the stage that the first copies leave free.
  constexpr bool kAppends = !kOwn && kD % 64 == 0;
  uint8_t* queries = shared + (kStages - 1) * stage_bytes;
  static_assert(Size::kTileBytes >= 16 * kD);
  if constexpr (kAppends)
    if (l.appended_here) {
      append_here<kD>(s, v, l, seg, q_token, kv_head, seg.kv_begin < seg.kv_end && seg.kv_end == rows[0].own + 1, warp,
                      lane, queries);
      __syncthreads();
    }
  if (head.begin == head.end) return;

  const bool extra = s.softcap > 0.0f || s.slopes || l.mask;
  int use = 0;
  for (int segment = head.begin; segment < head.end; ++segment) {
    if (segment > head.begin) {
      seg = list.segments[segment];
      look();
    }
    uint32_t q[kD / 16][2];
    float unit = 1.0f;
    {
      const bool live = g < seg.row_count;
      const int flat = seg.row_begin + (live ? g : 0);
      const bool here = kAppends && l.appended_here;
      const uint16_t* from = here   ? reinterpret_cast<const uint16_t*>(queries) + flat * kD
                             : kOwn ? given_row(s, l, 0, kv_head * s.group + flat % s.group, q_token, kD)
                                    : static_cast<const uint16_t*>(l.q) +
                                          (int64_t(q_token) * s.heads + kv_head * s.group + flat % s.group) * kD;
#pragma unroll
      for (int k = 0; k < kD / 16; ++k)
#pragma unroll
        for (int reg = 0; reg < 2; ++reg) {
          const int d0 = K::query_dim(k / 2, k % 2, reg, 0, tid), d1 = K::query_dim(k / 2, k % 2, reg, 1, tid);
          if constexpr (K::kBits >= 8)
            q[k][reg] = live ? *reinterpret_cast<const uint32_t*>(from + d0) : 0;
          else
            q[k][reg] = live ? from[d0] | uint32_t(from[d1]) << 16 : 0;
        }
      if constexpr (kOwn) turn_query<kD>(s, l, q_token, kv_head * s.group + flat % s.group, tid, q);
      if (here) __syncthreads();  // the stage is everybody's again
      if (segment == head.begin)  // behind the queries on the way to memory, so that they do not wait for all keys
        for (int i = 0; i < kStages - 1; ++i) feed.issue();
      if constexpr (K::kBytes)
        unit = to_bytes(q, s.work);
      else if (__is_same(T, Half) && s.work == DType::bf16)
        unit = brain_to_half(q);
    }
    float row_scale[2], row_slope[2], top[2], sum[2];
    int row_begin[2], row_end[2], row_own[2];
    int64_t row_mask[2];
    int safe_begin = 0, safe_end = 0x7fffffff;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = tid * 2 + h, flat = seg.row_begin + (r < seg.row_count ? r : 0);
      const Row& row = rows[h];
      const int query_head = kv_head * s.group + flat % s.group;
      row_begin[h] = row.begin, row_end[h] = row.end, row_own[h] = row.own;
      safe_begin = max(safe_begin, row.begin);
      safe_end = min(safe_end, row.end);
      row_slope[h] = s.slopes ? s.slopes[query_head] * kLog2e : 0.0f;
      row_mask[h] = query_head * l.mask_head + int64_t(row.token) * l.mask_row + row.column;
      row_scale[h] = s.scale * __shfl_sync(0xffffffffu, unit, r * 4) * (s.softcap > 0.0f ? 1.0f : kLog2e) * c.k_scale;
      top[h] = -INFINITY, sum[h] = 0.0f;
    }
    for (int o = 1; o < 4; o <<= 1) {
      safe_begin = max(safe_begin, __shfl_xor_sync(0xffffffffu, safe_begin, o));
      safe_end = min(safe_end, __shfl_xor_sync(0xffffffffu, safe_end, o));
    }
    float out[kD / 16][4] = {};

    for (int key = seg.kv_begin; key < seg.kv_end; key += kTile) {
      copies_wait<kStages - 2>();
      __syncwarp();
      feed.issue();
      const uint8_t* stage = ring + use * stage_bytes;
      use = use + 1 == kStages ? 0 : use + 1;
      const TileScales scales{stage + Size::kTileBytes, scale_bytes, K::kShift > 0 ? K::kShift : c.group_shift,
                              K::kShift > 0 || c.scale_dtype == DType::f16};

      float score[kM][4] = {}, other[kM][4] = {};  // two chains of additions instead of one twice as long
      if constexpr (K::kBytes) {
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
              if ((((kk + 1) * 32) & ((1 << scales.group_shift) - 1)) == 0) {
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
      } else {
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
              if ((((kk + 1) * 32) & ((1 << scales.group_shift) - 1)) == 0) {
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
      const bool whole = key >= safe_begin && key + kTile <= min(safe_end, seg.kv_end);
      float x[2][kM * 2], most[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < kM * 2; ++e) {
          float y = score[e / 2][(e % 2) * 2 + h];
          if constexpr (!K::kGroup && !K::kBytes) y += other[e / 2][(e % 2) * 2 + h];
          x[h][e] = y * row_scale[h];
        }
        if (extra) {
          for (int e = 0; e < kM * 2; ++e) {
            const int j = key + e * 8 + g;
            float y = x[h][e];
            if (s.softcap > 0.0f) y = s.softcap * tanhf(y / s.softcap) * kLog2e;
            y += row_slope[h] * float(j - row_own[h]);
            if (l.mask && j < seg.kv_end) y += load_float(l.mask, s.work, row_mask[h] + j) * kLog2e;
            x[h][e] = y;
          }
        }
        if (!whole) {
#pragma unroll
          for (int e = 0; e < kM * 2; ++e) {
            const int j = key + e * 8 + g;
            const bool seen = j < min(row_end[h], seg.kv_end) && (j >= row_begin[h] || j < s.sinks);
            if (!seen) x[h][e] = -INFINITY;
          }
        }
        most[h] = x[h][0];
#pragma unroll
        for (int e = 1; e < kM * 2; ++e) most[h] = fmaxf(most[h], x[h][e]);
      }
      if (__any_sync(0xffffffffu, most[0] > top[0] || most[1] > top[1])) {
        float shrink[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          for (int o = 4; o < 32; o <<= 1) most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffffu, most[h], o));
          const float next = fmaxf(top[h], most[h]);
          shrink[h] = exp2_fast(top[h] - (next == -INFINITY ? 0.0f : next));
          top[h] = next;
          sum[h] *= shrink[h];
        }
#pragma unroll
        for (int n = 0; n < kD / 16; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) out[n][e] *= shrink[e % 2];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float base = (top[h] == -INFINITY ? 0.0f : top[h]) - kShift;
#pragma unroll
        for (int e = 0; e < kM * 2; ++e) {
          x[h][e] = exp2_fast(x[h][e] - base);
          sum[h] += x[h][e];
        }
      }
      uint32_t p[kM * 2];
      if constexpr (!K::kGroup) {
#pragma unroll
        for (int e = 0; e < kM * 2; ++e) p[e] = transposed(T::pack(x[0][e], x[1][e]));
      }
      if constexpr (K::template kWide<kD>) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          uint4 rows[4];
          K::template wide_rows<kD>(stage + kTile * kRow, m * 16, lane, rows);
#pragma unroll
          for (int block = 0; block < kD / 32; ++block) {
            uint32_t b[4][2];
            K::wide_columns(rows, block, b);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32_t a[4] = {b[i * 2][0], b[i * 2 + 1][0], b[i * 2][1], b[i * 2 + 1][1]};
              T::mma(out[block * 2 + i], a, p[m * 2], p[m * 2 + 1]);
            }
          }
        }
      } else {
#pragma unroll
        for (int block = 0; block < kD / 32; ++block) {
          if constexpr (K::kGroup) {
            if (((block * 32) & ((1 << scales.group_shift) - 1)) == 0) {
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
            K::template columns<kD>(stage + kTile * kRow, m * 16, lane, block, b);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32_t a[4] = {b[i * 2][0], b[i * 2 + 1][0], b[i * 2][1], b[i * 2 + 1][1]};
              T::mma(out[block * 2 + i], a, p[m * 2], p[m * 2 + 1]);
            }
          }
        }
      }
    }

    if (list.joined > 0) {
      copies_wait<0>();
      __syncwarp();
      Joined<kD>& mine = *reinterpret_cast<Joined<kD>*>(ring);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float total = sum[h];
        for (int o = 4; o < 32; o <<= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
        const int r = tid * 2 + h;
        if (g == 0) mine.rows[r] = {top[h], total, rows[h].token, 0};
#pragma unroll
        for (int block = 0; block < kD / 32; ++block) {
          float* to = mine.x + r * Joined<kD>::kStride;
          const float y[4] = {out[block * 2][h], out[block * 2][2 + h], out[block * 2 + 1][h],
                              out[block * 2 + 1][2 + h]};
          if constexpr (K::kBits == 16) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[K::template column_dim<kD>(block, i, g)] = y[i];
          } else {
            *reinterpret_cast<float4*>(to + K::template column_dim<kD>(block, 0, g)) = {y[0], y[1], y[2], y[3]};
          }
        }
      }
      join_results<kD, Size::kJoinedWarps>(s, l, seg, shared, kStages * stage_bytes, kv_head, list.joined, kShift);
      return;
    }

    // ---- the run's result leaves, to the output or as a part to be merged ----
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = sum[h];
      for (int o = 4; o < 32; o <<= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
      const int r = tid * 2 + h;
      if (r >= seg.row_count) continue;
      const int flat = seg.row_begin + r, query = flat / s.group, query_head = kv_head * s.group + flat % s.group;
      const bool masked = !(total > 0.0f);
      const float base = top[h] - kShift;  // log2 of what `total` is counted in
      const bool partial = seg.slot >= 0;
      const int64_t row = int64_t(partial ? seg.slot + query : v.rows[seg.tokens + query].token) * s.heads + query_head;
      if (!partial && l.sink_logits && !masked) total += exp2f(l.sink_logits[query_head] * kLog2e - base);
      const float f = masked ? 0.0f : c.v_scale / total * (partial ? 1.0f : s.out_inv_scale);
      with_type(partial ? DType::f32 : s.out, [&](auto type) {
        void* to = type.value == DType::f32 && partial ? l.partial : l.out;
#pragma unroll
        for (int block = 0; block < kD / 32; ++block) {
          const float y[4] = {out[block * 2][h] * f, out[block * 2][2 + h] * f, out[block * 2 + 1][h] * f,
                              out[block * 2 + 1][2 + h] * f};
          if constexpr (K::kBits == 16) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              store_float(to, type.value, row * kD + K::template column_dim<kD>(block, i, g), y[i]);
          } else {
            store_run<4>(to, type.value, row * kD + K::template column_dim<kD>(block, 0, g), {y[0], y[1], y[2], y[3]});
          }
        }
      });
      float* lse = partial ? l.partial_lse : l.lse;
      if (lse && g == 0) lse[row] = masked ? -INFINITY : base * kLn2 + logf(total);
    }
    if (seg.merges > 0) merge_if_last<kD>(s, v, l, seg, kv_head, lane);
  }
}

}  // namespace kvasir::attention::cuda
