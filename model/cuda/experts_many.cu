// Products of many rows by their experts' weights, on Hopper's warpgroup instructions. Tiles of 128 features of an item
// pass through a ring in shared memory: a producer warpgroup fills it, weights by bulk copies and rows of the input by
// gathers, and two consumer warpgroups multiply half of the features each.
#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/shared_memory.h"
#include "attention/cuda/wgmma.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/expert_sums.cuh"
#include "model/cuda/mxfp4.cuh"
#include "model/cuda/ring.cuh"
#include "model/cuda/tile_end.cuh"

namespace kvasir::model::cuda {
namespace {

using namespace attention::cuda;

constexpr int kThreads = 3 * kGroup;

template <int kRows, bool kMxfp4>
struct Ring {
  static constexpr int kTile = kMxfp4 ? kTileBytes4 : kTileBytes, kWeights = (kTile + 1023) / 1024 * 1024;
  static constexpr int kInput = kRows * kTileCols * 2, kStage = kWeights + kInput;
  // MXFP4 of few rows is bound by latency, not by memory: two blocks a multiprocessor hide it.
  static constexpr int kBlocks = kMxfp4 && kRows <= 64 ? 2 : 1;
  static constexpr int kFit = (kShared / kBlocks - 2048) / kStage, kStages = kFit > 8 ? 8 : kFit;
  // For all three warpgroups no more registers than a block is launched with, or setmaxnreg waits for ever.
  static constexpr int kFillRegisters = kBlocks == 2 ? 32 : 72, kMultiplyRegisters = kBlocks == 2 ? 104 : 216;
  static constexpr int kBytes = kStages * kStage + 1024 + 2 * 8 * int(sizeof(uint64_t));  // 1024 to align
};

template <int kRows, bool kMxfp4>
__device__ void fill(const ExpertProduct& p, uint8_t* ring, uint64_t* full, uint64_t* empty, int work) {
  using R = Ring<kRows, kMxfp4>;
  constexpr int kMine = kRows / 16;
  const int thread = threadIdx.x, chunk = thread % 8, row0 = thread / 8;
  RingPlace at;
  for (int w = blockIdx.x; w < work; w += gridDim.x) {
    const ExpertItem& item = p.items[w / p.down];
    const int first = item.first, count = item.count;
    const uint8_t* weights = p.tiles + item.expert * p.expert_bytes + int64_t(w % p.down) * p.steps * R::kTile;
    int rows[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int row = row0 + 16 * i;
      rows[i] = row >= count ? -1 : p.rows ? p.rows[first + row] : first + row;
    }
    for (int step = 0; step < p.steps; ++step, advance<R::kStages>(at)) {
      uint8_t* stage = ring + at.stage * R::kStage;
      barrier_wait(&empty[at.stage], at.phase ^ 1);
      if (thread == 0) {
        barrier_expect(&full[at.stage], R::kTile);
        load_bulk(stage, weights + int64_t(step) * R::kTile, R::kTile, &full[at.stage]);
      }
      const int col = step * kTileCols + chunk * 8;
      const uint32_t to = shared_address(stage + R::kWeights) + row0 * 128 + (chunk ^ (row0 & 7)) * 16;
#pragma unroll
      for (int i = 0; i < kMine; ++i)
        if (rows[i] >= 0) copy16(to + i * 2048, p.in + int64_t(rows[i]) * p.k + min(col, p.k - 8), col < p.k);
      arrive_when_copied(&full[at.stage]);
    }
  }
}

// One tile, of up to kWide rows of the item.
template <int kRows, int kWide, bool kGated, bool kMxfp4>
__device__ void multiply(const ExpertProduct& p, uint8_t* ring, uint64_t* full, uint64_t* empty, int half,
                         RingPlace& at, const ExpertItem& item, int tile) {
  using R = Ring<kRows, kMxfp4>;
  float sums[kWide / 2];
  const bool leads = threadIdx.x % kGroup == 0;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, tid = lane % 4;
  int before = 0;
  // `a` is room for the weights' registers, which are read until the next step's products have begun.
  auto take = [&](int step, uint32_t(&a)[kMxfp4 ? 16 : 1]) {
    const uint8_t* stage = ring + at.stage * R::kStage;
    barrier_wait(&full[at.stage], at.phase);
    proxy_fence();
    const uint64_t rows = rows_descriptor(shared_address(stage + R::kWeights));
    if constexpr (kMxfp4) {
      const int strip = half * 4 + warp;
      const Mxfp4Lane of{*reinterpret_cast<const uint4*>(stage + strip * kStripBytes + lane * 16),
                         *reinterpret_cast<const uint2*>(stage + kTileScales + strip * kStripScales + g * 8)};
#pragma unroll
      for (int i = 0; i < kTileCols / 16; ++i) widen(of, i, a + i * 4);
      hold(sums);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileCols / 16; ++i)
        wgmma_rows(Brain{}, sums, a + i * 4, further(rows, i * 2), step > 0 || i > 0);
    } else {
      const uint64_t weights = rows_descriptor(shared_address(stage + half * (kTileBytes / 2)));
      hold(sums);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileCols / 16; ++i)
        wgmma_tiles(Brain{}, sums, further(weights, i * 2), further(rows, i * 2), step > 0 || i > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the step before: its stage may be filled again
    if (step > 0 && leads) barrier_arrive(&empty[before]);
    before = at.stage;
    advance<R::kStages>(at);
  };
  uint32_t even[kMxfp4 ? 16 : 1], odd[kMxfp4 ? 16 : 1];
  for (int step = 0; step < p.steps; step += 2) {
    take(step, even);
    if (step + 1 < p.steps) take(step + 1, odd);
  }
  wgmma_wait<0>();
  hold(sums);
  if (leads) barrier_arrive(&empty[before]);

  const int expert = item.expert, count = item.count;
  const int64_t first = item.first;
#pragma unroll
  for (int j = 0; j < kWide / 8; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = j * 8 + tid * 2 + c;
      if (row >= count) continue;
      const float y = sums[j * 4 + c], z = sums[j * 4 + 2 + c];
      if constexpr (kGated) {
        put_gated(p, expert, first + row, tile * 64 + half * 32 + warp * 8 + g, y, z);
      } else {
        const int f = tile * kTileRows + half * 64 + warp * 16 + g;
        put_sum(p, expert, first + row, f, y);
        put_sum(p, expert, first + row, f + 8, z);
      }
    }
}

template <int kRows, bool kGated, bool kMxfp4>
__global__ void __launch_bounds__(kThreads, Ring<kRows, kMxfp4>::kBlocks) experts_many(ExpertProduct p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using R = Ring<kRows, kMxfp4>;
  extern __shared__ uint8_t shared[];
  uint8_t* ring = shared + (1024 - (shared_address(shared) & 1023)) % 1024;
  auto* full = reinterpret_cast<uint64_t*>(ring + R::kStages * R::kStage);
  uint64_t* empty = full + R::kStages;
  const int group = threadIdx.x / kGroup;
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::kStages; ++i) barrier_init(&full[i], 1 + kGroup), barrier_init(&empty[i], 2);
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int work = *p.count * p.down;
  if (group == 0) {
    give_registers<R::kFillRegisters>();
    fill<kRows, kMxfp4>(p, ring, full, empty, work);
    return;
  }
  take_registers<R::kMultiplyRegisters>();
  RingPlace at;
  for (int w = blockIdx.x; w < work; w += gridDim.x) {
    const ExpertItem& item = p.items[w / p.down];
    const int count = __shfl_sync(0xffffffffu, item.count, 0), tile = w % p.down;  // or wgmma is not met by all
    if (count <= 64)
      multiply<kRows, 64, kGated, kMxfp4>(p, ring, full, empty, group - 1, at, item, tile);
    else if constexpr (kRows > 64)
      multiply<kRows, 128, kGated, kMxfp4>(p, ring, full, empty, group - 1, at, item, tile);
  }
#endif
}

template <int kRows, bool kGated, bool kMxfp4>
cudaError_t run(const ExpertProduct& p, int64_t most_items, cudaStream_t stream) {
  auto* kernel = experts_many<kRows, kGated, kMxfp4>;
  constexpr int kBytes = Ring<kRows, kMxfp4>::kBytes;
  static std::atomic<uint64_t> given;
  if (const cudaError_t e = attention::cuda::allow_shared(kernel, kBytes, given); e != cudaSuccess) return e;
  const auto blocks = unsigned(
      std::min<int64_t>(most_items * p.down, int64_t(Ring<kRows, kMxfp4>::kBlocks) * device().multiprocessors));
  return attention::cuda::launch_early(kernel, dim3(blocks), kThreads, size_t(kBytes), stream, p);
}

template <bool kMxfp4>
cudaError_t run(const ExpertProduct& p, bool gated, int item_rows, int64_t most_items, cudaStream_t stream) {
  if (item_rows <= 64)
    return gated ? run<64, true, kMxfp4>(p, most_items, stream) : run<64, false, kMxfp4>(p, most_items, stream);
  return gated ? run<128, true, kMxfp4>(p, most_items, stream) : run<128, false, kMxfp4>(p, most_items, stream);
}

}  // namespace

cudaError_t launch_experts_many(const ExpertMatrix& m, const Routed& routed, const void* in, bool by_slot, void* out,
                                int64_t most_items, int item_rows, cudaStream_t stream) {
  const ExpertProduct p = product_of(m, routed, in, by_slot, out, m.tiles_down());
  return m.mxfp4 ? run<true>(p, m.gated, item_rows, most_items, stream)
                 : run<false>(p, m.gated, item_rows, most_items, stream);
}

}  // namespace kvasir::model::cuda
