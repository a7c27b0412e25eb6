// A block stays on its multiprocessor and takes tile after tile of features; its warps have the k elements of a tile
// between them, and each has a ring of shared-memory stages that runs on over the ends of tiles: as many bytes of
// weights as fit are under way all the time, the first of them before the kernel ahead has ended.
#include <algorithm>

#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/mma.cuh"
#include "model/cuda/activations.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/streamed.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::Brain;
using attention::cuda::copies_commit;
using attention::cuda::copies_wait;
using attention::cuda::copy16;
using attention::cuda::copy16_once;
using attention::cuda::shared_address;

constexpr int kWarps = 8, kStep = 64, kLine = kStep * 2;  // elements of k a stage has; bytes of a row there
constexpr int kShared = 227 << 10;

// kWide: groups of eight rows of the input; kTall: of sixteen rows of weights.
template <int kWide, int kTall>
struct Ring {
  static constexpr int kWeights = kTall * 16 * kLine, kStage = kWeights + kWide * 8 * kLine;
  static constexpr int kSums = kWarps * kWide * 8 * kTall * 16;  // floats; two of these in turn, where there is room
  static constexpr int kTurns = kWide * kTall > 4 ? 1 : 2;
  static constexpr int kFit = (kShared - kTurns * kSums * 4) / (kWarps * kStage), kStages = kFit > 8 ? 8 : kFit;
  static constexpr int kBytes = kWarps * kStages * kStage + kTurns * kSums * 4;
  static_assert(kStages >= 3);
};

// Lane 4 * g + tid reads sixteen bytes of row g, of the same elements of k as its row of the input: which ones, it is
// free to choose. Odd rows have the halves of their line the other way round, so that eight lanes meet all banks.
__device__ int place(int row, int chunk) { return row * kLine + (chunk ^ (row & 1) << 2) * 16; }

template <int kWide, int kTall, bool kGated>
__global__ void __launch_bounds__(kWarps * 32, 1)
    streamed(const __nv_bfloat16* in, const __nv_bfloat16* weight, void* out, int rows, int64_t n, int k, int tiles,
             Form form) {
  using R = Ring<kWide, kTall>;
  constexpr int kStages = R::kStages, kFeatures = kTall * (kGated ? 8 : 16);  // gates, then what they let through
  extern __shared__ __align__(128) uint8_t shared[];
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tid = lane % 4;
  uint8_t* ring = shared + warp * kStages * R::kStage;
  float* sums = reinterpret_cast<float*>(shared + kWarps * kStages * R::kStage);
  const uint64_t policy = attention::cuda::read_once();

  const int steps = k / kStep, mine = (steps - warp + kWarps - 1) / kWarps;
  const int total = (tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x) * mine;
  // A copy brings four rows of a stage, a line each.
  const int row = lane / 8, chunk = lane % 8;
  const uint32_t to = shared_address(ring) + uint32_t(place(row, chunk));
  int tile = blockIdx.x, step = warp;
  const __nv_bfloat16 *weights_at = nullptr, *rows_at = in + int64_t(row) * k + chunk * 8;
  auto enter = [&] { weights_at = weight + (int64_t(tile) * kFeatures + row) * k + chunk * 8; };
  auto ask_weights = [&](int stage) {
#pragma unroll
    for (int t = 0; t < kTall; ++t)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t first = !kGated ? t * 16 + j * 4 : t * 8 + j % 2 * 4 + (j / 2) * n;
        copy16_once(to + stage * R::kStage + (t * 4 + j) * 4 * kLine, weights_at + first * k + step * kStep, true,
                    policy);
      }
  };
  auto ask_rows = [&](int stage, int step) {
#pragma unroll
    for (int j = 0; j < kWide * 2; ++j)
      if (j * 4 + row < rows)
        copy16(to + stage * R::kStage + R::kWeights + j * 4 * kLine, rows_at + int64_t(j) * 4 * k + step * kStep, true);
  };
  auto advance = [&] {
    if ((step += kWarps) < steps) return;
    step = warp, tile += gridDim.x;
    enter();
  };
  enter();
  int asked = 0;
#pragma unroll
  for (; asked < kStages - 1; ++asked)
    if (asked < total) {
      ask_weights(asked);
      advance();
    }
  wait_for_kernel_ahead();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < total) ask_rows(i, warp + i % mine * kWarps);
    copies_commit();
  }

  int fill = kStages - 1, use = 0, turn = 0;
  for (int t0 = blockIdx.x; t0 < tiles; t0 += gridDim.x, turn = R::kTurns - 1 - turn) {
    float sum[kTall][kWide][4] = {};
    for (int i = 0; i < mine; ++i) {
      copies_wait<kStages - 2>();
      __syncwarp();
      if (asked++ < total) {
        ask_weights(fill);
        ask_rows(fill, step);
        advance();
      }
      copies_commit();
      fill = fill + 1 == kStages ? 0 : fill + 1;
      const uint8_t* stage = ring + use * R::kStage;
      use = use + 1 == kStages ? 0 : use + 1;
      auto read = [&](int row, int half) {
        return *reinterpret_cast<const uint4*>(stage + place(row, half * 4 + tid));
      };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 x[kWide];
#pragma unroll
        for (int w = 0; w < kWide; ++w) x[w] = read((kTall * 2 + w) * 8 + g, half);
#pragma unroll
        for (int t = 0; t < kTall; ++t) {
          const uint4 low = read(t * 16 + g, half), high = read(t * 16 + 8 + g, half);
          const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int w = 0; w < kWide; ++w) {
            Brain::mma(sum[t][w], first, x[w].x, x[w].y);
            Brain::mma(sum[t][w], second, x[w].z, x[w].w);
          }
        }
      }
    }
    constexpr int kRow = kTall * 16, kOne = kWide * 8 * kRow;  // of one warp
    float* here = sums + turn * R::kSums;
#pragma unroll
    for (int t = 0; t < kTall; ++t)
#pragma unroll
      for (int w = 0; w < kWide; ++w)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          here[warp * kOne + (w * 8 + tid * 2 + i % 2) * kRow + t * 16 + g + i / 2 * 8] = sum[t][w][i];
    __syncthreads();  // with two turns, the other sums are free once everybody is here again
    for (int e = threadIdx.x; e < rows * kFeatures; e += kWarps * 32) {
      const int r = e / kFeatures, f = e % kFeatures, from = r * kRow + (kGated ? f / 8 * 16 + f % 8 : f);
      float y = 0, up = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        y += here[w * kOne + from];
        if constexpr (kGated) up += here[w * kOne + from + 8];
      }
      const int64_t at = int64_t(r) * n + int64_t(t0) * kFeatures + f;
      if constexpr (kGated)
        static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn((form == Form::gelu ? gelu_tanh(y) : silu(y)) * up);
      else if (form == Form::bf16)
        static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(y);
      else
        static_cast<float*>(out)[at] = form == Form::added_f32 ? static_cast<float*>(out)[at] + y : y;
    }
    if (R::kTurns == 1) __syncthreads();
  }
}

struct Device {
  int multiprocessors = 0, shared = 0;
};
const Device& device() {
  static const Device found = [] {
    Device d;
    int current = 0;
    if (cudaGetDevice(&current) != cudaSuccess) return d;
    cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, current);
    cudaDeviceGetAttribute(&d.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, current);
    return d;
  }();
  return found;
}

template <int kWide, int kTall, bool kGated>
void run(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k, Form form,
         cudaStream_t stream) {
  using R = Ring<kWide, kTall>;
  auto* kernel = streamed<kWide, kTall, kGated>;
  static const cudaError_t asked = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, R::kBytes);
  if (asked != cudaSuccess) return;
  const int tiles = int(n / (kTall * (kGated ? 8 : 16)));
  attention::cuda::launch_early(kernel, dim3(unsigned(std::min(tiles, device().multiprocessors))), kWarps * 32,
                                R::kBytes, stream, static_cast<const __nv_bfloat16*>(in),
                                static_cast<const __nv_bfloat16*>(weight), out, int(rows), n, int(k), tiles, form);
}

}  // namespace

bool streamed_takes(int64_t rows, int64_t n, int64_t k, Form form) {
  // Every tile reads all rows again: of many, a library that shares them is faster. And short rows leave warps idle.
  constexpr int64_t kWeights = 4 << 20, kManyFeatures = 65536, kLong = 1024;
  const bool gated = form == Form::silu || form == Form::gelu;
  return rows <= (n < kManyFeatures ? 32 : 16) && n % (gated ? 8 : 16) == 0 && k % kStep == 0 &&
         k >= (rows > 8 ? kLong : kWarps * kStep) && (gated ? 2 : 1) * n * k >= kWeights && device().shared >= kShared;
}

void launch_streamed(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k, Form form,
                     cudaStream_t stream) {
  const bool gated = form == Form::silu || form == Form::gelu;
  // Tiles twice as tall read the input half as often, where they do not leave more multiprocessors without one.
  const int64_t tiles = n / (gated ? 8 : 16), every = device().multiprocessors;
  const bool tall = tiles % 2 == 0 && (tiles / 2 + every - 1) / every * 2 <= (tiles + every - 1) / every;
  auto with = [&](auto one, auto two, auto four) {
    (rows > 16 ? four : rows > 8 ? two : one)(in, weight, out, rows, n, k, form, stream);
  };
  if (gated)
    tall ? with(run<1, 2, true>, run<2, 2, true>, run<4, 2, true>)
         : with(run<1, 1, true>, run<2, 1, true>, run<4, 1, true>);
  else
    tall ? with(run<1, 2, false>, run<2, 2, false>, run<4, 2, false>)
         : with(run<1, 1, false>, run<2, 1, false>, run<4, 1, false>);
}

}  // namespace kvasir::model::cuda
