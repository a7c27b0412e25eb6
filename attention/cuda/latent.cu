// Attention whose values are the keys as they lie (latent attention): every query head reads the one key head there is.
// A block keeps taking runs of keys, each for 64 rows of queries (so many heads of a token, or of some tokens): the
// rows stay in shared memory, keys come 64 at a time, once, by asynchronous copies into two buffers, and both products
// read them there. Each of its two warpgroups has half of the columns of the results, and work of its own beside them:
//   first   scores = q k'  (36 instructions of m64n64k16), softmax, weights to shared memory;  results[0..256) += p k
//   second  keys on their way into the buffer that was read last;                              results[256..512) += p k
//   rows (q) 64 x 576   |   keys (k) 2 x 64 x 576   |   weights (p) 64 x 64, in the 128-byte swizzle
// A tile is 74 KB of keys and 8.9 million operations for each of them: for up to some 40 heads memory is the limit.
#include <algorithm>

#include "attention/cuda/append.cuh"
#include "attention/cuda/bulk.cuh"
#include "attention/cuda/epilogue.cuh"
#include "attention/cuda/latent.h"
#include "attention/cuda/latent_wgmma.cuh"
#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/shared_memory.h"
#include "attention/cuda/stream_rows.cuh"

namespace kvasir::attention::cuda {
namespace {

constexpr int kRows = 64, kKeys = 64, kThreads = 256, kGroup = 128;
constexpr int kAtom = 64, kAtoms = kLatentDim / kAtom;  // columns side by side in shared memory, and how many times
constexpr int kAtomBytes = kRows * kAtom * 2, kTileBytes = kAtoms * kAtomBytes;

struct LatentShared {
  uint8_t q[kTileBytes], k[2][kTileBytes], p[kAtomBytes];
  float rescale[kRows], top[kRows], sum[kRows];  // what the first warpgroup tells the second
  uint64_t full[2];                              // a buffer's keys are there
};
constexpr int kSharedBytes = int(sizeof(LatentShared)) + 1024;
static_assert(kSharedBytes <= 227 << 10);

// Between the warpgroups, by named barriers: weights are there; they have been read; a buffer's keys have been.
enum Meeting { kWeighed = 1, kConsumed = 2, kFree = 3, kQueries = 4 };

// Written by threads, read by matrix units.
__device__ inline void seen_by_matrix_units() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
// Arrives once what this thread copies has come.
__device__ inline void arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}

// A thread of a warpgroup copies 16 bytes of four rows of each atom: eight lanes a row, and the swizzle is its own.
struct Copies {
  static constexpr int kEach = 4;
  int row[kEach], lane;
  uint32_t to[kEach];  // in an atom
  __device__ Copies() : lane(threadIdx.x % 8) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      row[i] = int(threadIdx.x) % kGroup / 32 * 16 + i * 4 + int(threadIdx.x) % 32 / 8;
      to[i] = row[i] * 128 + (lane ^ (row[i] & 7)) * 16;
    }
  }
  // Zeros where there is no row.
  template <int kFirst = 0>
  __device__ __forceinline__ void start(uint32_t tile, int i, const uint8_t* from, bool live) const {
#pragma unroll
    for (int a = kFirst; a < kAtoms; ++a) copy16(tile + a * kAtomBytes + to[i], from + a * 128 + lane * 16, live);
  }
};

// The first atom of the queries, rotated as append rotates keys; two threads a row.
template <bool kBrain>
__device__ inline void rotate_queries(const Shape& s, const uint16_t* from, int token, uint8_t* atom) {
  const int row = int(threadIdx.x) % kGroup / 2, half = threadIdx.x % 2;
  const float4* angles = reinterpret_cast<const float4*>(s.rope) + int64_t(token) * (kLatentRope / 2);
  auto put = [&](int chunk, const Vec8& x) {
    *reinterpret_cast<uint4*>(atom + row * 128 + ((chunk ^ (row & 7)) * 16)) = pack16(x, kBrain);
  };
  auto get = [&](int chunk) { return load16(reinterpret_cast<const uint4*>(from)[chunk], kBrain); };
  if (token < 0) {
    for (int c = 0; c < 4; ++c) put(half * 4 + c, Vec8{});
  } else if (s.rope_style == 2) {  // pairs side by side
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int chunk = half * 4 + c;
      Vec8 x = get(chunk);
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        const float4 a = angles[chunk * 4 + k / 2];
        const float x0 = x.x[k], x1 = x.x[k + 1];
        x.x[k] = rotated(x0, x1, a), x.x[k + 1] = rotated(x1, -x0, a);
      }
      put(chunk, x);
    }
  } else {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int chunk = half * 2 + c;
      Vec8 x = get(chunk), y = get(4 + chunk);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float4 a = angles[chunk * 8 + k];
        const float was = x.x[k];
        x.x[k] = rotated(was, y.x[k], a), y.x[k] = rotated(y.x[k], -was, a);
      }
      put(chunk, x), put(4 + chunk, y);
    }
  }
}

// What both warpgroups have: half of the results of 64 rows. `tiles`: how many were read before, in all runs.
template <class T>
struct LatentTile {
  static constexpr bool kBrain = std::is_same_v<T, Brain>;
  const Shape& s;
  const StepView& v;
  const Layer& l;
  LatentShared& sh;
  const Copies copies;
  const int group;  // of warps
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kGroup / 32 * 16 + lane / 4;  // and 8 further on
  const int column = lane % 4 * 2;
  const float scale = s.scale * kLog2e;
  int tiles = 0;
  float out[128];

  // Of a row of a tile: its query's token, or below 0.
  __device__ int token_of(const Segment& seg, int r) const {
    return r < seg.row_count ? v.rows[seg.tokens + (seg.row_begin + r) / s.group].token : -1;
  }
  __device__ const uint16_t* query(const LatentQueries& q, const Segment& seg, int block, int r, int token) const {
    const int head = block * s.group + (seg.row_begin + (token < 0 ? 0 : r)) % s.group;
    return static_cast<const uint16_t*>(q.data) + int64_t(max(token, 0)) * q.stride + int64_t(head) * kLatentDim;
  }

  __device__ __forceinline__ void load_queries(const LatentQueries& q, const Segment& seg, int block) const {
    const uint32_t tile = shared_address(sh.q);
#pragma unroll
    for (int i = 0; i < Copies::kEach; ++i) {
      const int token = token_of(seg, copies.row[i]);
      const auto* from = reinterpret_cast<const uint8_t*>(query(q, seg, block, copies.row[i], token));
      if (q.rotate)
        copies.template start<1>(tile, i, from, token >= 0);
      else
        copies.start(tile, i, from, token >= 0);
    }
    if (q.rotate) {
      const int r = int(threadIdx.x) % kGroup / 2, token = token_of(seg, r);
      rotate_queries<kBrain>(s, query(q, seg, block, r, token), token, sh.q);
    }
    copies_commit();
    copies_wait<0>();
    seen_by_matrix_units();
    named_sync(kQueries, kGroup);
  }

  // Where a tile's keys lie, of this thread's rows; below 0: past the end.
  struct Places {
    int64_t at[Copies::kEach];
  };
  __device__ __forceinline__ Places find(const Segment& seg, int tile) const {
    Places p;
#pragma unroll
    for (int i = 0; i < Copies::kEach; ++i) {
      const int32_t key = seg.kv_begin + tile * kKeys + copies.row[i];
      p.at[i] = key >= seg.kv_end  ? -1
                : v.beam_width > 0 ? read_place(s, v, seg.sequence, key)
                                   : physical(s, v, seg.table, key);
    }
    return p;
  }
  __device__ __forceinline__ void load_keys(int buffer, const Places& p) const {
#pragma unroll
    for (int i = 0; i < Copies::kEach; ++i)
      copies.start(shared_address(sh.k[buffer]), i, l.cache.key + max(p.at[i], int64_t(0)) * l.cache.token,
                   p.at[i] >= 0);
    arrive_with_copies(&sh.full[buffer]);
  }
  __device__ __forceinline__ void wait_for_keys(int tile) const {
    barrier_wait(&sh.full[tile & 1], (tile >> 1) & 1);
    seen_by_matrix_units();
  }

  __device__ __forceinline__ void multiply_keys(int buffer, float (&score)[32]) const {
    const uint64_t q = rows_descriptor(shared_address(sh.q)), k = rows_descriptor(shared_address(sh.k[buffer]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kLatentDim / 16; ++i) {
      const uint32_t step = i / 4 * (kAtomBytes >> 4) + i % 4 * 2;
      wgmma_tiles(T{}, score, further(q, step), further(k, step), i > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_values(int buffer, bool first) {
    const uint32_t values = shared_address(sh.k[buffer]) + (kLatentRope / kAtom + group * 4) * kAtomBytes;
    const uint64_t p = rows_descriptor(shared_address(sh.p)), k = columns_descriptor(values, kAtomBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      wgmma_results(T{}, out, further(p, i * 2), further(k, i * (2048 >> 4)), i > 0 || !first);
    wgmma_commit();
  }
  __device__ __forceinline__ void rescale_results(const float (&rescale)[2]) {
    if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int e = 0; e < 128; ++e) out[e] *= rescale[e / 2 % 2];
    }
  }

  // Scores become weights; `end`: of what each of the two rows sees, counted from the tile's first.
  __device__ __forceinline__ void weigh(const int (&end)[2], float (&score)[32], float (&top)[2], float (&sum)[2],
                                        float (&rescale)[2]) const {
    float most[2] = {-INFINITY, -INFINITY}, base[2];
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const int h = e / 2 % 2;
      if (e / 4 * 8 + column + e % 2 >= end[h]) score[e] = -INFINITY;
      most[h] = fmaxf(most[h], score[e]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffffu, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffffu, most[h], 2));
      const float next = fmaxf(top[h], most[h]), seen = next == -INFINITY ? 0.0f : next;
      base[h] = seen * scale;
      rescale[h] =
          exp2_fast((top[h] - seen) * scale);  // exactly 1 where the maximum stays: a tile unseen changes no bit
      top[h] = next;
      sum[h] *= rescale[h];
    }
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      score[e] = exp2_fast(score[e] * scale - base[e / 2 % 2]);
      sum[e / 2 % 2] += score[e];
    }
  }
  __device__ __forceinline__ void put_weights(const float (&score)[32], const float (&rescale)[2]) const {
#pragma unroll
    for (int e = 0; e < 32; e += 2) {
      const int r = row + e / 2 % 2 * 8, chunk = e / 4;
      *reinterpret_cast<uint32_t*>(sh.p + r * 128 + ((chunk ^ (r & 7)) * 16) + column * 2) =
          T::pack(score[e], score[e + 1]);
    }
    if (column == 0) sh.rescale[row] = rescale[0], sh.rescale[row + 8] = rescale[1];
    seen_by_matrix_units();
  }

  __device__ __forceinline__ void score_tiles(const LatentQueries& q, const Segment& seg, int block, int count) {
    load_queries(q, seg, block);
    float score[32], top[2], sum[2], rescale[2];
    int end[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + h * 8;
      const bool live = r < seg.row_count;
      end[h] = live ? min(v.rows[seg.tokens + (seg.row_begin + r) / s.group].end, seg.kv_end) - seg.kv_begin : 0;
      top[h] = -INFINITY, sum[h] = 0.0f;
    }
    for (int t = 0; t < count; ++t) {
      const int buffer = (tiles + t) & 1;
      wait_for_keys(tiles + t);
      multiply_keys(buffer, score);
      if (t > 0) {  // values of the tile before have been multiplied
        wgmma_wait<1>();
        hold(out);
        if (t + 1 < count) named_arrive(kFree, kThreads);
      }
      wgmma_wait<0>();
      hold(score);
      weigh(end, score, top, sum, rescale);
      end[0] -= kKeys, end[1] -= kKeys;
      if (t > 0) named_sync(kConsumed, kThreads);
      put_weights(score, rescale);
      named_sync(kWeighed, kThreads);
      rescale_results(rescale);
      multiply_values(buffer, t == 0);
    }
    wgmma_wait<0>();
    hold(out);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
      if (column == 0) sh.top[row + h * 8] = top[h], sh.sum[row + h * 8] = sum[h];
    }
  }

  __device__ __forceinline__ void feed_tiles(const Segment& seg, int count) {
    Places next = find(seg, 0);
    if (count > 0) load_keys(tiles & 1, next);
    next = find(seg, 1);
    if (count > 1) load_keys((tiles + 1) & 1, next);
    next = find(seg, 2);
    for (int t = 0; t < count; ++t) {
      const int buffer = (tiles + t) & 1;
      wait_for_keys(tiles + t);
      named_sync(kWeighed, kThreads);
      rescale_results({sh.rescale[row], sh.rescale[row + 8]});
      multiply_values(buffer, t == 0);
      wgmma_wait<0>();
      hold(out);
      if (t + 1 < count) named_arrive(kConsumed, kThreads);
      if (t + 2 < count) {
        named_sync(kFree, kThreads);
        load_keys(buffer, next);
        next = find(seg, t + 3);
      }
    }
  }

  __device__ __forceinline__ void leave(const Segment& seg, int block) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + h * 8;
      if (r >= seg.row_count) continue;
      const float base = sh.top[r] == -INFINITY ? 0.0f : sh.top[r] * scale;
      finish_row(s, v, l, seg, block, r, base, sh.sum[r], 1.0f, group == 0 && column == 0,
                 [&](bool partial, int64_t to, float f) {
                   const int first = group * (kLatentValues / 2) + column;
                   auto store = [&](void* base, auto type, int64_t at) {
#pragma unroll
                     for (int e = h * 2; e < 128; e += 4)
                       store_run<2>(base, type.value, at + first + e / 4 * 8, {out[e] * f, out[e + 1] * f});
                   };
                   if (partial)
                     store(l.partial, std::integral_constant<DType, DType::f32>(), to * kLatentValues);
                   else
                     with_type(s.out, [&](auto type) { store(l.out, type, to * kLatentDim + kLatentRope); });
                 });
    }
  }

  __device__ __forceinline__ void run(const LatentQueries& q, const Segment& seg, int block) {
    const int count = (seg.kv_end - seg.kv_begin + kKeys - 1) / kKeys;
#pragma unroll
    for (float& x : out) x = 0.0f;
    if (group == 0)
      score_tiles(q, seg, block, count);
    else
      feed_tiles(seg, count);
    tiles += count;
    __syncthreads();
    leave(seg, block);
    __syncthreads();  // before the next run
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    latent_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v, const __grid_constant__ Layer l,
                  const __grid_constant__ StreamList list, const __grid_constant__ LatentQueries q) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ uint8_t raw[];
  LatentShared& sh = *reinterpret_cast<LatentShared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (uint64_t& full : sh.full) barrier_init(&full, kGroup);
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  // Blocks of the same part stand side by side: what one reads the others find in L2.
  const int part = int(blockIdx.x) / s.kv_heads, block = int(blockIdx.x) % s.kv_heads;
  const PartHead& head = list.heads[part];
  const int begin = head.begin, end = head.end;  // the plan lies in memory since before the previous kernel
  wait_for_previous_kernel();
  let_next_kernel_start();
  // Known to be a warp's, not a thread's own.
  LatentTile<T> tile{s, v, l, sh, {}, __shfl_sync(0xffffffffu, int(threadIdx.x) / kGroup, 0)};
  for (int i = begin; i < end; ++i) {
    const Segment seg = list.segments[i];
    tile.run(q, seg, block);
  }
#endif
}

// Parts of a query's results become one: a block a (query, head), four columns a thread, and groups of threads that
// take parts by turns, some of them in flight at once.
constexpr int kMergeThreads = kLatentValues / 4, kInFlight = 4;
template <int kMergeGroups>
__global__ void __launch_bounds__(kMergeGroups* kMergeThreads)
    merge_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v, const __grid_constant__ Layer l) {
  __shared__ float4 sums[kMergeGroups][kMergeThreads];
  __shared__ float tops[kMergeGroups], totals[kMergeGroups];
  let_next_kernel_start();
  const int head = blockIdx.x, group = threadIdx.x / kMergeThreads, thread = threadIdx.x % kMergeThreads;
  // The plan is read while the parts are still being computed.
  const bool live = int(blockIdx.y) < v.counts[kCountMerges];
  const Merge m = live ? v.merges[blockIdx.y] : Merge{};
  int64_t row[kInFlight];
  auto find = [&](int first) {
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int i = first + u * kMergeGroups;
      row[u] = i < m.end ? int64_t(v.merge_slots[i]) * s.heads + head : -1;
    }
  };
  find(m.begin + group);
  wait_for_previous_kernel();
  if (!live) return;
  float top = -INFINITY, total = 0.0f;
  float4 acc{};
  for (int first = m.begin + group; first < m.end; first += kInFlight * kMergeGroups) {
    float lse[kInFlight];
    float4 x[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      lse[u] = row[u] >= 0 ? l.partial_lse[row[u]] : -INFINITY;
      x[u] = row[u] >= 0 ? reinterpret_cast<const float4*>(l.partial + row[u] * kLatentValues)[thread] : float4{};
    }
    find(first + kInFlight * kMergeGroups);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const float next = fmaxf(top, lse[u]), base = next == -INFINITY ? 0.0f : next;
      const float shrink = expf(top - base), weight = expf(lse[u] - base);
      top = next, total = total * shrink + weight;
      acc = {acc.x * shrink + weight * x[u].x, acc.y * shrink + weight * x[u].y, acc.z * shrink + weight * x[u].z,
             acc.w * shrink + weight * x[u].w};
    }
  }
  sums[group][thread] = acc;
  if (thread == 0) tops[group] = top, totals[group] = total;
  __syncthreads();
  if (group > 0) return;
  float all = -INFINITY;
  for (float t : tops) all = fmaxf(all, t);
  const bool masked = all == -INFINITY;
  const float sink = l.sink_logits ? l.sink_logits[head] : -INFINITY;
  all = masked ? 0.0f : fmaxf(all, sink);
  float denominator = expf(sink - all);
  acc = {};
  for (int g = 0; g < kMergeGroups; ++g) {
    const float weight = expf(tops[g] - all);
    const float4 x = sums[g][thread];
    denominator += totals[g] * weight;
    acc = {acc.x + weight * x.x, acc.y + weight * x.y, acc.z + weight * x.z, acc.w + weight * x.w};
  }
  const int64_t to = int64_t(m.token) * s.heads + head;
  const float f = masked ? 0.0f : s.out_inv_scale / denominator;
  with_type(s.out, [&](auto type) {
    store_run<4>(l.out, type.value, to * kLatentDim + kLatentRope + thread * 4,
                 {acc.x * f, acc.y * f, acc.z * f, acc.w * f});
  });
  if (l.lse && thread == 0) l.lse[to] = masked ? -INFINITY : all + logf(denominator);
}

template <class T>
cudaError_t launch(const Shape& s, const StepView& v, const Layer& l, const LatentQueries& q, const StreamList& list,
                   cudaStream_t stream) {
  static std::atomic<uint64_t> given{0};
  if (const cudaError_t e = allow_shared(latent_kernel<T>, kSharedBytes, given); e != cudaSuccess) return e;
  return launch_early(latent_kernel<T>, dim3(unsigned(list.count * s.kv_heads)), kThreads, kSharedBytes, stream, s, v,
                      l, list, q);
}

}  // namespace

int latent_group(const Shape& s, const CacheLayer& c, int unread, int compute_capability) {
  const bool plain = s.window == 0 && s.cyclic == 0 && s.softcap == 0.0f && !s.slopes && !s.streaming && !s.fp8_query;
  if (compute_capability != 90 || !plain || s.kv_heads != 1 || s.head_dim != kLatentDim || unread < kLatentRope)
    return 0;
  if (c.key != c.value || c.quant != int(kvcache::QuantKind::none) || c.dtype != s.io || c.token % 16) return 0;
  if (s.io != DType::bf16 && s.io != DType::f16) return 0;
  int group = std::min(s.heads, kRows);
  while (s.heads % group) --group;
  return group;
}

cudaError_t launch_latent(const Shape& shape, const StepView& v, const Layer& l, const LatentQueries& q,
                          const StreamList& list, int group, cudaStream_t stream) {
  Shape s = shape;  // blocks of heads, as the plan has it
  s.group = group, s.kv_heads = s.heads / group;
  return s.io == DType::bf16 ? launch<Brain>(s, v, l, q, list, stream) : launch<Half>(s, v, l, q, list, stream);
}

void launch_latent_merge(const Shape& s, const StepView& v, const Layer& l, int64_t queries, cudaStream_t stream) {
  const dim3 grid(unsigned(s.heads), unsigned(queries));
  if (queries > 8)
    launch_early(merge_kernel<1>, grid, kMergeThreads, 0, stream, s, v, l);
  else  // of many parts each
    launch_early(merge_kernel<8>, grid, 8 * kMergeThreads, 0, stream, s, v, l);
}

}  // namespace kvasir::attention::cuda
