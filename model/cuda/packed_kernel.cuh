// Products by packed weights of a few rows: launch_few<PACKING>, instantiated by a file for each packing.
//
// As streamed.cu: a block stays on its multiprocessor and takes tile after tile of features, eight warps have the k
// elements of one between them, each with a ring of stages that the copy engine fills. Integers are multiplied as they
// are, a group of elements at a time: d * (sum of q * x) + m * (sum of x).
//
// Where the input fits, it stays in shared memory for all tiles, with its sums by group, and two sets of eight warps
// each have tiles of their own; else each stage brings the rows that its weights meet, and the matrix unit adds x up.
#pragma once

#include <algorithm>

#include "attention/cuda/bulk.cuh"
#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/shared_memory.h"
#include "model/cuda/early.cuh"
#include "model/cuda/packed.h"
#include "model/cuda/packed_multiply.cuh"
#include "model/cuda/tile_end.cuh"

namespace kvasir::model::cuda {
namespace {

constexpr int kWarps = 8, kShared = 227 << 10;

template <Packing kPacking, int kWide, int kTall, bool kHeld>
struct PackedShape {
  static constexpr int kSets = kHeld ? 2 : 1, kThreads = kSets * kWarps * 32;
  static constexpr int kTile = 2 * block_bytes(kPacking);  // sixteen features
  // Rows are padded so that those which lanes read at once lie in different banks.
  static constexpr int kPad = kPacking == Packing::q6 ? 32 : 64, kRow = kBlockElements * 2 + kPad;
  static constexpr int kWeights = kTall * kTile, kStage = kWeights + (kHeld ? 0 : kWide * 8 * kRow);
  static constexpr int kSums = kWarps * kWide * 8 * kTall * 16;  // floats of a set; so many of these in turn:
  static constexpr int kTurns = kWide * kTall > (kHeld ? 1 : 2) ? 1 : 2;
  static constexpr int kSumBytes = kSets * kTurns * kSums * 4;
  static constexpr int kGroup = group_elements(kPacking);
  static constexpr int kMostStages = 8;

  // Of an input that is held: a row of it, and the sums by group of all.
  __host__ __device__ static constexpr int row_bytes(int k) {
    return (k + kBlockElements - 1) / kBlockElements * kBlockElements * 2 + kPad;
  }
  __host__ __device__ static constexpr int total_bytes(int k) {
    return !has_offset(kPacking) ? 0
                                 : (k + kBlockElements - 1) / kBlockElements * (kBlockElements / kGroup) * kWide * 32;
  }
  __host__ __device__ static constexpr int held_bytes(int rows, int k) {
    return kHeld ? rows * row_bytes(k) + total_bytes(k) : 0;
  }
  __host__ __device__ static constexpr int stages(int rows, int k) {
    const int fit = (kShared - 2048 - kSumBytes - held_bytes(rows, k)) / (kSets * kWarps * kStage);
    return fit > kMostStages ? kMostStages : fit;
  }
};

// The input into shared memory, and its sums by group: [group][row of kWide * 8].
template <class S, int kWide>
__device__ void hold(const __nv_bfloat16* in, int rows, int k, uint8_t* held, float* totals, uint64_t* ready) {
  using namespace attention::cuda;
  const int stride = S::row_bytes(k), ends = k % kBlockElements;
  if (threadIdx.x == 0) {
    barrier_expect(ready, rows * k * 2);
    for (int r = 0; r < rows; ++r) load_bulk(held + r * stride, in + int64_t(r) * k, k * 2, ready);
  }
  if (ends != 0)  // zeros past the end, sixteen bytes at a time
    for (int i = threadIdx.x; i < rows * (kBlockElements - ends) / 8; i += S::kThreads) {
      const int each = (kBlockElements - ends) / 8;
      *reinterpret_cast<uint4*>(held + i / each * stride + k * 2 + i % each * 16) = uint4{};
    }
  barrier_wait(ready, 0);
  if (totals) {
    __syncthreads();
    const int groups = (k + kBlockElements - 1) / kBlockElements * (kBlockElements / S::kGroup);
    for (int i = threadIdx.x; i < groups * rows; i += S::kThreads) {
      const int group = i % groups, row = i / groups;
      const uint8_t* at = held + row * stride + group * S::kGroup * 2;
      float sum = 0;
#pragma unroll
      for (int e = 0; e < S::kGroup / 8; ++e) {
        const uint4 v = at16(at + e * 16);
        for (uint32_t two : {v.x, v.y, v.z, v.w}) {
          const float2 f = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(two));
          sum += f.x + f.y;
        }
      }
      totals[group * kWide * 8 + row] = sum;
    }
  }
  __syncthreads();
}

// What a warp does to a barrier, by its address in shared memory.
__device__ void expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ void load_once(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// When this lane's copies so far are there.
__device__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ void await(uint32_t barrier, int phase) {
  asm volatile(
      "{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra "
      "again;\ndone:\n}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

template <Packing kPacking, int kWide, int kTall, bool kHeld>
__global__ void __launch_bounds__(PackedShape<kPacking, kWide, kTall, kHeld>::kThreads, 1)
    packed(const __nv_bfloat16* in, const uint8_t* weight, float unit, void* out, int rows, int64_t n, int k, int tiles,
           int stages, bool gated, Form form) {
#if __CUDA_ARCH__ >= 900
  using S = PackedShape<kPacking, kWide, kTall, kHeld>;
  using namespace attention::cuda;
  using Plain = TileEnd<kWarps, kWide, kTall, false>;
  constexpr bool kTotals = kHeld && has_offset(kPacking);
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t arrived[S::kSets * kWarps][S::kMostStages], ready;
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, set = warp / kWarps, part = warp % kWarps;
  float* sums = reinterpret_cast<float*>(shared) + set * S::kTurns * S::kSums;
  float* totals = kTotals ? reinterpret_cast<float*>(shared + S::kSumBytes) : nullptr;
  // Rows that are not there are read as well, for sums that nobody wants: what lies behind must be shared memory.
  uint8_t* held = shared + S::kSumBytes + (kHeld ? S::total_bytes(k) : 0);
  uint8_t* ring = shared + S::kSumBytes + S::held_bytes(rows, k) + warp * stages * S::kStage;
  if (lane < stages) barrier_init(&arrived[warp][lane], kHeld ? 1 : 33);  // the weights, and 32 lanes with their copies
  if (threadIdx.x == 0) barrier_init(&ready, 1);
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  if (kHeld)
    __syncthreads();
  else
    __syncwarp();

  const int steps = (k + kBlockElements - 1) / kBlockElements, mine = (steps - part + kWarps - 1) / kWarps;
  const int first = int(blockIdx.x) * S::kSets + set, every = int(gridDim.x) * S::kSets;
  const uint32_t barriers = shared_address(arrived[warp]), stages_at = shared_address(ring);
  const uint64_t policy = read_once();
  // What is prefetched next. Sixteen features' blocks lie one behind another, those of the next features after them.
  int left = first < tiles ? (tiles - first + every - 1) / every * mine : 0, fill = 0, fill_step = part;
  const int64_t apart = int64_t(steps) * S::kTile,
                jump = (int64_t(every) * kTall * steps - int64_t(mine) * kWarps) * S::kTile;
  const uint8_t* next = weight + (int64_t(first) * kTall * steps + part) * S::kTile;
  auto prefetch_weights = [&] {
    if (lane == 0) {
      expect(barriers + fill * 8, S::kWeights);
#pragma unroll
      for (int t = 0; t < kTall; ++t)
        load_once(stages_at + fill * S::kStage + t * S::kTile, next + t * apart, S::kTile, barriers + fill * 8, policy);
    }
    next += kWarps * S::kTile;
  };
  const int copy_row = lane / 16, copy_chunk = lane % 16;
  auto prefetch_rows = [&](int stage, int step) {
    if constexpr (!kHeld) {
      const int element = step * kBlockElements + copy_chunk * 8;
      const uint32_t to = stages_at + stage * S::kStage + S::kWeights + copy_row * S::kRow + copy_chunk * 16;
      const __nv_bfloat16* from = in + int64_t(copy_row) * k + element;
#pragma unroll
      for (int r = 0; r < kWide * 8; r += 2)
        if (r + copy_row < rows) copy16(to + r * S::kRow, from + int64_t(r) * k, element < k);
      arrive_after_copies(barriers + stage * 8);
    }
  };
  auto advance = [&] {
    --left;
    fill = fill + 1 == stages ? 0 : fill + 1;
    if ((fill_step += kWarps) < steps) return;
    fill_step = part, next += jump;
  };
  const int begun = min(left, stages - 1);
  for (int i = 0; i < begun; ++i) {
    prefetch_weights();
    advance();
  }
  wait_for_previous_kernel();
  if constexpr (kHeld)
    hold<S, kWide>(in, rows, k, held, totals, &ready);
  else
    for (int i = 0; i < begun; ++i) prefetch_rows(i, part + i % mine * kWarps);

  const int stride = kHeld ? S::row_bytes(k) : S::kRow, row = lane / 4;
  const int thread = threadIdx.x % (kWarps * 32);
  auto scale = [&](int64_t) { return unit; };
  int use = 0, turn = 0, phase = 0;
  for (int tile = first; tile < tiles; tile += every, turn = S::kTurns - 1 - turn) {
    const Plain plain(thread, out, rows, n, tile, form, scale);
    float sum[kTall][kWide][4] = {};
    for (int at = part; at < steps; at += kWarps) {
      __syncwarp();
      if (left > 0) {
        prefetch_weights();
        prefetch_rows(fill, fill_step);
        advance();
      }
      await(barriers + use * 8, phase);
      const uint8_t* stage = ring + use * S::kStage;
      const uint8_t* lines = kHeld ? held + at * kBlockElements * 2 : stage + S::kWeights;
      multiply<kPacking, kWide, kTall, kTotals>(
          stage, lines + row * stride, stride,
          totals + (kTotals ? at * (kBlockElements / S::kGroup) * kWide * 8 + lane % 4 * 2 : 0), sum);
      if (++use == stages) use = 0, phase ^= 1;
    }
    float* here = sums + turn * S::kSums;
    put_sums<kWide, kTall>(here, part, sum);
    named_sync(1 + set, kWarps * 32);  // with two turns, the other sums are free once everybody is here again
    if (gated)
      TileEnd<kWarps, kWide, kTall, true>(thread, out, rows, n, tile, form, scale).end(here);
    else if (kHeld)  // two sets of warps hide each other's waits: not worth the registers
      Plain(thread, out, rows, n, tile, form, scale).end(here);
    else
      plain.end(here);
    if (S::kTurns == 1) named_sync(1 + set, kWarps * 32);
  }
#endif
}

template <Packing kPacking, int kWide, int kTall, bool kHeld>
void run(const void* in, const void* weight, float unit, void* out, int64_t rows, int64_t n, int64_t k, Form form,
         cudaStream_t stream) {
  using S = PackedShape<kPacking, kWide, kTall, kHeld>;
  auto* kernel = packed<kPacking, kWide, kTall, kHeld>;
  constexpr int kBytes = kShared - 2048;
  static std::atomic<uint64_t> given;
  if (attention::cuda::allow_shared(kernel, kBytes, given) != cudaSuccess) return;
  const bool gated = fuses_gates(form);
  const int tiles = int(n / (kTall * (gated ? 8 : 16)));
  const int blocks = std::min((tiles + S::kSets - 1) / S::kSets, device().multiprocessors);
  attention::cuda::launch_early(kernel, dim3(unsigned(blocks)), S::kThreads, kBytes, stream,
                                static_cast<const __nv_bfloat16*>(in), static_cast<const uint8_t*>(weight), unit, out,
                                int(rows), n, int(k), tiles, S::stages(int(rows), int(k)), gated, form);
}

// Whether the input is held: where sixteen rows of it fit, however many there are, so that sums have one order, and
// each set has enough tiles to make up for the wait.
template <Packing kPacking>
bool holds(int64_t tiles, int64_t k) {
  return tiles > 4 * device().multiprocessors && k <= (1 << 15) &&
         PackedShape<kPacking, 2, 1, true>::stages(16, int(k)) >= 2;
}
template <Packing kPacking>
auto by_shape(int64_t rows, int64_t n, int64_t k, bool gated) {
  const int64_t tiles = n / (gated ? 8 : 16);
  if (holds<kPacking>(tiles, k)) return rows > 8 ? run<kPacking, 2, 1, true> : run<kPacking, 1, 1, true>;
  if (!worth_tall(tiles)) return rows > 8 ? run<kPacking, 2, 1, false> : run<kPacking, 1, 1, false>;
  constexpr int kMost = PackedShape<kPacking, 2, 2, false>::stages(16, 0) >= 3 ? 2 : 1;
  return rows > 8 ? run<kPacking, 2, kMost, false> : run<kPacking, 1, 2, false>;
}

}  // namespace

template <Packing kPacking>
void launch_few(const void* in, const void* weight, float unit, void* out, int64_t rows, int64_t n, int64_t k,
                Form form, cudaStream_t stream) {
  by_shape<kPacking>(rows, n, k, fuses_gates(form))(in, weight, unit, out, rows, n, k, form, stream);
}

}  // namespace kvasir::model::cuda
