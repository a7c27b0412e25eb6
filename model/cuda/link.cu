#include <cuda_bf16.h>

#include <algorithm>

#include "model/cuda/early.cuh"
#include "model/cuda/link.h"

namespace kvasir::model::cuda {
namespace {

constexpr int kThreads = 512, kEach = 8;        // bfloat16 elements a thread reads at once
constexpr uint64_t kPatience = 20'000'000'000;  // ns; a rank that is late by so much is lost

__device__ void tell(uint32_t* there, uint32_t round) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(there), "r"(round) : "memory");
}
__device__ uint32_t heard(const uint32_t* here) {
  uint32_t round;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(round) : "l"(here) : "memory");
  return round;
}
__device__ uint64_t now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Returns when this block's fellows on all ranks are here: what their ranks wrote before is there to be read, and what
// this block has read may be overwritten by them.
__device__ void meet(const LinkView& v) {
  __syncthreads();
  Barrier& own = *v.barriers[v.rank];
  const uint32_t round = own.rounds[blockIdx.x] + 1;
  if (int(threadIdx.x) < v.ranks) {
    tell(&v.barriers[threadIdx.x]->arrived[blockIdx.x][v.rank], round);
    const uint32_t* here = &own.arrived[blockIdx.x][threadIdx.x];
    uint64_t since = 0;
    for (uint32_t polls = 1; int32_t(heard(here) - round) < 0; ++polls) {
      if (polls % 4096) continue;
      if (since == 0) since = now();
      if (now() - since > kPatience) tell(v.lost, 1);
      if (heard(v.lost)) break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) own.rounds[blockIdx.x] = round;
}

__device__ void widen(const uint4& from, float* to) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&from);
#pragma unroll
  for (int i = 0; i < kEach / 2; ++i) {
    const float2 f = __bfloat1622float2(pairs[i]);
    to[2 * i] = f.x, to[2 * i + 1] = f.y;
  }
}

__device__ uint4 narrow(const float (&from)[kEach]) {
  uint4 packed;
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
  for (int k = 0; k < kEach / 2; ++k) pairs[k] = __floats2bfloat162_rn(from[2 * k], from[2 * k + 1]);
  return packed;
}

// Piece `at` of all ranks' partial sums, in the order of ranks.
__device__ __forceinline__ void sum_of_ranks(const LinkView& v, int turn, int64_t at, float (&total)[kEach]) {
  float one[kEach];
  widen(__ldcg(static_cast<const uint4*>(v.partials[turn][0]) + at), total);
  for (int r = 1; r < v.ranks; ++r) {
    widen(__ldcg(static_cast<const uint4*>(v.partials[turn][r]) + at), one);
#pragma unroll
    for (int k = 0; k < kEach; ++k) total[k] += one[k];
  }
}

// Stores them, added to what is there or in its place; `x` is then what was stored.
__device__ __forceinline__ void store_sums(float* out, bool add, const float (&total)[kEach], float (&x)[kEach]) {
  auto* to = reinterpret_cast<float4*>(out);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float4 f = add ? to[half] : float4{0, 0, 0, 0};
    f.x += total[half * 4], f.y += total[half * 4 + 1], f.z += total[half * 4 + 2], f.w += total[half * 4 + 3];
    to[half] = f;
    x[half * 4] = f.x, x[half * 4 + 1] = f.y, x[half * 4 + 2] = f.z, x[half * 4 + 3] = f.w;
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    sum(const __grid_constant__ LinkView v, int turn, bool add, float* out, int64_t count) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  meet(v);
  const int64_t whole = count / kEach;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < whole; i += int64_t(gridDim.x) * kThreads) {
    float total[kEach], stored[kEach];
    sum_of_ranks(v, turn, i, total);
    store_sums(out + i * kEach, add, total, stored);
  }
  if (blockIdx.x > 0 || threadIdx.x >= count % kEach) return;
  const int64_t i = whole * kEach + threadIdx.x;
  float total = 0;
  for (int r = 0; r < v.ranks; ++r)
    total += __bfloat162float(static_cast<const __nv_bfloat16*>(v.partials[turn][r])[i]);
  out[i] = add ? out[i] + total : total;
}

// Slice `rank` of so many pieces.
__device__ int64_t slice_begin(int64_t pieces, int rank, int ranks) { return pieces * rank / ranks; }

// A block has the same pieces of every slice, so that it waits only for its fellows. `count` is whole pieces.
__global__ void __launch_bounds__(kThreads, 2)
    sum_by_slices(const __grid_constant__ LinkView v, int turn, bool add, float* out, int64_t count) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  meet(v);
  const int64_t pieces = count / kEach, stride = int64_t(gridDim.x) * kThreads;
  const int64_t mine = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  // Nobody reads this rank's slice of its own partial before the next barrier but itself.
  auto* own = static_cast<uint4*>(const_cast<void*>(v.partials[turn][v.rank]));
  for (int64_t i = slice_begin(pieces, v.rank, v.ranks) + mine; i < slice_begin(pieces, v.rank + 1, v.ranks);
       i += stride) {
    float total[kEach];
    sum_of_ranks(v, turn, i, total);
    own[i] = narrow(total);
  }
  meet(v);
  for (int r = 0; r < v.ranks; ++r)
    for (int64_t i = slice_begin(pieces, r, v.ranks) + mine; i < slice_begin(pieces, r + 1, v.ranks); i += stride) {
      float total[kEach], stored[kEach];
      widen(__ldcg(static_cast<const uint4*>(v.partials[turn][r]) + i), total);
      store_sums(out + i * kEach, add, total, stored);
    }
}

constexpr int kHeld = 2;  // pieces of a row that a thread has in registers

__device__ float block_sum(float v) {
  __shared__ float parts[kThreads / 32];
  for (int s = 16; s > 0; s /= 2) v += __shfl_xor_sync(~0u, v, s);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int i = 0; i < int(blockDim.x) / 32; ++i) v += parts[i];
  return v;
}

// A row a block at a time.
__global__ void __launch_bounds__(kThreads, 2)
    sum_norm(const __grid_constant__ LinkView v, int turn, float* out, const float* weight, float eps,
             __nv_bfloat16* normed, int64_t rows, int64_t cols) {
  let_next_kernel_start();
  const int64_t pieces = cols / kEach;
  float by[kHeld][kEach] = {};
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (const int64_t i = threadIdx.x + int64_t(h) * blockDim.x; i < pieces)
      for (int k = 0; k < kEach; ++k) by[h][k] = weight[i * kEach + k];
  wait_for_previous_kernel();
  meet(v);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float x[kHeld][kEach] = {}, squares = 0;
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int64_t i = threadIdx.x + int64_t(h) * blockDim.x;
      if (i >= pieces) continue;
      const int64_t at = row * pieces + i;
      float total[kEach];
      sum_of_ranks(v, turn, at, total);
      store_sums(out + at * kEach, true, total, x[h]);
#pragma unroll
      for (int k = 0; k < kEach; ++k) squares += x[h][k] * x[h][k];
    }
    const float r = rsqrtf(block_sum(squares) / float(cols) + eps);
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int64_t i = threadIdx.x + int64_t(h) * blockDim.x;
      if (i >= pieces) continue;
#pragma unroll
      for (int k = 0; k < kEach; ++k) x[h][k] *= r * by[h][k];
      reinterpret_cast<uint4*>(normed)[row * pieces + i] = narrow(x[h]);
    }
  }
}

__device__ float squares_of(const float* x, int64_t count) {
  float sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += x[i] * x[i];
  return block_sum(sum);
}

// A row a block at a time, twice: between the two all ranks learn one another's sums of squares. They are overwritten
// in the next layer, after the barrier of this layer's first sum.
__global__ void __launch_bounds__(kThreads, 2)
    qk_norm_over_ranks(const __grid_constant__ LinkView v, const __grid_constant__ QkNormOverRanks n, int64_t rows) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float* x = n.x + row * n.stride;
    const float q = squares_of(x, n.q_cols), k = n.counts_keys ? squares_of(x + n.q_cols, n.kv_cols) : 0;
    if (threadIdx.x == 0) v.squares[v.rank][2 * row] = q, v.squares[v.rank][2 * row + 1] = k;
  }
  meet(v);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float q = 0, k = 0;
    for (int r = 0; r < v.ranks; ++r) q += __ldcg(v.squares[r] + 2 * row), k += __ldcg(v.squares[r] + 2 * row + 1);
    q = rsqrtf(q / float(n.q_all) + n.eps), k = rsqrtf(k / float(n.kv_all) + n.eps);
    float* x = n.x + row * n.stride;
    for (int64_t i = threadIdx.x; i < n.q_cols; i += blockDim.x) x[i] *= q * n.q[i];
    for (int64_t i = threadIdx.x; i < n.kv_cols; i += blockDim.x) x[n.q_cols + i] *= k * n.k[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    gather(const __grid_constant__ LinkView v, float* out, int64_t rows, int64_t all) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  meet(v);
  for (int r = 0; r < v.ranks; ++r) {
    const int64_t cols = v.count[r], first = v.first[r];
    const int each = cols % 4 == 0 && first % 4 == 0 && all % 4 == 0 ? 4 : 1;
    const int64_t pieces = cols / each;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < rows * pieces;
         i += int64_t(gridDim.x) * kThreads) {
      const int64_t row = i / pieces, col = i % pieces * each;
      const float* from = v.logits[r] + row * cols + col;
      float* to = out + row * all + first + col;
      if (each == 4)
        *reinterpret_cast<float4*>(to) = __ldcg(reinterpret_cast<const float4*>(from));
      else
        *to = __ldcg(from);
    }
  }
  meet(v);
}

__global__ void barrier(const __grid_constant__ LinkView v) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  meet(v);
}

__global__ void hang(const __grid_constant__ LinkView v) {
  while (!heard(v.lost)) __nanosleep(100'000);
}

__device__ int64_t own_row(const int32_t* tokens, const int32_t* before, int64_t first, int64_t count, int64_t t) {
  const int32_t token = tokens[t];
  const int64_t row = (token < 0 ? before[-1 - token] : token) - first;
  return row >= 0 && row < count ? row : -1;
}

__global__ void own_tokens(const int32_t* tokens, const int32_t* before, int64_t first, int64_t count, int32_t* own,
                           int64_t rows) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= rows) return;
  const int64_t row = own_row(tokens, before, first, count, t);
  own[t] = row < 0 ? 0 : int32_t(row);
}

__global__ void own_rows(const int32_t* tokens, const int32_t* before, int64_t first, int64_t count, const float* in,
                         __nv_bfloat16* out, int64_t cols) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t t = blockIdx.x;
  const bool mine = own_row(tokens, before, first, count, t) >= 0;
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x)
    out[t * cols + i] = __float2bfloat16_rn(mine ? in[t * cols + i] : 0.0f);
}

unsigned blocks_for(int64_t pieces, int64_t most = kLinkBlocks) {
  return unsigned(std::clamp<int64_t>((pieces + kThreads - 1) / kThreads, 1, most));
}

// More blocks wait longer for one another, and read faster: of up to 512 KiB fewer win (gpu_ranks_bench).
constexpr int64_t kFewPieces = (512 << 10) / 16, kFewBlocks = 32;
// What crosses the link while a barrier is waited for.
constexpr int64_t kBarrierBytes = int64_t(1200) << 10;

}  // namespace

bool two_shots_win(int32_t ranks, int64_t count) {
  const int64_t saved = 2 * count * (ranks - 1) * (ranks - 2) / ranks;
  return ranks > 2 && count % kEach == 0 && saved > kBarrierBytes;
}

void launch_sum(const LinkView& view, int turn, bool add, float* out, int64_t count, cudaStream_t stream, int blocks,
                Shots shots) {
  const bool slices = shots == Shots::two || (shots == Shots::fitting && two_shots_win(view.ranks, count));
  const int64_t pieces = count / kEach / (slices ? view.ranks : 1);
  launch_early(
      slices ? sum_by_slices : sum,
      dim3(blocks > 0 ? unsigned(blocks) : blocks_for(pieces, pieces <= kFewPieces ? kFewBlocks : kLinkBlocks)),
      kThreads, stream, view, turn, add, out, count);
}

bool sum_norm_takes(int64_t cols) { return cols % kEach == 0 && cols <= int64_t(kHeld) * kThreads * kEach; }

void launch_sum_norm(const LinkView& view, int turn, float* out, const float* weight, float eps, void* normed,
                     int64_t rows, int64_t cols, cudaStream_t stream) {
  const int64_t each = (cols / kEach + kHeld - 1) / kHeld;  // threads, where each holds as much as it can
  const int threads =
      int(std::clamp<int64_t>(cols / kEach <= kThreads ? cols / kEach : each, 32, kThreads) + 31) / 32 * 32;
  launch_early(sum_norm, dim3(unsigned(std::min<int64_t>(rows, kLinkBlocks))), threads, stream, view, turn, out, weight,
               eps, static_cast<__nv_bfloat16*>(normed), rows, cols);
}

void launch_qk_norm_over_ranks(const LinkView& view, const QkNormOverRanks& norm, int64_t rows, cudaStream_t stream) {
  launch_early(qk_norm_over_ranks, dim3(unsigned(std::min<int64_t>(rows, kLinkBlocks))), kThreads, stream, view, norm,
               rows);
}

void launch_gather(const LinkView& view, float* out, int64_t rows, int64_t all, cudaStream_t stream) {
  launch_early(gather, dim3(blocks_for(rows * all / 4)), kThreads, stream, view, out, rows, all);
}

void launch_barrier(const LinkView& view, cudaStream_t stream) { launch_early(barrier, dim3(1), 32, stream, view); }

void launch_hang(const LinkView& view, cudaStream_t stream) { hang<<<1, 1, 0, stream>>>(view); }

void launch_own_tokens(const int32_t* tokens, const int32_t* before, const Share& share, int32_t* own, int64_t rows,
                       cudaStream_t stream) {
  launch_early(own_tokens, dim3(unsigned((rows + 255) / 256)), 256, stream, tokens, before, share.first, share.count,
               own, rows);
}

void launch_own_rows(const int32_t* tokens, const int32_t* before, const Share& share, const float* in, void* out,
                     int64_t rows, int64_t cols, cudaStream_t stream) {
  launch_early(own_rows, dim3(unsigned(rows)), 256, stream, tokens, before, share.first, share.count, in,
               static_cast<__nv_bfloat16*>(out), cols);
}

}  // namespace kvasir::model::cuda
