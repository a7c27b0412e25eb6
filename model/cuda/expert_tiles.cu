// Experts cut into tiles (expert_tiles.h) as their weights are loaded.
#include <cuda_bf16.h>

#include "model/cuda/expert_tiles.h"
#include "model/cuda/mxfp4.cuh"

namespace kvasir::model::cuda {
namespace {

// An atom a block of 64 threads: sixteen bytes each.
__global__ void to_tiles(const __nv_bfloat16* in, uint8_t* out, int64_t rows, int64_t cols, bool gated, int64_t steps) {
  const int64_t atom = blockIdx.x % (kTileRows / kAtomRows), step = blockIdx.x / (kTileRows / kAtomRows) % steps;
  const int64_t tile = blockIdx.x / (kTileRows / kAtomRows) / steps;
  const int r = int(threadIdx.x) / 8, chunk = int(threadIdx.x) % 8;
  const int64_t group = tile * (kTileRows / kAtomRows) + atom;  // of eight rows
  const int64_t row = gated ? (group % 2) * (rows / 2) + group / 2 * kAtomRows + r : group * kAtomRows + r;
  const bool there = gated ? group / 2 * kAtomRows + r < rows / 2 : row < rows;
  __nv_bfloat16 values[8];
  for (int i = 0; i < 8; ++i) {
    const int64_t col = step * kTileCols + chunk * 8 + i;
    values[i] = there && col < cols ? in[row * cols + col] : __float2bfloat16_rn(0.0f);
  }
  uint8_t* to = out + int64_t(blockIdx.x) * kAtomBytes + r * 128 + (chunk ^ r) * 16;
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(values);
}

// A tile a block: thread 32 * strip + lane writes its lane's sixteen bytes.
__global__ void __launch_bounds__(256) to_tiles4(const uint8_t* in, uint8_t* out, int64_t rows, int64_t cols,
                                                 bool gated, int64_t steps, int32_t* too_large) {
  constexpr int kBlock = 17, kElements = 32;  // a scale, then elements j and j + 16 in a byte
  const int64_t step = blockIdx.x % steps, tile = blockIdx.x / steps;
  const int strip = int(threadIdx.x) / 32, g = int(threadIdx.x) % 32 / 4, tid = int(threadIdx.x) % 4;
  const int64_t strips = tile * (kTileRows / kStripRows) + strip;
  auto block_of = [&](bool second, int64_t col) -> const uint8_t* {  // of row g, or g + 8
    const int64_t half = gated ? rows / 2 : rows, row = gated ? strips * 8 + g : strips * 16 + g + second * 8;
    if (row >= half || col >= cols) return nullptr;
    return in + ((gated && second ? half + row : row) * (cols / kElements) + col / kElements) * kBlock;
  };
  uint32_t words[4] = {};
  for (int i = 0; i < 4; ++i)
    for (int r = 0; r < 4; ++r)
      for (int e = 0; e < 2; ++e) {
        const int64_t col = step * kTileCols + i * 16 + tid * 2 + r / 2 * 8 + e;
        const uint8_t* block = block_of(r % 2 != 0, col);
        const int j = int(col % kElements);
        const uint32_t nibble = block ? block[1 + j % 16] >> (j / 16 * 4) & 15 : 0;
        words[i] |= mxfp4_bits(r, nibble) << (16 * e);
      }
  uint8_t* to = out + int64_t(blockIdx.x) * kTileBytes4;
  *reinterpret_cast<uint4*>(to + strip * kStripBytes + int(threadIdx.x) % 32 * 16) =
      make_uint4(words[0], words[1], words[2], words[3]);
  // Thread tid of a pair of rows writes one of its four scales. A block's byte is a float32's exponent.
  const uint8_t* block = block_of(tid / 2 != 0, step * kTileCols + tid % 2 * kElements);
  const int exponent = (block ? block[0] : 0) + 126;
  if (exponent > 254) *too_large = 1;
  auto* scales = reinterpret_cast<uint16_t*>(to + kTileScales + strip * kStripScales);
  scales[g * 4 + tid] = uint16_t(exponent << 7);
}

}  // namespace

void launch_expert_tiles(const void* from, const ExpertMatrix& to, int64_t expert, int32_t* too_large,
                         cudaStream_t stream) {
  auto* out = static_cast<uint8_t*>(const_cast<void*>(to.tiles)) + expert * to.bytes();
  if (to.mxfp4) {
    to_tiles4<<<unsigned(to.bytes() / kTileBytes4), 256, 0, stream>>>(static_cast<const uint8_t*>(from), out, to.rows,
                                                                      to.cols, to.gated, to.steps(), too_large);
    return;
  }
  to_tiles<<<unsigned(to.bytes() / kAtomBytes), 64, 0, stream>>>(static_cast<const __nv_bfloat16*>(from), out, to.rows,
                                                                 to.cols, to.gated, to.steps());
}

}  // namespace kvasir::model::cuda
