// A block stays on its multiprocessor and takes tile after tile of features; its warps have the k elements of a tile
// between them, and each has a ring of shared-memory stages that runs on over the ends of tiles: as many bytes of
// weights as fit are under way all the time, the first of them before the previous kernel has ended.
#include <algorithm>

#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/mma.cuh"
#include "attention/cuda/shared_memory.h"
#include "model/cuda/early.cuh"
#include "model/cuda/packed_words.cuh"
#include "model/cuda/streamed.h"
#include "model/cuda/tile_end.cuh"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::Brain;
using attention::cuda::copies_commit;
using attention::cuda::copies_wait;
using attention::cuda::copy16;
using attention::cuda::copy16_once;
using attention::cuda::shared_address;

constexpr int kWarps = 8, kLine = 128;  // bytes that a stage has of a row of weights
constexpr int kShared = 227 << 10;
using Byte = uint8_t;  // E4M3

// Elements of k that a stage has.
template <class Element>
constexpr int kStepOf = kLine / int(sizeof(Element));

// kWide: groups of eight rows of the input; kTall: of sixteen rows of weights.
template <class Element, int kWide, int kTall>
struct Ring {
  static constexpr int kRow = kStepOf<Element> * 2;  // bytes of a row of the input
  static constexpr int kWeights = kTall * 16 * kLine, kStage = kWeights + kWide * 8 * kRow;
  static constexpr int kSums = kWarps * kWide * 8 * kTall * 16;  // floats; two of these in turn, where there is room
  static constexpr int kTurns = kWide * kTall > 4 ? 1 : 2;
  static constexpr int kFit = (kShared - kTurns * kSums * 4) / (kWarps * kStage), kStages = kFit > 8 ? 8 : kFit;
  static constexpr int kBytes = kWarps * kStages * kStage + kTurns * kSums * 4;
  static_assert(kStages >= 3);
};

// Lane 4 * g + tid reads sixteen bytes of row g, of the same elements of k as its row of the input: which ones, it is
// free to choose. Odd rows have the halves of their line the other way round, so that eight lanes meet all banks; a row
// of the input that meets bytes is read at every other sixteen bytes, which odd rows have the other way round.
__device__ int place(int row, int chunk) { return row * kLine + (chunk ^ (row & 1) << 2) * 16; }
template <class Element>
__device__ int row_place(int row, int chunk) {
  return row * kStepOf<Element> * 2 + (chunk ^ (sizeof(Element) == 2 ? (row & 1) << 2 : row & 1)) * 16;
}

template <class Element, int kWide, int kTall, bool kGated>
__global__ void __launch_bounds__(kWarps * 32, 1)
    streamed(const __nv_bfloat16* in, const Element* weight, const float* scales, void* out, int rows, int64_t n, int k,
             int tiles, Form form) {
  using R = Ring<Element, kWide, kTall>;
  constexpr int kStep = kStepOf<Element>, kRowChunks = R::kRow / 16, kAtOnce = 32 / kRowChunks;  // rows of one copy
  constexpr int kStages = R::kStages, kFeatures = kTall * (kGated ? 8 : 16);  // gates, then what they let through
  extern __shared__ __align__(128) uint8_t shared[];
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tid = lane % 4;
  uint8_t* ring = shared + warp * kStages * R::kStage;
  float* sums = reinterpret_cast<float*>(shared + kWarps * kStages * R::kStage);
  const uint64_t policy = attention::cuda::read_once();

  constexpr bool kWhole = sizeof(Element) == 2;  // bytes may end within a stage, which zeros fill
  const int steps = (k + kStep - 1) / kStep, mine = (steps - warp + kWarps - 1) / kWarps;
  const int total = (tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x) * mine;
  // A copy brings four rows of a stage, a line each.
  const int row = lane / 8, chunk = lane % 8;
  const uint32_t to = shared_address(ring) + uint32_t(place(row, chunk));
  int tile = blockIdx.x, step = warp;
  const int in_row = lane / kRowChunks, in_chunk = lane % kRowChunks;
  const uint32_t rows_to = shared_address(ring) + R::kWeights + row_place<Element>(in_row, in_chunk);
  const Element* weights_at = nullptr;
  const __nv_bfloat16* rows_at = in + int64_t(in_row) * k + in_chunk * 8;
  auto enter = [&] { weights_at = weight + (int64_t(tile) * kFeatures + row) * k + chunk * (16 / sizeof(Element)); };
  auto ask_weights = [&](int stage) {
#pragma unroll
    for (int t = 0; t < kTall; ++t)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t first = !kGated ? t * 16 + j * 4 : t * 8 + j % 2 * 4 + (j / 2) * n;
        copy16_once(to + stage * R::kStage + (t * 4 + j) * 4 * kLine, weights_at + first * k + step * kStep,
                    kWhole || step * kStep + chunk * int(16 / sizeof(Element)) < k, policy);
      }
  };
  auto ask_rows = [&](int stage, int step) {
#pragma unroll
    for (int j = 0; j < kWide * 8 / kAtOnce; ++j)
      if (j * kAtOnce + in_row < rows)
        copy16(rows_to + stage * R::kStage + j * kAtOnce * R::kRow, rows_at + int64_t(j) * kAtOnce * k + step * kStep,
               kWhole || step * kStep + in_chunk * 8 < k);
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
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < total) ask_rows(i, warp + i % mine * kWarps);
    copies_commit();
  }

  int fill = kStages - 1, use = 0, turn = 0;
  for (int t0 = blockIdx.x; t0 < tiles; t0 += gridDim.x, turn = R::kTurns - 1 - turn) {
    const TileEnd<kWarps, kWide, kTall, kGated> end(int(threadIdx.x), out, rows, n, t0, form, [&](int64_t f) {
      return sizeof(Element) == 2 ? 1.0f : __ldg(scales + f);
    });
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
      const uint8_t* in_lines = stage + R::kWeights;
      auto read = [](const uint8_t* at) { return *reinterpret_cast<const uint4*>(at); };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        constexpr int kPieces = 2 / sizeof(Element);  // of the input that sixteen bytes of weights meet
        uint4 x[kWide][kPieces];
#pragma unroll
        for (int w = 0; w < kWide; ++w)
#pragma unroll
          for (int p = 0; p < kPieces; ++p)
            x[w][p] = read(in_lines + row_place<Element>(w * 8 + g, (half * 4 + tid) * kPieces + p));
#pragma unroll
        for (int t = 0; t < kTall; ++t) {
          const uint4 low = read(stage + place(t * 16 + g, half * 4 + tid)),
                      high = read(stage + place(t * 16 + 8 + g, half * 4 + tid));
          if constexpr (sizeof(Element) == 2) {
            const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int w = 0; w < kWide; ++w) {
              Brain::mma(sum[t][w], first, x[w][0].x, x[w][0].y);
              Brain::mma(sum[t][w], second, x[w][0].z, x[w][0].w);
            }
          } else {
            const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              uint32_t a[4];
              widen_bytes(lows[j], a[0], a[2]);
              widen_bytes(highs[j], a[1], a[3]);
#pragma unroll
              for (int w = 0; w < kWide; ++w) {
                const uint4& y = x[w][j / 2];
                Brain::mma(sum[t][w], a, j % 2 ? y.z : y.x, j % 2 ? y.w : y.y);
              }
            }
          }
        }
      }
    }
    float* here = sums + turn * R::kSums;
    put_sums<kWide, kTall>(here, warp, sum);
    __syncthreads();  // with two turns, the other sums are free once everybody is here again
    end.end(here);
    if (R::kTurns == 1) __syncthreads();
  }
}

template <class Element, int kWide, int kTall, bool kGated>
void run(const void* in, const void* weight, const float* scales, void* out, int64_t rows, int64_t n, int64_t k,
         Form form, cudaStream_t stream) {
  using R = Ring<Element, kWide, kTall>;
  auto* kernel = streamed<Element, kWide, kTall, kGated>;
  static std::atomic<uint64_t> given;
  if (attention::cuda::allow_shared(kernel, R::kBytes, given) != cudaSuccess) return;
  const int tiles = int(n / (kTall * (kGated ? 8 : 16)));
  attention::cuda::launch_early(kernel, dim3(unsigned(std::min(tiles, device().multiprocessors))), kWarps * 32,
                                R::kBytes, stream, static_cast<const __nv_bfloat16*>(in),
                                static_cast<const Element*>(weight), scales, out, int(rows), n, int(k), tiles, form);
}

template <class Element, int kTall, bool kGated>
void (*by_rows(int64_t rows))(const void*, const void*, const float*, void*, int64_t, int64_t, int64_t, Form,
                              cudaStream_t) {
  if constexpr (sizeof(Element) == 2)
    if (rows > 16) return run<Element, 4, kTall, kGated>;
  return rows > 8 ? run<Element, 2, kTall, kGated> : run<Element, 1, kTall, kGated>;
}

template <class Element>
void launch(const void* in, const void* weight, const float* scales, void* out, int64_t rows, int64_t n, int64_t k,
            Form form, cudaStream_t stream) {
  const bool gated = fuses_gates(form), tall = worth_tall(n / (gated ? 8 : 16));
  auto* run = gated  ? tall ? by_rows<Element, 2, true>(rows) : by_rows<Element, 1, true>(rows)
               : tall ? by_rows<Element, 2, false>(rows)
                     : by_rows<Element, 1, false>(rows);
  run(in, weight, scales, out, rows, n, k, form, stream);
}

}  // namespace

bool streamed_takes(int64_t rows, int64_t n, int64_t k, Form form) {
  // Every tile reads all rows again: of many, a library that shares them is faster. And short rows leave warps idle.
  constexpr int64_t kWeights = 4 << 20, kManyFeatures = 65536, kLong = 1024;
  const bool gated = fuses_gates(form);
  return rows <= (n < kManyFeatures ? 32 : 16) && n % (gated ? 8 : 16) == 0 && k % kStepOf<__nv_bfloat16> == 0 &&
         k >= (rows > 8 ? kLong : kWarps * kStepOf<__nv_bfloat16>)&&(gated ? 2 : 1) * n * k >= kWeights &&
         device().shared >= kShared;
}

bool streamed_bytes_takes(int64_t rows, int64_t n, int64_t k, Form form) {
  const bool gated = fuses_gates(form);
  return rows <= 16 && n % (gated ? 8 : 16) == 0 && k % 16 == 0 && device().shared >= kShared;
}

void launch_streamed(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k, Form form,
                     cudaStream_t stream) {
  launch<__nv_bfloat16>(in, weight, nullptr, out, rows, n, k, form, stream);
}

void launch_streamed_bytes(const void* in, const void* weight, const float* scales, void* out, int64_t rows, int64_t n,
                           int64_t k, Form form, cudaStream_t stream) {
  launch<Byte>(in, weight, scales, out, rows, n, k, form, stream);
}

}  // namespace kvasir::model::cuda
