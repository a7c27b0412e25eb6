// What prefill in 16 bits and in FP8 share. A block keeps taking tiles of 128 queries of one head: one thread feeds it
// (K and V tiles of 128 keys by the tensor memory accelerator), two warpgroups of 64 rows compute, each running its
// softmax while the other has the matrix units. Keys come last first: the new ones, then the cached prefix.
//   operations of a tile pair: 4 * 128 * 128 * D;  bytes into shared memory: 2 * 128 * D elements, from L2 mostly
#pragma once

#include "attention/cuda/prefill_feed.cuh"
#include "attention/cuda/prefill_results.cuh"
#include "attention/cuda/prefill_stages.cuh"
#include "attention/cuda/wgmma.cuh"

namespace kvasir::attention::cuda {

template <class M>
__device__ __forceinline__ void begin_barriers(PrefillShared<M>& sh) {
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

// The warpgroup that feeds the others: one thread takes tiles, one sends for queries, keys and values, some store.
template <class M>
__device__ __forceinline__ void produce_tiles(PrefillShared<M>& sh, const typename M::Maps& maps, const Shape& s,
                                              const StepView& v, const Layer& l, const PrefillTile* tiles,
                                              const TileQueue& queue) {
  // The plan lies in memory since before the previous kernel.
  if (threadIdx.x == 64) take_tiles<M>(sh, s, tiles, queue, v.counts[kCountTiles] * s.heads);
  if (!queue.beside) wait_for_previous_kernel();
  if (threadIdx.x == 64) {
    leave_queue(queue);
    if (queue.beside) wait_for_previous_kernel();
  }
  if (threadIdx.x == 0) feed_tiles<M>(sh, maps, s);
  if constexpr (M::kStores)
    if (threadIdx.x >= 32 && threadIdx.x < 32 + kPieces && l.stored_by_prefill)
      store_new<M>(sh, s, v, l, threadIdx.x - 32);
}

// A warpgroup that computes 64 rows of every tile.
template <class M, bool kExtra>
__device__ __forceinline__ void compute_tiles(PrefillShared<M>& sh, const typename M::Maps& maps, const Shape& s,
                                              const Layer& l) {
  constexpr int kD = M::kD;
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
    const int head = w % s.heads, slot = n & 1;
    const TileWalk walk = walk_of<M::kGathered>(s, tile);
    const int count = __shfl_sync(0xffffffffu, walk.count(), 0);  // or wgmma is not known to be met by all
    const RowsView rows(s, tile, group, in_tile, kExtra ? alibi_slope(s, head) : 0.0f);
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, rescale[2];
    bool moved[2] = {true, true};
    uint32_t limits = 0;  // of both rows
    auto transform = [&](int i) {
      transform_tile<M, kExtra>(s, l, tile, walk, rows, i, head, in_tile, tid, unit, score);
    };

    wgmma_wait<0>();
    hold(score);
    if (thread == 0) barrier_arrive(&sh.k_empty[use]);
    if (n > 0 && lane == 0) {  // the results of the tile before have left: queries may come there
      bulk_stores_read<0>();
      barrier_arrive(&sh.q_empty[slot ^ 1]);
    }
    transform(0);
    softmax_tile<M>(scale, score, top, sum, rescale);
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
      transform(i);
      if constexpr (M::kLogs) {
        softmax_tile_by_logs<M>(scale, step, limits, score, top, rescale, moved);
        hold(score);
        barrier_wait(&sh.v_full[use], phase);
      } else {
        softmax_tile<M>(scale, score, top, sum, rescale);
      }
      wgmma_wait<0>();
      hold(out);
      if (thread == 0) barrier_arrive(&sh.v_empty[previous]);
      add_sums<M>(nothing, out, sum);
      rescale_results<M>(moved, rescale, out, sum);
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

    add_sums<M>(nothing, out, sum);

    leave_results<M>(s, l, maps.out, tile, head, sh.q[slot], group, thread, top, sum, scale, out);
    __syncwarp();
    if (lane == 0) bulk_stores_commit();
  }
  if (lane == 0) bulk_stores_done();
}

template <class M, bool kExtra>
__device__ inline void prefill_block(const typename M::Maps& maps, const Shape& s, const StepView& v, const Layer& l,
                                     const PrefillTile* tiles, const TileQueue& queue) {
  using Shared = PrefillShared<M>;
  extern __shared__ uint8_t raw[];
  Shared& sh = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) begin_barriers<M>(sh);
  if constexpr (M::kOnes > 0) {
    for (auto& values : sh.v) M::add_ones(values);
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
    produce_tiles<M>(sh, maps, s, v, l, tiles, queue);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
    if (!queue.beside) wait_for_previous_kernel();
    compute_tiles<M, kExtra>(sh, maps, s, l);
  }
}

}  // namespace kvasir::attention::cuda
