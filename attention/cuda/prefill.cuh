// What prefill in 16 bits and in FP8 share. A block keeps taking tiles of 128 queries of one head: one thread feeds it
// (K and V tiles of 128 keys by the tensor memory accelerator), two warpgroups of 64 rows compute, each running its
// softmax while the other has the matrix units. Keys come last first: the new ones, then the cached prefix.
//   operations of a tile pair: 4 * 128 * 128 * D;  bytes into shared memory: 2 * 128 * D elements, from L2 mostly
#pragma once

#include "attention/cuda/prefill_feed.cuh"
#include "attention/cuda/prefill_results.cuh"
#include "attention/cuda/wgmma.cuh"

namespace kvasir::attention::cuda {

template <class M, bool kExtra>
__device__ inline void prefill_block(const typename M::Maps& maps, const Shape& s, const StepView& v, const Layer& l,
                                     const PrefillTile* tiles, const TileQueue& queue) {
  using Shared = PrefillShared<M>;
  extern __shared__ uint8_t raw[];
  Shared& sh = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  constexpr int kD = M::kD;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(&sh.q_full[i], 1);
      barrier_init(&sh.q_empty[i], 8);  // by warps
      barrier_init(&sh.piece_full[i], kPieces);
    }
    barrier_init(&sh.tile_asked, 1);
    barrier_init(&sh.tile_told, 1);
    for (int i = 0; i < M::kStages; ++i) {
      barrier_init(&sh.k_full[i], 1);
      barrier_init(&sh.v_full[i], 1);
      barrier_init(&sh.k_empty[i], 2);
      barrier_init(&sh.v_empty[i], 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  if constexpr (M::kOnes > 0) {
    for (auto& values : sh.v) M::add_ones(values);
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
    // The plan lies in memory since before the kernel ahead of this one.
    if (threadIdx.x == 64) take_tiles<M>(sh, s, tiles, queue, v.counts[kCountTiles] * s.heads);
    if (!queue.beside) wait_for_kernel_ahead();
    if (threadIdx.x == 64) {
      leave_queue(queue);
      if (queue.beside) wait_for_kernel_ahead();
    }
    if (threadIdx.x == 0) feed_tiles<M>(sh, maps, s);
    if constexpr (M::kStores)
      if (threadIdx.x >= 32 && threadIdx.x < 32 + kPieces && l.stored_by_prefill)
        store_new<M>(sh, s, v, l, threadIdx.x - 32);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
    if (!queue.beside) wait_for_kernel_ahead();
    // Known to be a warp's, not a thread's own, descriptors are made where the matrix units read them.
    const int group = M::kWarpWide ? __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1 : threadIdx.x / 128 - 1;
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, tid = lane % 4, in_tile = group * 64 + warp * 16 + g;  // and + 8
    const float unit = M::score_unit(s, l), scale = kExtra ? 1.0f : unit * kLog2e;
    const float step = 0.125f / scale;  // of a logarithm, in scores
    if (M::kTurns && group == 1) named_arrive(1, 256);
    auto take_turn = [&] {
      if constexpr (M::kTurns) named_sync(1 + group, 256);
    };
    auto pass_turn = [&] {
      if constexpr (M::kTurns) named_arrive(2 - group, 256);
    };

    // Zero, but not a constant: one written into the sums of a product would have them all moved.
    const float nothing = s.heads > 0 ? 0.0f : 1.0f;
    float score[kTileKeys / 2], out[kD / 2 + M::kSums];
    uint32_t weights[kTileKeys * M::kBytes / 8];
    int use = 0, phase = 0;
    auto advance = [&] {
      if (++use == M::kStages) use = 0, phase ^= 1;
    };
    auto multiply_keys = [&](int slot) {
      M::multiply_keys(score, rows_descriptor(shared_address(sh.q[slot]) + group * 64 * 128),
                       rows_descriptor(shared_address(sh.k[use])));
      wgmma_commit();
    };

    for (int n = 0;; ++n) {
      barrier_wait(&sh.q_full[n & 1], (n >> 1) & 1);
      // Read by the lane that will say when its warp is done with it; what came by a shuffle the compiler does not take
      // for divergent.
      PrefillTile tile = {};
      int w = 0;
      if (lane == 0) w = sh.taken[n & 3], tile = sh.work[n & 3];
      w = __shfl_sync(0xffffffffu, w, 0);
      if (w < 0) break;
      barrier_wait(&sh.k_full[use], phase);
      wgmma_fence();
      multiply_keys(n & 1);
      for (int32_t* x :
           {&tile.row, &tile.of.q_begin, &tile.of.q_len, &tile.of.kv_len, &tile.of.start_pos, &tile.of.flags})
        *x = __shfl_sync(0xffffffffu, *x, 0);
      if constexpr (kExtra) tile.of.kv_begin = __shfl_sync(0xffffffffu, tile.of.kv_begin, 0);
      const Sequence& seq = tile.of;
      const int head = w % s.heads, slot = n & 1;
      const Walk walk = walk_of<M::kGathered>(s, tile);
      const int count = __shfl_sync(0xffffffffu, walk.count(), 0);  // or wgmma is not known to be met by all
      int row_own[2], row_begin[2], row_end[2];
      for (int h = 0; h < 2; ++h) {
        row_own[h] = seq.start_pos + tile.row + in_tile + h * 8;
        const Range r = visible(s, seq, row_own[h]);
        row_begin[h] = r.begin, row_end[h] = r.end;
      }
      const Range low = visible(s, seq, seq.start_pos + tile.row + group * 64);
      const Range high = visible(s, seq, seq.start_pos + tile.row + group * 64 + 63);
      const float slope = kExtra && s.slopes ? s.slopes[head] * kLog2e : 0.0f;
      float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, shrink[2];

      auto mask = [&](int i) {  // tile i in `score`
        int t;
        const bool fresh = walk.at(i, &t);
        const int base = (fresh ? seq.start_pos : 0) + t * kTileKeys;
        const int limit = fresh || M::kGathered ? seq.kv_len : seq.start_pos;
        if constexpr (kExtra) {
#pragma unroll
          for (int e = 0; e < kTileKeys / 2; ++e) {
            const int j = base + (e / 4) * 8 + tid * 2 + e % 2, h = (e / 2) % 2;
            float x = score[e] * unit;
            if (s.softcap > 0.0f) {
              const float z = exp2_fast(x / s.softcap * (2.0f * kLog2e));  // tanh, to float32's precision near enough
              x = s.softcap * (1.0f - __fdividef(2.0f, z + 1.0f));
            }
            x = x * kLog2e + slope * float(j - row_own[h]);
            const int r = tile.row + in_tile + h * 8;
            if (l.mask && j < limit && r < seq.q_len)
              x += kLog2e * load_float(l.mask, s.work,
                                       head * l.mask_head + int64_t(seq.q_begin + r) * l.mask_row + seq.kv_begin + j);
            score[e] = x;
          }
        }
        if (!(base >= high.begin && base + kTileKeys <= min(limit, low.end))) {
          // Bounds from this lane's first column: the columns themselves are constants then.
          const int mine = base + tid * 2;
          const int last[2] = {min(limit, row_end[0]) - mine, min(limit, row_end[1]) - mine};
          if (s.window == 0) {
#pragma unroll
            for (int e = 0; e < kTileKeys / 2; ++e)
              if ((e / 4) * 8 + e % 2 >= last[(e / 2) % 2]) score[e] = -INFINITY;
          } else {
#pragma unroll
            for (int e = 0; e < kTileKeys / 2; ++e) {
              const int c = (e / 4) * 8 + e % 2, h = (e / 2) % 2;
              if (!(c < last[h] && (c >= row_begin[h] - mine || c < s.sinks - mine))) score[e] = -INFINITY;
            }
          }
        }
      };
      // Of one tile at a time: the matrix units keep 14 bits of a sum in FP8, and one of nothing but positive terms
      // would come out the smaller the more there are.
      auto add_sums = [&] {
        if constexpr (M::kSums > 0) {
#pragma unroll
          for (int h = 0; h < 2; ++h) sum[h] += out[kD / 2 + h * 2];
#pragma unroll
          for (int e = 0; e < M::kSums; ++e) out[kD / 2 + e] *= nothing;
        }
      };
      // Moves the running maximum, leaves weights in place of scores.
      auto softmax = [&] {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float tops[M::kChains], more[M::kChains] = {};
#pragma unroll
          for (float& x : tops) x = top[h];
#pragma unroll
          for (int e = 0; e < kTileKeys / 2; ++e)
            if ((e / 2) % 2 == h) tops[(e / 4) % M::kChains] = fmaxf(tops[(e / 4) % M::kChains], score[e]);
          float most = tops[0];
#pragma unroll
          for (int c = 1; c < M::kChains; ++c) most = fmaxf(most, tops[c]);
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
          const float base_of = most == -INFINITY ? 0.0f : most * scale;
          shrink[h] = exp2_fast(top[h] * scale - base_of);
          top[h] = most;
#pragma unroll
          for (int e = 0; e < kTileKeys / 2; ++e)
            if ((e / 2) % 2 == h) {
              score[e] = M::weigh(score[e], scale, base_of);
              if (M::kSums == 0) more[(e / 4) % M::kChains] += score[e];
            }
          float all = more[0];
#pragma unroll
          for (int c = 1; c < M::kChains; ++c) all += more[c];
          if (M::kSums == 0) sum[h] = sum[h] * shrink[h] + all;
        }
      };
      // The same by the maximum as it was, which moves only for rows that outgrow their limit, and then for all that
      // are larger among the eight of a warp that lanes have as their first or their second. Logarithms of two keys lie
      // side by side, in float16.
      bool moved[2] = {true, true};
      uint32_t limits = 0;  // of both rows
      auto softmax_by_old_top = [&] {
        if constexpr (M::kLogs) {
          const float by = scale * 8.0f;
          float base[2];
          uint32_t logs[kTileKeys / 4], most[2][2] = {};
#pragma unroll
          for (int h = 0; h < 2; ++h) base[h] = M::base_of_logs(top[h] * scale);
          auto look = [&](int p) {
            return M::pack_logs(__fmaf_rn(score[p * 2], by, -base[p % 2]),
                                __fmaf_rn(score[p * 2 + 1], by, -base[p % 2]));
          };
#pragma unroll
          for (int p = 0; p < kTileKeys / 4; ++p) {
            logs[p] = look(p);
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
              shrink[h] = exp2_fast(less * -0.125f);
              top[h] += less * step;
              if (some_unknown) {
                float here = -INFINITY;
#pragma unroll
                for (int e = 0; e < kTileKeys / 2; ++e)
                  if ((e / 2) % 2 == h) here = fmaxf(here, score[e]);
                here = fmaxf(here, __shfl_xor_sync(0xffffffffu, here, 1));
                here = fmaxf(here, __shfl_xor_sync(0xffffffffu, here, 2));
                if (unknown[h]) {
                  top[h] = here, shrink[h] = 0.0f;
                  base[h] = M::base_of_logs(top[h] * scale);
#pragma unroll
                  for (int p = h; p < kTileKeys / 4; p += 2) logs[p] = look(p);
                }
              }
#pragma unroll
              for (int p = h; p < kTileKeys / 4; p += 2) logs[p] = M::lower(logs[p], both);
            }
          }
#pragma unroll
          for (int p = 0; p < kTileKeys / 4; ++p) score[p * 2] = __uint_as_float(M::weights_of(logs[p]));
        }
      };

      wgmma_wait<0>();
      hold(score);
      if (thread == 0) barrier_arrive(&sh.k_empty[use]);
      if (n > 0 && lane == 0) {  // the results of the tile before have left: queries may come there
        bulk_stores_read<0>();
        barrier_arrive(&sh.q_empty[slot ^ 1]);
      }
      mask(0);
      softmax();
      M::pack(score, weights);
      if constexpr (M::kLogs) barrier_wait(&sh.v_full[use], phase);
      int previous = use, previous_phase = phase;
      advance();
#pragma unroll
      for (float& x : out) x = 0.0f;
      for (int i = 1; i < count; ++i) {
        barrier_wait(&sh.k_full[use], phase);
        take_turn();
        wgmma_fence();
        multiply_keys(slot);
        if constexpr (!M::kLogs) barrier_wait(&sh.v_full[previous], previous_phase);
        M::multiply_values(out, weights, shared_address(sh.v[previous]));
        wgmma_commit();
        pass_turn();
        if constexpr (M::kLogs) limits = M::pack_logs(M::limit(sum[0]), M::limit(sum[1]));  // while keys are multiplied
        wgmma_wait<1>();
        hold(score);
        if (thread == 0) barrier_arrive(&sh.k_empty[use]);
        mask(i);
        if constexpr (M::kLogs) {
          softmax_by_old_top();
          hold(score);
          barrier_wait(&sh.v_full[use], phase);
        } else {
          softmax();
        }
        wgmma_wait<0>();
        hold(out);
        if (thread == 0) barrier_arrive(&sh.v_empty[previous]);
        add_sums();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (!moved[h]) continue;
#pragma unroll
          for (int e = 0; e < kD / 2; ++e)
            if ((e / 2) % 2 == h) out[e] *= shrink[h];
          if (M::kSums > 0) sum[h] *= shrink[h];
        }
        if constexpr (M::kLogs)
          M::join(score, weights);
        else
          M::pack(score, weights);
        previous = use, previous_phase = phase;
        advance();
      }
      if constexpr (!M::kLogs) barrier_wait(&sh.v_full[previous], previous_phase);
      wgmma_fence();
      M::multiply_values(out, weights, shared_address(sh.v[previous]));
      wgmma_commit();
      wgmma_wait<0>();
      hold(out);
      if (thread == 0) barrier_arrive(&sh.v_empty[previous]);

      add_sums();

      leave_results<M>(s, l, maps.out, tile, head, sh.q[slot], group, thread, top, sum, scale, out);
      __syncwarp();
      if (lane == 0) bulk_stores_commit();
    }
    if (lane == 0) bulk_stores_done();
  }
}

}  // namespace kvasir::attention::cuda
