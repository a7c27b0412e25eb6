#include "attention/cuda/mma.cuh"
#include "model/adapter.h"
#include "model/cuda/early.cuh"
#include "model/cuda/low_rank.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::Brain;

constexpr int kWarps = 8, kThreads = kWarps * 32, kSide = int(kFactorTileSide), kLanes = 32;
constexpr int kFeatureTiles = int(kBlockFeatures) / kSide / kWarps;  // of a warp

// Elements of k that a block of shrink() sums: those of long rows are more, so that there are not too many sums.
constexpr int chunk_of(int64_t k) { return k <= 8192 ? 512 : 1024; }

// A tile's elements (g, 4 * tid ..) and (g + 8, 4 * tid ..) are lane 4 * g + tid's: what the matrix unit contracts may
// have any order, so a lane's part of a row of the input is eight bytes.
__device__ void multiply(float (&sum)[4], const uint4& tile, const uint2& x) {
  const uint32_t a[4] = {tile.x, tile.y, tile.z, tile.w};
  Brain::mma(sum, a, x.x, x.y);
}

// A block has 16 ranks of a tile's adapter and a chunk of k. Its weights are on their way before the previous kernel
// ends.
template <int kWide>
__global__ void __launch_bounds__(kThreads) shrink(LowRankProduct p, int splits, int chunk_tiles) {
  constexpr int kRows = kWide * 8, kAhead = kWide == 1 ? 8 : 4;
  __shared__ float sums[kWarps][kRows][kSide];
  let_next_kernel_start();
  const LowRankTile tile = p.tiles[blockIdx.y];
  const int ranks = int(blockIdx.x) / splits, split = int(blockIdx.x) % splits;
  const LowRankWeight* w = tile.rows > 0 ? tile.weights + p.weight : nullptr;
  if (!w || ranks >= w->ranks) return wait_for_previous_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tid = lane % 4;
  const int k_tiles = int(p.k / kSide), end = min(k_tiles, (split + 1) * chunk_tiles);
  const uint4* a = static_cast<const uint4*>(w->a) + int64_t(ranks) * k_tiles * kLanes + lane;
  int at = split * chunk_tiles + warp;
  uint4 ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (at + i * kWarps < end) ahead[i] = __ldg(a + (at + i * kWarps) * kLanes);
  const __nv_bfloat16* x_at[kWide];
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    const int row = j * 8 + g;
    x_at[j] = row < tile.rows
                  ? static_cast<const __nv_bfloat16*>(p.in) + int64_t(p.rows[tile.first + row]) * p.k + tid * 4
                  : nullptr;
  }
  wait_for_previous_kernel();
  float sum[kWide][4] = {};
  for (; at < end; at += kAhead * kWarps) {
    uint2 x[kAhead][kWide] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int j = 0; j < kWide; ++j)
        if (at + i * kWarps < end && x_at[j])
          x[i][j] = *reinterpret_cast<const uint2*>(x_at[j] + (at + i * kWarps) * kSide);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (at + i * kWarps >= end) break;
#pragma unroll
      for (int j = 0; j < kWide; ++j) multiply(sum[j], ahead[i], x[i][j]);
      if (const int next = at + (kAhead + i) * kWarps; next < end) ahead[i] = __ldg(a + next * kLanes);
    }
  }
#pragma unroll
  for (int j = 0; j < kWide; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][j * 8 + tid * 2 + i % 2][g + i / 2 * 8] = sum[j][i];
  __syncthreads();
  for (int e = threadIdx.x; e < tile.rows * kSide; e += kThreads) {
    const int row = e / kSide, r = e % kSide;
    float y = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) y += sums[i][row][r];
    p.sums[((int64_t(split) * gridDim.y + blockIdx.y) * kRows + row) * p.ranks * kSide + ranks * kSide + r] = y;
  }
}

// Which part of a weight a block has, and which features of it.
__device__ const LowRankPart* find_part(const LowRankWeight& w, int& block) {
  for (int i = 0; i < w.parts; ++i) {
    const int blocks = (w.part[i].rows + int(kBlockFeatures) - 1) / int(kBlockFeatures);
    if (block < blocks) return &w.part[i];
    block -= blocks;
  }
  return nullptr;
}

__device__ float load(const float* p) { return *p; }
__device__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ void store(float* p, float y) { *p = y; }
__device__ void store(__nv_bfloat16* p, float y) { *p = __float2bfloat16_rn(y); }

template <int kWide, class Out>
__global__ void __launch_bounds__(kThreads) expand(LowRankProduct p, int splits) {
  constexpr int kRows = kWide * 8, kRow = int(kMostAdapterRank) + 8;
  __shared__ __align__(16) __nv_bfloat16 reduced[kRows][kRow];
  let_next_kernel_start();
  const LowRankTile tile = p.tiles[blockIdx.y];
  int block = blockIdx.x;
  const LowRankPart* found = tile.rows > 0 ? find_part(tile.weights[p.weight], block) : nullptr;
  if (!found) return wait_for_previous_kernel();
  const LowRankPart part = *found;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tid = lane % 4;
  const int first = block * (kFeatureTiles * kWarps) + warp, feature_tiles = (part.rows + kSide - 1) / kSide;
  const uint4* b = static_cast<const uint4*>(part.b) + lane;
  auto fetch = [&](int t, int r) {
    const int at = first + t * kWarps;
    return at < feature_tiles ? __ldg(b + (int64_t(at) * part.ranks + r) * kLanes) : uint4{};
  };
  uint4 weights[kFeatureTiles];
#pragma unroll
  for (int t = 0; t < kFeatureTiles; ++t) weights[t] = fetch(t, 0);
  int64_t row_at[kWide][2];  // of the rows of the input that this lane's sums belong to; none: -1
#pragma unroll
  for (int j = 0; j < kWide; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = j * 8 + tid * 2 + i;
      row_at[j][i] = row < tile.rows ? int64_t(p.rows[tile.first + row]) * p.n + part.first : -1;
    }
  auto feature = [&](int t, int i) { return (first + t * kWarps) * kSide + g + i / 2 * 8; };
  wait_for_previous_kernel();

  // Of few rows what they are added to is prefetched while the sums are made.
  Out* out = static_cast<Out*>(p.out);
  float y[kFeatureTiles][4] = {};
  if constexpr (kWide == 1)
#pragma unroll
    for (int t = 0; t < kFeatureTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (row_at[0][i % 2] >= 0 && feature(t, i) < part.rows) y[t][i] = load(out + row_at[0][i % 2] + feature(t, i));
  const int64_t width = p.ranks * kSide, apart = int64_t(gridDim.y) * kRows * width;
  for (int e = threadIdx.x; e < tile.rows * part.ranks * kSide; e += kThreads) {
    const int row = e / (part.ranks * kSide), r = e % (part.ranks * kSide);
    const float* from = p.sums + (int64_t(blockIdx.y) * kRows + row) * width + part.from * kSide + r;
    float sum = 0;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) sum += from[s * apart];
    reduced[row][r] = __float2bfloat16_rn(sum);
  }
  __syncthreads();
  float sum[kFeatureTiles][kWide][4] = {};
  for (int r = 0; r < part.ranks; ++r) {
    uint2 x[kWide];
#pragma unroll
    for (int j = 0; j < kWide; ++j) x[j] = *reinterpret_cast<const uint2*>(&reduced[j * 8 + g][r * kSide + tid * 4]);
#pragma unroll
    for (int t = 0; t < kFeatureTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) multiply(sum[t][j], weights[t], x[j]);
      if (r + 1 < part.ranks) weights[t] = fetch(t, r + 1);
    }
  }
#pragma unroll
  for (int t = 0; t < kFeatureTiles; ++t)
#pragma unroll
    for (int j = 0; j < kWide; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int f = feature(t, i);
        if (row_at[j][i % 2] < 0 || f >= part.rows) continue;
        const int64_t at = row_at[j][i % 2] + f;
        float base = kWide == 1 ? y[t][i] : load(out + at);
        if (part.factors) base *= part.factors[f];
        base += sum[t][j][i];
        store(out + at, part.factors && p.saved ? p.saved[at] + base : base);
      }
}

__global__ void __launch_bounds__(kThreads) take_out(LowRankProduct p) {
  let_next_kernel_start();
  const LowRankTile tile = p.tiles[blockIdx.y];
  int block = blockIdx.x;
  const LowRankPart* part = tile.rows > 0 ? find_part(tile.weights[p.weight], block) : nullptr;
  wait_for_previous_kernel();
  if (!part || !part->factors) return;
  for (int e = threadIdx.x; e < tile.rows * int(kBlockFeatures); e += kThreads) {
    const int row = e / int(kBlockFeatures), f = block * int(kBlockFeatures) + e % int(kBlockFeatures);
    if (f >= part->rows) continue;
    const int64_t at = int64_t(p.rows[tile.first + row]) * p.n + part->first + f;
    p.saved[at] = static_cast<float*>(p.out)[at];
    static_cast<float*>(p.out)[at] = 0;
  }
}

__global__ void __launch_bounds__(kThreads) pack_factor(const float* from, int64_t outputs, int64_t inputs, float scale,
                                                        const float* factors, int64_t lanes, int64_t deep, uint4* to) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;  // `deep`: tiles of an output
  if (at >= lanes) return;
  const int lane = int(at % kLanes), g = lane / 4, tid = lane % 4;
  const int64_t tile = at / kLanes, input = tile % deep * kFactorTileSide + tid * 4;
  uint32_t pair[2][2];  // of row g and of row g + 8
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t output = tile / deep * kFactorTileSide + g + h * 8;
    const float by = factors && output < outputs ? factors[output] * scale : scale;
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      y[i] = output < outputs && input + i < inputs ? by * from[output * inputs + input + i] : 0.0f;
    pair[h][0] = Brain::pack(y[0], y[1]), pair[h][1] = Brain::pack(y[2], y[3]);
  }
  to[at] = {pair[0][0], pair[1][0], pair[0][1], pair[1][1]};
}

__global__ void __launch_bounds__(kThreads)
    stretch(const __nv_bfloat16* weight, const float* a, const float* b, float scale, const float* magnitudes, int rank,
            int64_t cols, float* factors) {
  __shared__ float of_row[kMostAdapterRank];
  __shared__ double parts[kWarps];
  const int64_t row = blockIdx.x;
  for (int r = threadIdx.x; r < rank; r += kThreads) of_row[r] = scale * b[row * rank + r];
  __syncthreads();
  double sum = 0;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    float y = __bfloat162float(weight[row * cols + i]);
    for (int r = 0; r < rank; ++r) y += of_row[r] * a[r * cols + i];
    sum += double(y) * double(y);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) sum += parts[i];
  factors[row] = sum > 0 ? float(double(magnitudes[row]) / sqrt(sum)) : 0.0f;
}

}  // namespace

int64_t low_rank_splits(int64_t k) { return (k + chunk_of(k) - 1) / chunk_of(k); }

void launch_take_out(const LowRankProduct& p, cudaStream_t stream) {
  launch_early(take_out, dim3(unsigned(p.blocks), unsigned(p.count)), kThreads, stream, p);
}

void launch_low_rank(const LowRankProduct& p, cudaStream_t stream) {
  const int splits = int(low_rank_splits(p.k));
  const bool few = p.tile_rows == kFewTileRows;
  launch_early(few ? shrink<1> : shrink<4>, dim3(unsigned(p.ranks * splits), unsigned(p.count)), kThreads, stream, p,
               splits, chunk_of(p.k) / kSide);
  auto* kernel = p.half ? few ? expand<1, __nv_bfloat16> : expand<4, __nv_bfloat16>
                 : few ? expand<1, float>
                        : expand<4, float>;
  launch_early(kernel, dim3(unsigned(p.blocks), unsigned(p.count)), kThreads, stream, p, splits);
}

void launch_pack_factor(const float* from, int64_t outputs, int64_t inputs, float scale, const float* factors, void* to,
                        cudaStream_t stream) {
  const int64_t lanes = tiles_of(outputs) * tiles_of(inputs) * kLanes;
  pack_factor<<<unsigned((lanes + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      from, outputs, inputs, scale, factors, lanes, tiles_of(inputs), static_cast<uint4*>(to));
}

void launch_stretch(const void* weight, const float* a, const float* b, float scale, const float* magnitudes,
                    int64_t rank, int64_t rows, int64_t cols, float* factors, cudaStream_t stream) {
  stretch<<<unsigned(rows), kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(weight), a, b, scale, magnitudes,
                                                   int(rank), cols, factors);
}

}  // namespace kvasir::model::cuda
