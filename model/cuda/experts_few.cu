// Products of a few rows by their experts' weights, which take as long as these are on their way. A block stays on its
// multiprocessor and takes tile after tile of sixteen features of an item; its warps have the elements of k between
// them, each with a ring of stages in shared memory that runs on over the ends of tiles.
#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/mma.cuh"
#include "attention/cuda/shared_memory.h"
#include "model/cuda/early.cuh"
#include "model/cuda/expert_sums.cuh"
#include "model/cuda/mxfp4.cuh"
#include "model/cuda/tile_end.cuh"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::Brain;
using attention::cuda::copies_commit;
using attention::cuda::copies_wait;
using attention::cuda::copy16;
using attention::cuda::copy16_once;
using attention::cuda::shared_address;

constexpr int kWarps = 8, kBlocks = 2;  // of a multiprocessor
constexpr int kPart = 16;               // features of a tile
constexpr int kSums = kWarps * kItemRows * kPart;

// What a stage has of the weights, and then rows of the input.
template <bool kMxfp4>
struct Ring {
  static constexpr int kStages = kMxfp4 ? 8 : 4;
  static constexpr int kWeights = kMxfp4 ? kStripBytes + kStripScales : 2 * kAtomBytes;
  static constexpr int kStage = kWeights + kItemRows * kTileCols * 2;
  static constexpr int kShared = kWarps * kStages * kStage + 2 * kSums * int(sizeof(float));
};

__device__ int place(int row, int chunk) { return row * 128 + (chunk ^ row) * 16; }

// An item, as the lanes of a warp keep it: two rows of the input each.
struct Kept {
  int expert, first, count, rows[2];
};
__device__ Kept keep(const ExpertProduct& p, int tile, int work, int lane) {
  if (tile >= work) return {};
  const ExpertItem& item = p.items[tile / p.down];
  Kept k{item.expert, item.first, item.count, {}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane / 8 + 4 * i;
    k.rows[i] = row >= k.count ? -1 : p.rows ? item.rows[row] : k.first + row;
  }
  return k;
}

template <bool kGated, bool kMxfp4>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) experts_few(ExpertProduct p) {
  constexpr int kStages = Ring<kMxfp4>::kStages, kWeights = Ring<kMxfp4>::kWeights, kStage = Ring<kMxfp4>::kStage;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tid = lane % 4;
  uint8_t* ring = shared + warp * kStages * kStage;
  float* sums = reinterpret_cast<float*>(shared + kWarps * kStages * kStage);
  const uint64_t policy = attention::cuda::read_once();
  const int mine = (p.steps - warp + kWarps - 1) / kWarps;  // steps of a tile; 0 of short rows
  let_next_kernel_start();
  wait_for_previous_kernel();

  const int work = *p.count * p.down;
  const int total = mine * ((work - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x));
  // What is on its way belongs to `ahead`, of which the next is known by then.
  int tile = blockIdx.x, step = warp, copied = 0;
  Kept ahead = keep(p, tile, work, lane), next = keep(p, tile + int(gridDim.x), work, lane);
  constexpr int kTile = kMxfp4 ? kTileBytes4 : kTileBytes, kStrip = kMxfp4 ? kStripBytes : kWeights;
  const int row = lane / 8, chunk = lane % 8;
  const uint32_t weights_to = shared_address(ring) + lane * 16;
  const uint32_t rows_to = shared_address(ring) + kWeights + place(row, chunk);
  const uint32_t more_rows_to = shared_address(ring) + kWeights + place(row + 4, chunk);
  const uint8_t *weights = nullptr, *scales = nullptr;
  auto enter = [&] {
    const int part = tile % p.down;
    const uint8_t* from = p.tiles + ahead.expert * p.expert_bytes + int64_t(part / 8) * p.steps * kTile;
    weights = from + part % 8 * kStrip + lane * 16;
    scales = from + kTileScales + part % 8 * kStripScales + lane * 16;
  };
  enter();
  auto copy = [&](int stage) {
    if (copied < total) {
      const uint32_t to = weights_to + stage * kStage;
      const int64_t at = int64_t(step) * kTile;
      copy16_once(to, weights + at, true, policy);
      if constexpr (kMxfp4) {
        if (lane * 16 < kStripScales) copy16_once(to + kStripBytes, scales + at, true, policy);
      } else {
#pragma unroll
        for (int i = 1; i < 4; ++i) copy16_once(to + i * 512, weights + at + i * 512, true, policy);
      }
      const int col = step * kTileCols + chunk * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (ahead.rows[i] >= 0)
          copy16((i == 0 ? rows_to : more_rows_to) + stage * kStage,
                 p.in + int64_t(ahead.rows[i]) * p.k + min(col, p.k - 8), col < p.k);
      ++copied;
      if ((step += kWarps) >= p.steps) {
        step = warp, tile += gridDim.x;
        ahead = next, next = keep(p, tile + int(gridDim.x), work, lane);
        enter();
      }
    }
    copies_commit();
  };
  for (int i = 0; i < kStages - 1; ++i) copy(i);

  int fill = kStages - 1, use = 0, turn = 0;
  for (int t = blockIdx.x; t < work; t += gridDim.x, turn ^= 1) {
    const ExpertItem& item = p.items[t / p.down];
    float sum[1][1][4] = {};
    for (int i = 0; i < mine; ++i) {
      copies_wait<kStages - 2>();
      __syncwarp();
      copy(fill);
      fill = fill + 1 == kStages ? 0 : fill + 1;
      const uint8_t* stage = ring + use * kStage;
      use = use + 1 == kStages ? 0 : use + 1;
      auto read = [](const uint8_t* at) { return *reinterpret_cast<const uint4*>(at); };
      if constexpr (kMxfp4) {
        const Mxfp4Lane of{read(stage + lane * 16), *reinterpret_cast<const uint2*>(stage + kStripBytes + g * 8)};
        auto pair = [&](int c) { return *reinterpret_cast<const uint32_t*>(stage + kWeights + place(g, c) + tid * 4); };
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          uint32_t a[4];
          widen(of, k, a);
          Brain::mma(sum[0][0], a, pair(2 * k), pair(2 * k + 1));
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = place(g, half * 4 + tid);
          const uint4 low = read(stage + at), high = read(stage + kAtomBytes + at), x = read(stage + kWeights + at);
          const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
          Brain::mma(sum[0][0], first, x.x, x.y);
          Brain::mma(sum[0][0], second, x.z, x.w);
        }
      }
      __syncwarp();
    }
    float* here = sums + turn * kSums;
    put_sums<1, 1>(here, warp, sum);
    __syncthreads();  // the other sums are free once everybody is here again
    constexpr int kResults = kGated ? kPart / 2 : kPart;
    const int count = item.count, expert = item.expert, first = item.first;
    for (int e = threadIdx.x; e < count * kResults; e += kWarps * 32) {
      const int r = e / kResults, f = e % kResults;
      float y = 0, up = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        y += here[(w * kItemRows + r) * kPart + f];
        if constexpr (kGated) up += here[(w * kItemRows + r) * kPart + f + 8];
      }
      if constexpr (kGated)
        put_gated(p, expert, first + r, t % p.down * kResults + f, y, up);
      else
        put_sum(p, expert, first + r, t % p.down * kResults + f, y);
    }
  }
}

template <bool kGated, bool kMxfp4>
cudaError_t run(const ExpertProduct& p, int64_t most_items, cudaStream_t stream) {
  auto* kernel = experts_few<kGated, kMxfp4>;
  constexpr int kShared = Ring<kMxfp4>::kShared;
  static std::atomic<uint64_t> given;
  if (const cudaError_t e = attention::cuda::allow_shared(kernel, kShared, given); e != cudaSuccess) return e;
  const auto blocks = unsigned(std::min(most_items * p.down, int64_t(kBlocks) * device().multiprocessors));
  return attention::cuda::launch_early(kernel, dim3(blocks), kWarps * 32, size_t(kShared), stream, p);
}

}  // namespace

cudaError_t launch_experts_few(const ExpertMatrix& m, const Routed& routed, const void* in, bool by_slot, void* out,
                               int64_t most_items, cudaStream_t stream) {
  const ExpertProduct p = product_of(m, routed, in, by_slot, out, (m.rows + kPart - 1) / kPart);
  if (m.mxfp4) return m.gated ? run<true, true>(p, most_items, stream) : run<false, true>(p, most_items, stream);
  return m.gated ? run<true, false>(p, most_items, stream) : run<false, false>(p, most_items, stream);
}

}  // namespace kvasir::model::cuda
