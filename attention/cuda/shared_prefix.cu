// Prefixes that many queries share, on Hopper: a block has 128 query rows of one kv head, of whatever sequences, and a
// run of the prefix's keys. One warp has the tensor memory accelerator bring tiles of 128 keys and values from their
// pages, two warpgroups of 64 rows compute, each running its softmax while the other has the matrix units. Results are
// parts, merged with those of each sequence's own keys.
//   operations of a tile: 4 * 128 * 128 * D;  bytes into shared memory: 2 * 128 * D elements
#include <atomic>

#include "attention/cuda/epilogue.cuh"
#include "attention/cuda/launch.h"
#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/prefill16.cuh"
#include "attention/cuda/prefill_stages.cuh"
#include "attention/cuda/shared_memory.h"
#include "attention/cuda/stream_rows.cuh"

namespace kvasir::attention::cuda {
namespace {

static_assert(kPrefixRows == kTileQueries && kPrefixKeys == kTileKeys);

struct PrefixMaps {
  CUtensorMap k, v;  // of a layer's cache, boxes of a page's keys
  int32_t box_keys;
};

template <class M>
struct PrefixShared {
  static constexpr int kBytes = kTileKeys * M::kD * 2;
  alignas(1024) uint8_t q[kTileQueries * M::kD * 2];
  uint8_t k[M::kStages][kBytes], v[M::kStages][kBytes];
  uint64_t k_full[M::kStages], k_empty[M::kStages], v_full[M::kStages], v_empty[M::kStages];
};

// The warp that feeds: a lane a page and 64 columns.
template <class M>
__device__ __forceinline__ void feed_keys(PrefixShared<M>& sh, const PrefixMaps& maps, const Shape& s,
                                          const StepView& v, const Segment& run, int kv_head, int lane) {
  constexpr int kHalves = M::kD / 64;
  const int boxes = kTileKeys / maps.box_keys, box = lane / kHalves, half = lane % kHalves;
  const bool live = box < boxes;
  const int place = half * kHalfTile + box * maps.box_keys * 128;
  auto row_of = [&](int key) {
    key += box * maps.box_keys;
    return live && key < run.kv_end ? v.table[run.table + (key >> s.page_shift)] + (key & ((1 << s.page_shift) - 1))
                                    : 0;
  };
  int fill = 0, phase = 1, row = row_of(run.kv_begin);
  for (int key = run.kv_begin; key < run.kv_end; key += kTileKeys) {
    barrier_wait(&sh.k_empty[fill], phase);
    if (lane == 0) barrier_expect(&sh.k_full[fill], PrefixShared<M>::kBytes);
    __syncwarp();
    if (live) load_tile(sh.k[fill] + place, &maps.k, half * 64, kv_head, row, &sh.k_full[fill]);
    barrier_wait(&sh.v_empty[fill], phase);
    if (lane == 0) barrier_expect(&sh.v_full[fill], PrefixShared<M>::kBytes);
    __syncwarp();
    if (live) load_tile(sh.v[fill] + place, &maps.v, half * 64, kv_head, row, &sh.v_full[fill]);
    row = row_of(key + kTileKeys);
    if (++fill == M::kStages) fill = 0, phase ^= 1;
  }
}

// A warpgroup's 64 rows of queries into the matrix units' swizzle, two threads a row; zeros past the last.
template <class M>
__device__ __forceinline__ void load_rows(uint8_t* to, const Shape& s, const StepView& v, const Layer& l,
                                          const Segment& run, int kv_head, int group, int thread) {
  constexpr int kChunks = M::kD / 8;
  const int r = group * 64 + thread / 2;
  const bool live = r < run.row_count;
  const int token = live ? v.rows[run.tokens + r / s.group].token : 0;
  const uint4* from = reinterpret_cast<const uint4*>(
      static_cast<const uint16_t*>(l.q) + (int64_t(token) * s.heads + kv_head * s.group + r % s.group) * M::kD);
#pragma unroll
  for (int i = 0; i < kChunks / 2; ++i) {
    const int chunk = thread % 2 * (kChunks / 2) + i;
    *reinterpret_cast<uint4*>(to + chunk / 8 * kHalfTile + r * 128 + (chunk % 8 ^ r % 8) * 16) =
        live ? from[chunk] : uint4{0, 0, 0, 0};
  }
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  named_sync(3 + group, 128);
}

// What a thread's two rows go through besides the scale.
struct PrefixRows {
  int own[2];
  float slope[2];
  int64_t mask[2];
  __device__ __forceinline__ PrefixRows(const Shape& s, const StepView& v, const Layer& l, const Segment& run,
                                        int kv_head, int in_tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = min(in_tile + h * 8, run.row_count - 1), head = kv_head * s.group + r % s.group;
      const QueryRow row = v.rows[run.tokens + r / s.group];
      own[h] = row.own, slope[h] = alibi_slope(s, head);
      mask[h] = head * l.mask_head + int64_t(row.token) * l.mask_row + row.column;
    }
  }
  __device__ __forceinline__ void transform(const Shape& s, const Layer& l, int key, int tid, float unit,
                                            float (&score)[kTileKeys / 2]) const {
#pragma unroll
    for (int e = 0; e < kTileKeys / 2; ++e) {
      const int j = key + (e / 4) * 8 + tid * 2 + e % 2, h = (e / 2) % 2;
      float x = score[e] * unit;
      if (s.softcap > 0.0f) x = fast_softcapped(x, s.softcap);
      score[e] = biased(s, l, x * kLog2e, slope[h], j - own[h], true, mask[h] + j);
    }
  }
};

template <class M, bool kExtra>
__device__ __forceinline__ void compute_rows(PrefixShared<M>& sh, const Shape& s, const StepView& v, const Layer& l,
                                             const Segment& run, int kv_head) {
  constexpr int kD = M::kD;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;
  const int thread = threadIdx.x % 128, lane = thread % 32, g = lane / 4, tid = lane % 4,
            in_tile = group * 64 + thread / 32 * 16 + g;  // and + 8
  load_rows<M>(sh.q, s, v, l, run, kv_head, group, thread);
  const float unit = M::score_unit(s, l), scale = kExtra ? 1.0f : unit * kLog2e;
  const uint64_t q = rows_descriptor(shared_address(sh.q) + group * 64 * 128);
  const PrefixRows rows(s, v, l, run, kv_head, in_tile);

  float score[kTileKeys / 2], out[kD / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, rescale[2];
  const bool moved[2] = {true, true};
  uint32_t weights[kTileKeys / 4];
  int use = 0, phase = 0, previous = 0, previous_phase = 0;
  auto multiply_keys = [&] {
    M::multiply_keys(score, q, rows_descriptor(shared_address(sh.k[use])));
    wgmma_commit();
  };
  auto end_tile = [&] {
    previous = use, previous_phase = phase;
    if (++use == M::kStages) use = 0, phase ^= 1;
  };
  auto transform = [&](int key) {
    if constexpr (kExtra) rows.transform(s, l, key, tid, unit, score);
  };
#pragma unroll
  for (float& x : out) x = 0.0f;

  // The groups take turns at the matrix units.
  if (group == 1) named_arrive(1, 256);
  barrier_wait(&sh.k_full[use], phase);
  wgmma_fence();
  multiply_keys();
  wgmma_wait<0>();
  hold(score);
  if (thread == 0) barrier_arrive(&sh.k_empty[use]);
  transform(run.kv_begin);
  softmax_tile<M>(scale, score, top, sum, rescale);
  M::pack(score, weights);
  end_tile();
  for (int key = run.kv_begin + kTileKeys; key < run.kv_end; key += kTileKeys) {
    barrier_wait(&sh.k_full[use], phase);
    named_sync(1 + group, 256);
    wgmma_fence();
    multiply_keys();
    barrier_wait(&sh.v_full[previous], previous_phase);
    M::multiply_values(out, weights, shared_address(sh.v[previous]));
    wgmma_commit();
    named_arrive(2 - group, 256);
    wgmma_wait<1>();
    hold(score);
    if (thread == 0) barrier_arrive(&sh.k_empty[use]);
    transform(key);
    softmax_tile<M>(scale, score, top, sum, rescale);
    wgmma_wait<0>();
    hold(out);
    if (thread == 0) barrier_arrive(&sh.v_empty[previous]);
    rescale_results<M>(moved, rescale, out, sum);
    M::pack(score, weights);
    end_tile();
  }
  barrier_wait(&sh.v_full[previous], previous_phase);
  wgmma_fence();
  M::multiply_values(out, weights, shared_address(sh.v[previous]));
  wgmma_commit();
  wgmma_wait<0>();
  hold(out);

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = lanes_sum<1, 2>(sum[h]);
    const int r = in_tile + h * 8;
    if (r >= run.row_count) continue;
    finish_row(s, v, l, run, kv_head, r, top[h] * scale - M::kShift, total, M::value_unit(l), tid == 0,
               [&](bool, int64_t row, float f) {
#pragma unroll
                 for (int n = 0; n < kD / 8; ++n)
                   store_run<2>(l.partial, DType::f32, row * kD + n * 8 + tid * 2,
                                {out[n * 4 + h * 2] * f, out[n * 4 + h * 2 + 1] * f});
               });
  }
}

template <class M, bool kExtra>
__device__ inline void prefix_block(const PrefixMaps& maps, const Shape& s, const StepView& v, const Layer& l,
                                    const Segment* runs) {
  using Shared = PrefixShared<M>;
  extern __shared__ uint8_t raw[];
  Shared& sh = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < M::kStages; ++i) {
      barrier_init(&sh.k_full[i], 1);
      barrier_init(&sh.v_full[i], 1);
      barrier_init(&sh.k_empty[i], 2);
      barrier_init(&sh.v_empty[i], 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  const int kv_head = blockIdx.x % s.kv_heads, index = blockIdx.x / s.kv_heads;
  const bool live = index < v.counts[kCountPrefixRuns];
  const Segment run = live ? runs[index] : Segment{};
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
    if (live && threadIdx.x < 32) feed_keys<M>(sh, maps, s, v, run, kv_head, threadIdx.x);
    // The kernel before let this one start when all that it reads was there. What comes after waits for both.
    wait_for_previous_kernel();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
    if (live) compute_rows<M, kExtra>(sh, s, v, l, run, kv_head);
  }
}

template <class M, bool kExtra>
__global__ void __launch_bounds__(384, 1)
    prefix_kernel(const __grid_constant__ PrefixMaps maps, const __grid_constant__ Shape s,
                  const __grid_constant__ StepView v, const __grid_constant__ Layer l, const Segment* runs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it
  prefix_block<M, kExtra>(maps, s, v, l, runs);
#endif
}

// A layer's keys or values, wherever its strides have them, as boxes of some tokens and 64 columns of one head.
bool encode_cache(CUtensorMap* map, const uint8_t* base, const Shape& s, const CacheLayer& c, int64_t tokens, int box) {
  const cuuint64_t sizes[3] = {cuuint64_t(s.head_dim), cuuint64_t(s.kv_heads), cuuint64_t(tokens)};
  const cuuint64_t strides[2] = {cuuint64_t(c.head), cuuint64_t(c.token)};
  const cuuint32_t boxes[3] = {64, 1, cuuint32_t(box)}, ones[3] = {1, 1, 1};
  return encode_function()(map,
                           s.work == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                           3, const_cast<uint8_t*>(base), sizes, strides, boxes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class M, bool kExtra>
cudaError_t launch(const PrefixMaps& maps, const Shape& s, const StepView& v, const Layer& l, const Segment* runs,
                   int64_t count, cudaStream_t stream) {
  auto* kernel = prefix_kernel<M, kExtra>;
  constexpr int bytes = int(sizeof(PrefixShared<M>)) + 1024;
  static std::atomic<uint64_t> given;
  if (const cudaError_t e = allow_shared(kernel, bytes, given); e != cudaSuccess) return e;
  return launch_early(kernel, dim3(unsigned(count * s.kv_heads)), 384, bytes, stream, maps, s, v, l, runs);
}

}  // namespace

bool shared_prefix_supports(const Shape& s, const CacheLayer& c, int64_t page_size, int compute_capability) {
  return compute_capability == 90 && (s.head_dim == 64 || s.head_dim == 128) && s.group <= kPrefixRows &&
         (s.work == DType::bf16 || s.work == DType::f16) && c.dtype == s.work &&
         c.quant == int(kvcache::QuantKind::none) && page_size >= 8 && !s.streaming && c.head % 16 == 0 &&
         c.token % 16 == 0 && encode_function() != nullptr;
}

cudaError_t launch_shared_prefix(const Shape& s, const StepView& v, const Layer& l, const Segment* runs, int64_t count,
                                 int64_t cache_tokens, cudaStream_t stream) {
  PrefixMaps maps = {};
  maps.box_keys = 1 << (s.page_shift < 7 ? s.page_shift : 7);
  if (!encode_cache(&maps.k, l.cache.key, s, l.cache, cache_tokens, maps.box_keys) ||
      !encode_cache(&maps.v, l.cache.value, s, l.cache, cache_tokens, maps.box_keys))
    return cudaErrorInvalidValue;
  const auto run = [&]<class T>(T) {
    if (s.head_dim > 64)
      return transforms_scores(s, l) ? launch<Wide<T, 128>, true>(maps, s, v, l, runs, count, stream)
                                     : launch<Wide<T, 128>, false>(maps, s, v, l, runs, count, stream);
    return transforms_scores(s, l) ? launch<Wide<T, 64>, true>(maps, s, v, l, runs, count, stream)
                                   : launch<Wide<T, 64>, false>(maps, s, v, l, runs, count, stream);
  };
  return s.work == DType::bf16 ? run(Brain{}) : run(Half{});
}

}  // namespace kvasir::attention::cuda
