// Prefill and extend on Hopper. A block keeps taking tiles of 128 queries of one head: one warp feeds it (K and V
// tiles of 128 keys by the tensor memory accelerator), two warpgroups of 64 rows compute, each running its softmax
// while the other has the matrix units. Keys come last first: the new ones, contiguous as append left them, then the
// cached prefix from the gather buffer, one online softmax over both.
//   operations of a tile pair: 4 * 128 * 128 * D;  bytes into shared memory: 2 * 128 * D * 2, from L2 mostly
#include "attention/cuda/bulk.cuh"
#include "attention/cuda/device.cuh"
#include "attention/cuda/launch.h"
#include "attention/cuda/wgmma.cuh"

namespace kvasir::attention::cuda {
namespace {

constexpr int kRows = 128, kKeys = 128, kStages = 2, kHalf = kKeys * 128;  // bytes of 64 columns of a tile

struct Maps {
  CUtensorMap q, k_new, v_new, k_old, v_old;
};

template <int kD>
struct Shared {
  static constexpr int kTileBytes = kKeys * kD * 2;
  alignas(1024) uint8_t q[kTileBytes];
  uint8_t k[kStages][kTileBytes], v[kStages][kTileBytes];
  uint8_t out[kTileBytes];
  uint64_t q_full, q_empty, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

// Which tiles of keys a tile of queries reads: new ones [new_first, new_end), then old ones [old_first, old_end).
struct Walk {
  int new_first, new_end, old_first, old_end;
  __device__ int count() const { return new_end - new_first + old_end - old_first; }
  // The i-th, from the last backwards: true if new.
  __device__ bool at(int i, int* tile) const {
    const int n = new_end - new_first;
    *tile = i < n ? new_end - 1 - i : old_end - 1 - (i - n);
    return i < n;
  }
};
__device__ inline Walk walk_of(const Shape& s, const Sequence& q, int row) {
  const int last = min(row + kRows, q.q_len) - 1;
  const Range lo = visible(s, q, q.start_pos + row), hi = visible(s, q, q.start_pos + last);
  const int begin = s.sinks > 0 ? 0 : lo.begin;
  Walk w;
  w.old_first = begin / kKeys;
  w.old_end = (min(q.start_pos, hi.end) + kKeys - 1) / kKeys;
  w.new_first = max(0, begin - q.start_pos) / kKeys;
  w.new_end = (max(0, hi.end - q.start_pos) + kKeys - 1) / kKeys;
  if (w.old_first >= w.old_end) w.old_first = w.old_end = 0;
  if (w.new_first > w.new_end) w.new_first = w.new_end;
  return w;
}

template <class T, int kD, bool kExtra>
__global__ void __launch_bounds__(384, 1)
    prefill_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Shape s,
                   const __grid_constant__ StepView v, const __grid_constant__ Layer l, const PrefillTile* tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it
  extern __shared__ uint8_t raw[];
  Shared<kD>& sh = *reinterpret_cast<Shared<kD>*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  constexpr int kBytes = Shared<kD>::kTileBytes, kHalves = kD / 64;
  if (threadIdx.x == 0) {
    barrier_init(&sh.q_full, 1);
    barrier_init(&sh.q_empty, 2);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&sh.k_full[i], 1);
      barrier_init(&sh.v_full[i], 1);
      barrier_init(&sh.k_empty[i], 2);
      barrier_init(&sh.v_empty[i], 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  const int total = v.counts[kCountTiles] * s.heads;
  wait_for_kernel_ahead();

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;\n");
    if (threadIdx.x == 0) {
      int fill = 0, phase = 1, q_phase = 1;
      for (int w = blockIdx.x; w < total; w += gridDim.x, q_phase ^= 1) {
        const PrefillTile tile = tiles[w / s.heads];
        const int head = w % s.heads, kv_head = head / s.group;
        const Sequence seq = v.sequences[tile.sequence];
        const Walk walk = walk_of(s, seq, tile.row);
        // The first keys may come while the tile before still reads its queries.
        auto load_queries = [&] {
          barrier_wait(&sh.q_empty, q_phase);
          barrier_expect(&sh.q_full, kBytes);
          for (int h = 0; h < kHalves; ++h)
            load_tile(sh.q + h * kHalf, &maps.q, h * 64, head, seq.q_begin + tile.row, &sh.q_full);
        };
        if (walk.count() == 0) load_queries();
        for (int i = 0; i < walk.count(); ++i) {
          int t;
          const bool fresh = walk.at(i, &t);
          const int row = (fresh ? seq.q_begin : seq.gathered) + t * kKeys;
          barrier_wait(&sh.k_empty[fill], phase);
          barrier_expect(&sh.k_full[fill], kBytes);
          for (int h = 0; h < kHalves; ++h)
            load_tile(sh.k[fill] + h * kHalf, fresh ? &maps.k_new : &maps.k_old, h * 64, kv_head, row,
                      &sh.k_full[fill]);
          if (i == 0) load_queries();
          barrier_wait(&sh.v_empty[fill], phase);
          barrier_expect(&sh.v_full[fill], kBytes);
          for (int h = 0; h < kHalves; ++h)
            load_tile(sh.v[fill] + h * kHalf, fresh ? &maps.v_new : &maps.v_old, h * 64, kv_head, row,
                      &sh.v_full[fill]);
          if (++fill == kStages) fill = 0, phase ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;\n");
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, tid = lane % 4, in_tile = group * 64 + warp * 16 + g;  // and + 8
    const float scale = kExtra ? 1.0f : s.scale * kLog2e;
    constexpr float kShift = __is_same(T, Half) ? 8.0f : 0.0f;
    const uint64_t q_rows = rows_descriptor(shared_address(sh.q) + group * 64 * 128);
    if (group == 1) named_arrive(1, 256);

    int use = 0, phase = 0, q_phase = 0;
    for (int w = blockIdx.x; w < total; w += gridDim.x, q_phase ^= 1) {
      const PrefillTile tile = tiles[w / s.heads];
      const int head = w % s.heads;
      const Sequence seq = v.sequences[tile.sequence];
      const Walk walk = walk_of(s, seq, tile.row);
      const int count = walk.count();
      int row_own[2], row_begin[2], row_end[2];
      for (int h = 0; h < 2; ++h) {
        row_own[h] = seq.start_pos + tile.row + in_tile + h * 8;
        const Range r = visible(s, seq, row_own[h]);
        row_begin[h] = r.begin, row_end[h] = r.end;
      }
      const Range low = visible(s, seq, seq.start_pos + tile.row + group * 64);
      const Range high = visible(s, seq, seq.start_pos + tile.row + group * 64 + 63);
      const float slope = kExtra && s.slopes ? s.slopes[head] * kLog2e : 0.0f;

      float score[kKeys / 2], out[kD / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, shrink[2];
      uint32_t weights[kKeys / 4];
#pragma unroll
      for (float& x : out) x = 0.0f;

      auto multiply_keys = [&] {
        wgmma_fence();
        const uint64_t k_rows = rows_descriptor(shared_address(sh.k[use]));
#pragma unroll
        for (int k = 0; k < kD / 16; ++k) {
          const uint64_t step = (k / 4) * (kHalf >> 4) + (k % 4) * 2;
          wgmma_tiles(T{}, score, q_rows + step, k_rows + step, k > 0);
        }
        wgmma_commit();
      };
      auto multiply_values = [&](int stage) {
        const uint64_t columns = columns_descriptor(shared_address(sh.v[stage]), kHalf);
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) wgmma_weights(T{}, out, weights + k * 4, columns + k * (2048 >> 4));
        wgmma_commit();
      };
      // Masks tile i in `score`, moves the running maximum, leaves weights in place of scores.
      auto softmax = [&](int i) {
        int t;
        const bool fresh = walk.at(i, &t);
        const int base = (fresh ? seq.start_pos : 0) + t * kKeys, limit = fresh ? seq.kv_len : seq.start_pos;
        if constexpr (kExtra) {
#pragma unroll
          for (int e = 0; e < kKeys / 2; ++e) {
            const int j = base + (e / 4) * 8 + tid * 2 + e % 2, h = (e / 2) % 2;
            float x = score[e] * s.scale;
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
        if (!(base >= high.begin && base + kKeys <= min(limit, low.end))) {
#pragma unroll
          for (int e = 0; e < kKeys / 2; ++e) {
            const int j = base + (e / 4) * 8 + tid * 2 + e % 2, h = (e / 2) % 2;
            if (!(j < min(limit, row_end[h]) && (j >= row_begin[h] || j < s.sinks))) score[e] = -INFINITY;
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float most = top[h];
#pragma unroll
          for (int e = 0; e < kKeys / 2; ++e)
            if ((e / 2) % 2 == h) most = fmaxf(most, score[e]);
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
          const float base_of = most == -INFINITY ? 0.0f : most * scale;
          shrink[h] = exp2_fast(top[h] * scale - base_of);
          top[h] = most;
          float more = 0.0f;
#pragma unroll
          for (int e = 0; e < kKeys / 2; ++e)
            if ((e / 2) % 2 == h) {
              score[e] = exp2_fast(score[e] * scale - (base_of - kShift));
              more += score[e];
            }
          sum[h] = sum[h] * shrink[h] + more;
        }
      };
      auto pack = [&] {
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) weights[i] = T::pack(score[i * 2], score[i * 2 + 1]);
      };
      auto advance = [&] {
        if (++use == kStages) use = 0, phase ^= 1;
      };

      barrier_wait(&sh.q_full, q_phase);
      int previous = 0, previous_phase = 0;
      if (count > 0) {
        barrier_wait(&sh.k_full[use], phase);
        multiply_keys();
        wgmma_wait<0>();
        hold(score);
        if (thread == 0) barrier_arrive(&sh.k_empty[use]);
        softmax(0);
        pack();
        previous = use, previous_phase = phase;
        advance();
      }
      for (int i = 1; i < count; ++i) {
        barrier_wait(&sh.k_full[use], phase);
        named_sync(1 + group, 256);
        multiply_keys();
        barrier_wait(&sh.v_full[previous], previous_phase);
        multiply_values(previous);
        named_arrive(2 - group, 256);
        wgmma_wait<1>();
        hold(score);
        if (thread == 0) barrier_arrive(&sh.k_empty[use]);
        softmax(i);
        wgmma_wait<0>();
        hold(out);
        if (thread == 0) barrier_arrive(&sh.v_empty[previous]);
#pragma unroll
        for (int e = 0; e < kD / 2; ++e) out[e] *= shrink[(e / 2) % 2];
        pack();
        previous = use, previous_phase = phase;
        advance();
      }
      if (thread == 0) barrier_arrive(&sh.q_empty);
      if (count > 0) {
        barrier_wait(&sh.v_full[previous], previous_phase);
        wgmma_fence();
        multiply_values(previous);
        wgmma_wait<0>();
        hold(out);
        if (thread == 0) barrier_arrive(&sh.v_empty[previous]);
      }

      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        const bool masked = !(sum[h] > 0.0f);
        const float base = top[h] * scale - kShift;  // log2 of what `sum` is counted in
        float total = sum[h];
        if (l.sink_logits && !masked) total += exp2f(l.sink_logits[head] * kLog2e - base);
        factor[h] = masked ? 0.0f : s.out_inv_scale / total;
        const int r = tile.row + in_tile + h * 8;
        if (l.lse && tid == 0 && r < seq.q_len)
          l.lse[int64_t(seq.q_begin + r) * s.heads + head] = masked ? -INFINITY : base * kLn2 + logf(total);
      }
      if (s.out == s.work) {
        // Through shared memory, so that rows leave in whole 16-byte pieces.
        uint8_t* mine = sh.out + group * 64 * kD * 2;
#pragma unroll
        for (int i = 0; i < kD / 4; ++i) {
          const int r = warp * 16 + g + (i % 2) * 8, chunk = i / 2;
          *reinterpret_cast<uint32_t*>(mine + r * kD * 2 + ((chunk ^ (r & 7)) * 16) + tid * 4) =
              T::pack(out[i * 2] * factor[i % 2], out[i * 2 + 1] * factor[i % 2]);
        }
        __syncwarp();
        for (int i = lane; i < 16 * kD / 8; i += 32) {
          const int r = warp * 16 + i / (kD / 8), chunk = i % (kD / 8), row = tile.row + group * 64 + r;
          if (row < seq.q_len && chunk * 8 < s.head_dim)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(l.out) +
                                      (int64_t(seq.q_begin + row) * s.heads + head) * s.head_dim + chunk * 8) =
                *reinterpret_cast<const uint4*>(mine + r * kD * 2 + ((chunk ^ (r & 7)) * 16));
        }
        __syncwarp();
      } else {
#pragma unroll
        for (int e = 0; e < kD / 2; ++e) {
          const int h = (e / 2) % 2, r = tile.row + in_tile + h * 8, d = (e / 4) * 8 + tid * 2 + e % 2;
          if (r < seq.q_len && d < s.head_dim)
            store_float(l.out, s.out, (int64_t(seq.q_begin + r) * s.heads + head) * s.head_dim + d, out[e] * factor[h]);
        }
      }
    }
  }
#endif
}

// [rows, heads, D] as boxes of 128 rows and 64 columns of one head; columns past D read as zeros.
bool encode(CUtensorMap* map, const void* base, const Shape& s, int heads, int64_t rows) {
  const cuuint64_t sizes[3] = {cuuint64_t(s.head_dim), cuuint64_t(heads), cuuint64_t(rows)};
  const cuuint64_t strides[2] = {cuuint64_t(s.head_dim) * 2, cuuint64_t(s.head_dim) * heads * 2};
  const cuuint32_t box[3] = {64, 1, 128}, ones[3] = {1, 1, 1};
  return encode_function()(map,
                           s.work == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                           3, const_cast<void*>(base), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T, int kD, bool kExtra>
cudaError_t launch(const Maps& maps, const Shape& s, const StepView& v, const Layer& l, const PrefillTile* tiles,
                   int blocks, cudaStream_t stream) {
  auto* kernel = prefill_kernel<T, kD, kExtra>;
  constexpr int bytes = int(sizeof(Shared<kD>)) + 1024;
  static const cudaError_t ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (ready != cudaSuccess) return ready;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
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

template <class T>
cudaError_t choose(const Maps& maps, const Shape& s, const StepView& v, const Layer& l, const PrefillTile* tiles,
                   int blocks, cudaStream_t stream) {
  const bool extra = s.softcap > 0.0f || s.slopes || l.mask;
  if (s.head_dim > 64)
    return extra ? launch<T, 128, true>(maps, s, v, l, tiles, blocks, stream)
                 : launch<T, 128, false>(maps, s, v, l, tiles, blocks, stream);
  return extra ? launch<T, 64, true>(maps, s, v, l, tiles, blocks, stream)
               : launch<T, 64, false>(maps, s, v, l, tiles, blocks, stream);
}

}  // namespace

bool prefill_supports(const Shape& s, int compute_capability) {
  return compute_capability == 90 && s.head_dim >= 64 && s.head_dim <= 128 && s.head_dim % 8 == 0 &&
         (s.work == DType::bf16 || s.work == DType::f16) && !s.streaming && encode_function() != nullptr;
}

cudaError_t launch_prefill(const Shape& s, const StepView& v, const Layer& l, const PrefillTile* tiles, int64_t count,
                           int64_t query_rows, int64_t new_rows, int64_t old_rows, int multiprocessors,
                           cudaStream_t stream) {
  Maps maps;
  if (!encode(&maps.q, l.q, s, s.heads, query_rows) || !encode(&maps.k_new, l.k_new, s, s.kv_heads, new_rows) ||
      !encode(&maps.v_new, l.v_new, s, s.kv_heads, new_rows) ||
      !encode(&maps.k_old, l.k_old, s, s.kv_heads, old_rows) || !encode(&maps.v_old, l.v_old, s, s.kv_heads, old_rows))
    return cudaErrorInvalidValue;
  const int64_t blocks = count * s.heads < multiprocessors ? count * s.heads : multiprocessors;
  return s.work == DType::bf16 ? choose<Brain>(maps, s, v, l, tiles, int(blocks), stream)
                               : choose<Half>(maps, s, v, l, tiles, int(blocks), stream);
}

}  // namespace kvasir::attention::cuda
