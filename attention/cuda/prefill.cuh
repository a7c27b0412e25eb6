// What prefill in 16 bits and in FP8 share. A block keeps taking tiles of 128 queries of one head: one thread feeds it
// (K and V tiles of 128 keys by the tensor memory accelerator), two warpgroups of 64 rows compute, each running its
// softmax while the other has the matrix units. Keys come last first: the new ones, then the cached prefix.
//   operations of a tile pair: 4 * 128 * 128 * D;  bytes into shared memory: 2 * 128 * D elements, from L2 mostly
#pragma once

#include "attention/cuda/launch.h"
#include "attention/cuda/prefill_feed.cuh"
#include "attention/cuda/wgmma.cuh"

namespace kvasir::attention::cuda {

template <class M, bool kExtra>
__device__ inline void prefill_block(const typename M::Maps& maps, const Shape& s, const StepView& v, const Layer& l,
                                     const PrefillTile* tiles) {
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
    for (int i = 0; i < M::kStages; ++i) {
      barrier_init(&sh.k_full[i], 1);
      barrier_init(&sh.v_full[i], 1);
      barrier_init(&sh.k_empty[i], 2);
      barrier_init(&sh.v_empty[i], 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  wait_for_kernel_ahead();
  const int total = v.counts[kCountTiles] * s.heads;

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;\n");
    if (threadIdx.x == 0 && int(blockIdx.x) < total) feed_tiles<M>(sh, maps, s, tiles, total);
    if constexpr (M::kStores)
      if (threadIdx.x >= 32 && threadIdx.x < 32 + kPieces && l.stored_by_prefill)
        store_new<M>(sh, s, v, l, threadIdx.x - 32);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;\n");
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, tid = lane % 4, in_tile = group * 64 + warp * 16 + g;  // and + 8
    const float unit = M::score_unit(s, l), scale = kExtra ? 1.0f : unit * kLog2e;
    if (M::kTurns && group == 1) named_arrive(1, 256);
    auto take_turn = [&] {
      if constexpr (M::kTurns) named_sync(1 + group, 256);
    };
    auto pass_turn = [&] {
      if constexpr (M::kTurns) named_arrive(2 - group, 256);
    };

    float score[kTileKeys / 2], out[kD / 2];
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

    for (int w = blockIdx.x, n = 0; w < total; w += gridDim.x, ++n) {
      barrier_wait(&sh.q_full[n & 1], (n >> 1) & 1);
      barrier_wait(&sh.k_full[use], phase);
      wgmma_fence();
      multiply_keys(n & 1);
      PrefillTile tile = sh.work[n & 3];
      for (int32_t* x :
           {&tile.row, &tile.of.q_begin, &tile.of.q_len, &tile.of.kv_len, &tile.of.start_pos, &tile.of.flags})
        *x = __shfl_sync(0xffffffffu, *x, 0);  // or the compiler takes what depends on them for divergent
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

      // Masks tile i in `score`, moves the running maximum, leaves weights in place of scores.
      auto softmax = [&](int i) {
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
#pragma unroll
          for (int e = 0; e < kTileKeys / 2; ++e) {
            const int j = base + (e / 4) * 8 + tid * 2 + e % 2, h = (e / 2) % 2;
            if (!(j < min(limit, row_end[h]) && (j >= row_begin[h] || j < s.sinks))) score[e] = -INFINITY;
          }
        }
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
              score[e] = exp2_fast(score[e] * scale - (base_of - M::kShift));
              more[(e / 4) % M::kChains] += score[e];
            }
          float all = more[0];
#pragma unroll
          for (int c = 1; c < M::kChains; ++c) all += more[c];
          sum[h] = sum[h] * shrink[h] + all;
        }
      };

      wgmma_wait<0>();
      hold(score);
      if (thread == 0) barrier_arrive(&sh.k_empty[use]);
      softmax(0);
      M::pack(score, weights);
      int previous = use, previous_phase = phase;
      advance();
#pragma unroll
      for (float& x : out) x = 0.0f;
      for (int i = 1; i < count; ++i) {
        barrier_wait(&sh.k_full[use], phase);
        take_turn();
        wgmma_fence();
        multiply_keys(slot);
        barrier_wait(&sh.v_full[previous], previous_phase);
        M::multiply_values(out, weights, shared_address(sh.v[previous]));
        wgmma_commit();
        pass_turn();
        wgmma_wait<1>();
        hold(score);
        if (thread == 0) barrier_arrive(&sh.k_empty[use]);
        softmax(i);
        wgmma_wait<0>();
        hold(out);
        if (thread == 0) barrier_arrive(&sh.v_empty[previous]);
#pragma unroll
        for (int e = 0; e < kD / 2; ++e) out[e] *= shrink[(e / 2) % 2];
        M::pack(score, weights);
        previous = use, previous_phase = phase;
        advance();
      }
      barrier_wait(&sh.v_full[previous], previous_phase);
      wgmma_fence();
      M::multiply_values(out, weights, shared_address(sh.v[previous]));
      wgmma_commit();
      wgmma_wait<0>();
      hold(out);
      if (thread == 0) barrier_arrive(&sh.v_empty[previous]);

      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        const bool masked = !(sum[h] > 0.0f);
        const float base = top[h] * scale - M::kShift;  // log2 of what `sum` is counted in
        float all = sum[h];
        if (l.sink_logits && !masked) all += exp2f(l.sink_logits[head] * kLog2e - base);
        factor[h] = masked ? 0.0f : M::value_unit(l) * s.out_inv_scale / all;
        const int r = tile.row + in_tile + h * 8;
        if (l.lse && tid == 0 && r < seq.q_len)
          l.lse[int64_t(seq.q_begin + r) * s.heads + head] = masked ? -INFINITY : base * kLn2 + logf(all);
      }
      if (s.out == s.work) {
        // Through shared memory, so that rows leave in whole 16-byte pieces.
        uint8_t* mine = sh.q[slot] + group * 64 * 128;
        auto at = [&](int r, int chunk) {
          return mine + chunk / 8 * kHalfTile + r * 128 + ((chunk % 8) ^ (r & 7)) * 16;
        };
#pragma unroll
        for (int i = 0; i < kD / 4; ++i)
          *reinterpret_cast<uint32_t*>(at(warp * 16 + g + (i % 2) * 8, i / 2) + tid * 4) =
              M::T::pack(out[i * 2] * factor[i % 2], out[i * 2 + 1] * factor[i % 2]);
        __syncwarp();
        constexpr int kTurns = 16 * kD / 8 / 32;  // 16 bytes a lane
        uint4 x[kTurns];
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
          const int n = i * 32 + lane;
          x[i] = *reinterpret_cast<const uint4*>(at(warp * 16 + n / (kD / 8), n % (kD / 8)));
        }
        // Queries come here next, by another proxy; fenced before the stores, which it would wait for.
        asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(&sh.q_empty[slot]);  // each warp by itself: it reads what it wrote alone
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
          const int n = i * 32 + lane, chunk = n % (kD / 8), row = tile.row + group * 64 + warp * 16 + n / (kD / 8);
          if (row < seq.q_len && chunk * 8 < s.head_dim)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(l.out) +
                                      (int64_t(seq.q_begin + row) * s.heads + head) * s.head_dim + chunk * 8) = x[i];
        }
      } else {
        __syncwarp();
        if (lane == 0) barrier_arrive(&sh.q_empty[slot]);
#pragma unroll
        for (int e = 0; e < kD / 2; ++e) {
          const int h = (e / 2) % 2, r = tile.row + in_tile + h * 8, d = (e / 4) * 8 + tid * 2 + e % 2;
          if (r < seq.q_len && d < s.head_dim)
            store_float(l.out, s.out, (int64_t(seq.q_begin + r) * s.heads + head) * s.head_dim + d, out[e] * factor[h]);
        }
      }
    }
  }
}

template <class M, bool kExtra>
__global__ void __launch_bounds__(384, 1)
    prefill_kernel(const __grid_constant__ typename M::Maps maps, const __grid_constant__ Shape s,
                   const __grid_constant__ StepView v, const __grid_constant__ Layer l, const PrefillTile* tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it
  prefill_block<M, kExtra>(maps, s, v, l, tiles);
#endif
}

template <class M, bool kExtra>
cudaError_t launch_tiles(const typename M::Maps& maps, const Shape& s, const StepView& v, const Layer& l,
                         const PrefillTile* tiles, int64_t count, int multiprocessors, cudaStream_t stream) {
  auto* kernel = prefill_kernel<M, kExtra>;
  constexpr int bytes = int(sizeof(PrefillShared<M>)) + 1024;
  static const cudaError_t ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (ready != cudaSuccess) return ready;
  const int64_t all = count * s.heads;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(all < multiprocessors ? all : multiprocessors));
  config.blockDim = dim3(384);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, maps, s, v, l, tiles);
}

// With a kernel of its own where scores go through more than the scale.
template <class M>
cudaError_t launch_tiles(const typename M::Maps& maps, const Shape& s, const StepView& v, const Layer& l,
                         const PrefillTile* tiles, int64_t count, int multiprocessors, cudaStream_t stream) {
  return s.softcap > 0.0f || s.slopes || l.mask
             ? launch_tiles<M, true>(maps, s, v, l, tiles, count, multiprocessors, stream)
             : launch_tiles<M, false>(maps, s, v, l, tiles, count, multiprocessors, stream);
}

}  // namespace kvasir::attention::cuda
