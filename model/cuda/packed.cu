// What reads packed weights but the products of a few rows, and the choice among those (packed_kernel.cuh).
#include <algorithm>

#include "attention/cuda/mma.cuh"
#include "model/cuda/packed.h"
#include "model/cuda/packed_words.cuh"
#include "model/cuda/tile_end.cuh"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::Brain;

constexpr int kShared = 227 << 10;  // bytes of a multiprocessor's shared memory that products want

__device__ float half_of(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
__device__ float element(Packing packing, const uint8_t* weight, int64_t half, int64_t row, int64_t col,
                         int64_t steps) {
  const uint8_t* block = weight + block_at(row / kBlockRows, col / kBlockElements, steps, half) * block_bytes(packing);
  return unpack_one(packing, block, int(row % kBlockRows), int(col % kBlockElements), half_of);
}

// Elements [8 * c, 8 * c + 8) of row r of a block, which are one lane's of a group of 32 or two lanes' of one of 16.
template <Packing kPacking>
__device__ void unpack8(const uint8_t* block, int r, int c, float (&y)[8]) {
  const uint8_t* scales = block + kBlockRows * quant_bytes(kPacking) + r * scale_bytes(kPacking);
  auto word = [](const uint8_t* at) { return *reinterpret_cast<const uint32_t*>(at); };
  if constexpr (kPacking == Packing::q6) {
    const float2 s = pair_of(word(scales + c / 2 * 4));
    const int first = c / 2 % 2 * 2, jj = c / 4;  // of a word's pairs; the word
#pragma unroll
    for (int l = 0; l < 2; ++l) {
      const int t = c % 2 * 2 + l;
      const uint32_t q = word(block + r * 64 + t * 16 + jj * 4) >> first * 4;
      const uint32_t bits = word(block + kBlockRows * 64 + r * 32 + t * 8 + jj / 2 * 4) >> (jj % 2 * 8 + first * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        y[l * 4 + i] =
            s.x * float((q >> (i / 2 * 4 + i % 2 * 16) & 15) | (bits >> (i / 2 * 2 + i % 2 * 16) & 3) << 4) + s.y;
    }
  } else {
    const int j = c / 4, t = c % 4;
    if constexpr (kPacking == Packing::q4 || kPacking == Packing::q4_128) {
      const float2 s = pair_of(word(scales + (kPacking == Packing::q4 ? j * 4 : 0)));
      const uint32_t q = word(block + r * 64 + t * 16 + j * 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = s.x * float(q >> (i / 2 * 4 + i % 2 * 16) & 15) + s.y;
    } else {
      const float d = kPacking == Packing::e4m3 ? *reinterpret_cast<const float*>(scales)
                                                : __half2float(*reinterpret_cast<const __half*>(scales + j * 2));
      const uint2 q = at8(block + j / 2 * kBlockRows * 64 + r * 64 + t * 16 + j % 2 * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto b = uint8_t((i < 4 ? q.x : q.y) >> i % 4 * 8);
        y[i] = d * (kPacking == Packing::e4m3 ? e4m3_number(b) : float(int(b) - 128));
      }
    }
  }
}

constexpr int kUnpackThreads = 256;

template <Packing kPacking>
__global__ void __launch_bounds__(kUnpackThreads)
    unpack(const uint8_t* weight, float unit, int64_t half, __nv_bfloat16* out, int64_t first, int64_t rows, int cols) {
  const int pieces = cols / 8;
  const int64_t at = int64_t(blockIdx.x) * kUnpackThreads + threadIdx.x;
  const int64_t row = first + at / pieces;
  const int piece = int(at % pieces);
  if (row >= first + rows) return;
  float y[8];
  unpack8<kPacking>(weight + block_at(row / kBlockRows, piece / 16, block_count(cols), half) * block_bytes(kPacking),
                    int(row % kBlockRows), piece % 16, y);
  uint4 two;
  two.x = Brain::pack(unit * y[0], unit * y[1]), two.y = Brain::pack(unit * y[2], unit * y[3]);
  two.z = Brain::pack(unit * y[4], unit * y[5]), two.w = Brain::pack(unit * y[6], unit * y[7]);
  reinterpret_cast<uint4*>(out)[at] = two;
}

__global__ void embed_packed(Packing packing, const int32_t* tokens, const int32_t* before, const uint8_t* weight,
                             float by, float* out, int64_t cols) {
  const int32_t named = tokens[blockIdx.x], token = named < 0 ? before[-1 - named] : named;
  for (int64_t i = threadIdx.x; i < cols; i += blockDim.x)
    out[blockIdx.x * cols + i] = by * element(packing, weight, 0, token, i, block_count(cols));
}

}  // namespace

bool packs() { return device().major >= 9 && device().shared >= kShared; }

namespace {

template <Packing kPacking>
struct PackingIs {
  static constexpr Packing packing = kPacking;
};
template <class With>
auto by_packing(Packing packing, With with) {
  switch (packing) {
    case Packing::q4: return with(PackingIs<Packing::q4>());
    case Packing::q4_128: return with(PackingIs<Packing::q4_128>());
    case Packing::q6: return with(PackingIs<Packing::q6>());
    case Packing::e4m3: return with(PackingIs<Packing::e4m3>());
    default: return with(PackingIs<Packing::q8>());
  }
}

// `most` rows at a time.
template <class Launch>
void in_parts(Launch launch, int64_t most, const void* in, const void* weight, float unit, void* out, int64_t rows,
              int64_t n, int64_t k, Form form, cudaStream_t stream) {
  const int64_t row_bytes = form == Form::apart ? 8 * n : form == Form::f32 || form == Form::added_f32 ? 4 * n : 2 * n;
  for (int64_t row = 0; row < rows; row += most)
    launch(static_cast<const __nv_bfloat16*>(in) + row * k, weight, unit, static_cast<uint8_t*>(out) + row * row_bytes,
           std::min(most, rows - row), n, k, form, stream);
}

}  // namespace

void launch_packed(Packing packing, const void* in, const void* weight, float unit, void* out, int64_t rows, int64_t n,
                   int64_t k, Form form, cudaStream_t stream) {
  auto* launch = by_packing(packing, [](auto is) { return launch_few<decltype(is)::packing>; });
  in_parts(launch, kPackedRows, in, weight, unit, out, rows, n, k, form, stream);
}

void launch_packed_many(Packing packing, const void* in, const void* weight, float unit, void* out, int64_t rows,
                        int64_t n, int64_t k, Form form, cudaStream_t stream) {
  auto* launch = by_packing(packing, [](auto is) { return launch_many<decltype(is)::packing>; });
  in_parts(launch, kManyPackedRows, in, weight, unit, out, rows, n, k, form, stream);
}

void launch_unpack(Packing packing, const void* weight, float unit, int64_t half, void* out, int64_t first,
                   int64_t rows, int64_t cols, cudaStream_t stream) {
  auto* kernel = by_packing(packing, [](auto is) { return unpack<decltype(is)::packing>; });
  const int64_t blocks = (rows * cols / 8 + kUnpackThreads - 1) / kUnpackThreads;
  kernel<<<unsigned(blocks), kUnpackThreads, 0, stream>>>(static_cast<const uint8_t*>(weight), unit, half,
                                                          static_cast<__nv_bfloat16*>(out), first, rows, int(cols));
}

void launch_embed_packed(Packing packing, const int32_t* tokens, const int32_t* before, const void* weight, float unit,
                         float scale, float* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  embed_packed<<<unsigned(rows), 256, 0, stream>>>(packing, tokens, before, static_cast<const uint8_t*>(weight),
                                                   unit * scale, out, cols);
}

}  // namespace kvasir::model::cuda
