// out[row][head] (n columns) = in[row][head] (k columns) * weights[head]' : a block has a tile of rows and of 64
// columns of one head, and walks k 64 at a time through a ring of stages in shared memory. Of few rows (16 a tile) the
// weights are what takes time, and each is read once; 64 a tile of more.
#include <cuda_bf16.h>

#include <algorithm>
#include <atomic>

#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/mma.cuh"
#include "attention/cuda/shared_memory.h"
#include "model/cuda/early.cuh"
#include "model/cuda/heads.h"

namespace kvasir::model::cuda {
namespace {

using namespace attention::cuda;

constexpr int kWarps = 4, kCols = 64, kDepth = 64, kStages = 4;  // of a tile: columns of results, and of both inputs
constexpr int kFewRows = 16, kManyRows = 64;

template <int kRows>
struct Tiles {
  static constexpr int kInBytes = kRows * kDepth * 2, kWeightBytes = kCols * kDepth * 2;
  static constexpr int kStageBytes = kInBytes + kWeightBytes;
};

// `rows` rows of 64 columns, swizzled; zeros past the last row and column.
template <int kRows>
__device__ __forceinline__ void load_tile(uint32_t to, const __nv_bfloat16* from, int64_t stride, int64_t rows,
                                          int64_t cols) {
#pragma unroll
  for (int i = 0; i < kRows * 8 / (kWarps * 32); ++i) {
    const int at = i * kWarps * 32 + int(threadIdx.x), row = at / 8, chunk = at % 8;
    const bool live = row < rows && chunk * 8 < cols;
    copy16(to + row * 128 + ((chunk ^ (row & 7)) * 16), live ? from + row * stride + chunk * 8 : from, live);
  }
}

// Where a lane's part of four 8 x 8 matrices begins: 16 rows from `row`, the chunks `chunk` and `chunk` + 1.
__device__ __forceinline__ uint32_t matrix_at(uint32_t tile, int row, int chunk, int lane) {
  const int r = row + lane % 16, c = chunk + lane / 16;
  return tile + r * 128 + ((c ^ (r & 7)) * 16);
}

template <int kRows>
__global__ void __launch_bounds__(kWarps * 32)
    products_kernel(const __grid_constant__ HeadRows in, const __nv_bfloat16* weights,
                    const __grid_constant__ HeadRows out, int64_t rows, int n, int k) {
  using Tile = Tiles<kRows>;
  // Few rows: warps side by side; many: one above the other.
  constexpr int kWarpCols = kRows == kFewRows ? kCols / kWarps : kCols, kN = kWarpCols / 8;
  extern __shared__ __align__(1024) uint8_t shared[];
  let_next_kernel_start();
  const int head = blockIdx.x, col = blockIdx.y * kCols, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.z) * kRows;
  const auto* x = static_cast<const __nv_bfloat16*>(in.data) + row * in.cols + in.pieces.first + head * in.pieces.step;
  const auto* w = weights + (int64_t(head) * n + col) * k;
  const int steps = (k + kDepth - 1) / kDepth;
  const uint32_t ring = shared_address(shared);
  auto stage = [&](int step) { return ring + step % kStages * Tile::kStageBytes; };
  auto load_weights = [&](int step) {
    if (step < steps) load_tile<kCols>(stage(step) + Tile::kInBytes, w + step * kDepth, k, n - col, k - step * kDepth);
  };
  auto load_rows = [&](int step) {
    if (step < steps) load_tile<kRows>(stage(step), x + step * kDepth, in.cols, rows - row, k - step * kDepth);
  };
  // Weights are there since long before the previous kernel.
  for (int s = 0; s < kStages - 1; ++s) load_weights(s);
  wait_for_previous_kernel();
  for (int s = 0; s < kStages - 1; ++s) load_rows(s), copies_commit();

  const int first_row = kRows == kFewRows ? 0 : warp * 16, first_col = kRows == kFewRows ? warp * kWarpCols : 0;
  float sum[kN][4] = {};
  for (int step = 0; step < steps; ++step) {
    copies_wait<kStages - 2>();
    __syncthreads();
    load_weights(step + kStages - 1), load_rows(step + kStages - 1), copies_commit();
    const uint32_t a_tile = stage(step), b_tile = a_tile + Tile::kInBytes;
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) {
      uint32_t a[4];
      load_matrices(a, matrix_at(a_tile, first_row, i * 2, lane));
#pragma unroll
      for (int j = 0; j < kN; j += 2) {
        uint32_t b[4];  // two columns of eight: their first and their second eight of depth
        load_matrices(b, matrix_at(b_tile, first_col + j * 8, i * 2, lane));
        Brain::mma(sum[j], a, b[0], b[2]);
        Brain::mma(sum[j + 1], a, b[1], b[3]);
      }
    }
  }
  auto* y = static_cast<__nv_bfloat16*>(out.data) + out.pieces.first + head * out.pieces.step;
#pragma unroll
  for (int j = 0; j < kN; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t r = row + first_row + lane / 4 + h * 8;
      const int c = col + first_col + j * 8 + lane % 4 * 2;
      if (r < rows && c < n)
        *reinterpret_cast<__nv_bfloat162*>(y + r * out.cols + c) =
            __floats2bfloat162_rn(sum[j][h * 2], sum[j][h * 2 + 1]);
    }
}

// Whatever the shapes.
__global__ void any_products_kernel(HeadRows in, const __nv_bfloat16* weights, HeadRows out, int64_t rows,
                                    int64_t heads, int n, int k) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, head = i / n, col = i % n;
  if (head >= heads) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const auto* x =
        static_cast<const __nv_bfloat16*>(in.data) + row * in.cols + in.pieces.first + head * in.pieces.step;
    const auto* w = weights + i * k;
    float sum = 0;
    for (int j = 0; j < k; ++j) sum += __bfloat162float(x[j]) * __bfloat162float(w[j]);
    static_cast<__nv_bfloat16*>(out.data)[row * out.cols + out.pieces.first + head * out.pieces.step + col] =
        __float2bfloat16_rn(sum);
  }
}

// kWide columns a thread.
template <class In, int kWide>
__global__ void copy_kernel(HeadRows in, HeadRows out, int64_t rows, int cols, int64_t count) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, each = cols / kWide;
  const int64_t piece = i / each, col = i % each * kWide;
  if (piece >= count) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const In* x = static_cast<const In*>(in.data) + row * in.cols + in.pieces.first + piece * in.pieces.step + col;
    auto* y = static_cast<__nv_bfloat16*>(out.data) + row * out.cols + out.pieces.first + piece * out.pieces.step + col;
    __nv_bfloat16 turned[kWide];
#pragma unroll
    for (int e = 0; e < kWide; ++e) turned[e] = __nv_bfloat16(x[e]);
    if constexpr (kWide == 4)
      *reinterpret_cast<uint2*>(y) = *reinterpret_cast<const uint2*>(turned);
    else
      y[0] = turned[0];
  }
}

unsigned rows_of_grid(int64_t rows) { return unsigned(std::min<int64_t>(rows, 65535)); }

bool multiples(const HeadRows& r, int64_t of) {
  return r.cols % of == 0 && r.pieces.first % of == 0 && r.pieces.step % of == 0;
}

template <int kRows>
void launch_products(const HeadRows& in, const void* weights, const HeadRows& out, int64_t rows, int64_t heads,
                     int64_t n, int64_t k, cudaStream_t stream) {
  constexpr int kBytes = kStages * Tiles<kRows>::kStageBytes;
  static std::atomic<uint64_t> given{0};
  if (allow_shared(products_kernel<kRows>, kBytes, given) != cudaSuccess) return;
  const dim3 grid(unsigned(heads), unsigned((n + kCols - 1) / kCols), unsigned((rows + kRows - 1) / kRows));
  attention::cuda::launch_early(products_kernel<kRows>, grid, kWarps * 32, kBytes, stream, in,
                                static_cast<const __nv_bfloat16*>(weights), out, rows, int(n), int(k));
}

}  // namespace

void launch_head_products(const HeadRows& in, const void* weights, const HeadRows& out, int64_t rows, int64_t heads,
                          int64_t n, int64_t k, cudaStream_t stream) {
  if (rows == 0) return;
  if (!multiples(in, 8) || !multiples(out, 2) || k % 8 != 0 || n % 2 != 0) {
    const auto blocks = unsigned((heads * n + 127) / 128);
    attention::cuda::launch_early(any_products_kernel, dim3(blocks, rows_of_grid(rows)), 128, 0, stream, in,
                                  static_cast<const __nv_bfloat16*>(weights), out, rows, heads, int(n), int(k));
    return;
  }
  const auto run = rows <= kFewRows ? launch_products<kFewRows> : launch_products<kManyRows>;
  run(in, weights, out, rows, heads, n, k, stream);
}

void launch_copy_pieces(const HeadRows& in, bool half, const HeadRows& out, int64_t rows, int64_t cols, int64_t count,
                        cudaStream_t stream) {
  if (rows == 0) return;
  const bool wide = cols % 4 == 0 && multiples(in, 4) && multiples(out, 4);
  const auto blocks = unsigned((count * cols / (wide ? 4 : 1) + 127) / 128);
  auto* kernel = half   ? wide ? copy_kernel<__nv_bfloat16, 4> : copy_kernel<__nv_bfloat16, 1>
                   : wide ? copy_kernel<float, 4>
                        : copy_kernel<float, 1>;
  attention::cuda::launch_early(kernel, dim3(blocks, rows_of_grid(rows)), 128, 0, stream, in, out, rows, int(cols),
                                count);
}

}  // namespace kvasir::model::cuda
