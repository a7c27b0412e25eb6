// Prefill and extend in FP8 on Hopper: inputs and cache E4M3, heads of 64 and 128, the rest as in prefill.cuh. The
// whole of a sequence is read back from its pages once: K row by row, V transposed, because the matrix units want the
// contracted index of 8-bit operands innermost. Within sixteen keys V lies in the order in which the scores of one
// multiplication become the weights of the next, so those never leave their registers. What a weight is as E4M3 is read
// off its logarithm, after a row's first tile: no exponential and no conversion is needed for it.
#include "attention/cuda/prefill8.h"

#include "attention/cuda/prefill_launch.cuh"

namespace kvasir::attention::cuda {
namespace {

constexpr int kGatherTokens = 64;

// A block takes 64 tokens of one kv head: K to [rows, kv_heads, D], V to [kv_heads, D, columns].
template <int kHeadDim>
__global__ void __launch_bounds__(128)
    gather8_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v,
                   const __grid_constant__ CacheLayer c, uint8_t* k_out, uint8_t* v_out, int64_t columns) {
  __shared__ uint32_t values[kGatherTokens][kHeadDim / 4 + 1];
  let_next_kernel_start();
  if (int(blockIdx.y) >= v.counts[kCountSequences]) return;
  const DeviceSequence seq = v.sequences[blockIdx.y];
  if (seq.gathered < 0) return;
  const int head = blockIdx.z;
  for (int first = blockIdx.x * kGatherTokens; first < seq.kv_len; first += gridDim.x * kGatherTokens) {
    constexpr int kTurns = kGatherTokens * kHeadDim / 16 / 128, kStep = 128 / (kHeadDim / 16);
    const int row = threadIdx.x / (kHeadDim / 16), piece = threadIdx.x % (kHeadDim / 16);
    uint4 key[kTurns], value[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int t = first + row + i * kStep;
      // What no query of this step sees is not read (its page may be gone).
      const bool unseen = s.window > 0 && t >= s.sinks && t < seq.start_pos - (s.window - s.sinks) + 1;
      key[i] = value[i] = {};
      if (t < seq.kv_len && !unseen) {
        const int64_t at = read_place(s, v, blockIdx.y, t) * c.token + head * c.head + piece * 16;
        key[i] = *reinterpret_cast<const uint4*>(c.key + at);
        value[i] = *reinterpret_cast<const uint4*>(c.value + at);
      }
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int t = first + row + i * kStep;
      if (t < seq.kv_len)
        *reinterpret_cast<uint4*>(k_out + ((int64_t(seq.gathered) + t) * s.kv_heads + head) * kHeadDim + piece * 16) =
            key[i];
      uint32_t* to = &values[row + i * kStep][piece * 4];
      to[0] = value[i].x, to[1] = value[i].y, to[2] = value[i].z, to[3] = value[i].w;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kHeadDim * kGatherTokens / 16; i += 128) {
      const int d = i % kHeadDim, sixteen = i / kHeadDim * 16;
      if (first + sixteen < seq.kv_len) {
        auto byte = [&](int row) { return values[sixteen + row][d / 4] >> (d % 4) * 8 & 255; };
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          w[k] = byte(2 * k) | byte(2 * k + 1) << 8 | byte(8 + 2 * k) << 16 | byte(9 + 2 * k) << 24;
        *reinterpret_cast<uint4*>(v_out + (int64_t(head) * kHeadDim + d) * columns + seq.gathered + first + sixteen) = {
            w[0], w[1], w[2], w[3]};
      }
    }
    __syncthreads();
  }
}

// A weight's logarithm on its way to E4M3: eight times log2 (there are eight steps an octave, and between powers of two
// E4M3 is a straight line itself), counted from where a byte would be kLow below zero, so that what rounds to no weight
// is clamped for nothing. Two lie side by side, in float16.
constexpr float kLow = 18.0f;
__host__ __device__ constexpr float log_of_power(float power) {  // less what the line lies above on the average
  return (power + 7.0f) * 8.0f + kLow - 0.45f;
}
constexpr float kFirst = 6.0f;  // a row's maximum weighs 2^6, of E4M3's 448
constexpr float kMost = log_of_power(kFirst);

__device__ inline uint32_t pack_halves(float x0, float x1) {  // below zero: zero
  uint32_t y;
  asm("cvt.rn.relu.f16x2.f32 %0, %2, %1;" : "=r"(y) : "f"(x0), "f"(x1));
  return y;
}
// Bytes 0 and 2 of the result are the weights: u - 18 where that is more than u / 4, which takes the place of E4M3's
// smallest numbers (these are no longer eight an octave), rounded by adding 1024.
__device__ inline uint32_t weights_of_pair(uint32_t logs) {
  uint32_t y;
  asm("{.reg .b32 more, sum; fma.rn.relu.f16x2 more, %1, %2, %3; fma.rn.f16x2 sum, %1, %4, more; "
      "add.rn.f16x2 %0, sum, %5;}"
      : "=r"(y)
      : "r"(logs), "r"(0x3a003a00u), "r"(0xcc80cc80u), "r"(0x34003400u), "r"(0x64006400u));
  return y;
}

template <int kHeadDim>
struct Eight {
  using T = Brain;  // of results
  static constexpr int kD = kHeadDim, kBytes = 1, kStages = 3, kChains = 4;
  static constexpr int kSums = 4,
                       kOnes = 8 * kTileKeys;  // rows of ones behind the values: their product sums the weights
  static constexpr bool kTurns = false, kLogs = true, kGathered = true, kStores = false, kWarpWide = true;
  static constexpr float kShift = kFirst;
  struct Maps {
    CUtensorMap q, k, v, out;
  };
  __device__ static float score_unit(const Shape& s, const Layer& l) { return s.scale * l.cache.k_scale; }
  __device__ static float value_unit(const Layer& l) { return l.cache.v_scale; }

  __device__ static void add_ones(uint8_t* values) {
    for (int i = threadIdx.x; i < kOnes / 4; i += 384)
      reinterpret_cast<uint32_t*>(values + kD * kTileKeys)[i] = 0x38383838u;
  }

  __device__ static void load_queries(uint8_t* to, const Maps& maps, int head, int row, uint64_t* full) {
    load_tile(to, &maps.q, 0, head, row, full);
  }
  __device__ static const CUtensorMap* keys(const Maps& maps, bool) { return &maps.k; }
  __device__ static const CUtensorMap* values(const Maps& maps, bool) { return &maps.v; }
  __device__ static void load_keys(uint8_t* to, const CUtensorMap* map, int head, int row, uint64_t* full) {
    load_tile(to, map, 0, head, row, full);
  }
  __device__ static void load_values(uint8_t* to, const CUtensorMap* map, int head, int row, uint64_t* full) {
    load_tile(to, map, row, 0, head, full);
  }

  __device__ static float base_of_logs(float most) { return fmaxf(most, -1e30f) * 8.0f - kMost; }
  __device__ static uint32_t pack_logs(float x0, float x1) { return pack_halves(x0, x1); }
  __device__ static uint32_t weights_of(uint32_t logs) { return weights_of_pair(logs); }
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    const __half2 y = __hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const uint32_t&>(y);
  }
  // How far a row's logarithms may grow before its maximum moves: to the largest that E4M3 has, 448, but not where one
  // weight would be more than a sixteenth of the row's sum so far: as the maximum it is exact, else it is rounded.
  static constexpr float kFirstLimit = kMost + 0.2f, kMostLog = 143.75f;
  __device__ static float limit(float sum) {
    float log;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(sum));
    return fminf(fmaxf(log * 8.0f + log_of_power(-4.0f), kFirstLimit), kMostLog);
  }
  __device__ static float log_of(uint32_t rows, int row) {
    const __half2 x = reinterpret_cast<const __half2&>(rows);
    return row == 0 ? __low2float(x) : __high2float(x);
  }
  // What logarithms have over a maximum's, for `lower` to take off where it was the larger.
  __device__ static uint32_t excess(uint32_t logs) {
    const __half2 y =
        __hfma2_relu(reinterpret_cast<const __half2&>(logs), __float2half2_rn(1.0f), __float2half2_rn(-kMost));
    return reinterpret_cast<const uint32_t&>(y);
  }
  __device__ static uint32_t lower(uint32_t logs, uint32_t less) {
    const __half2 y = __hfma2_relu(reinterpret_cast<const __half2&>(less), __float2half2_rn(-1.0f),
                                   reinterpret_cast<const __half2&>(logs));
    return reinterpret_cast<const uint32_t&>(y);
  }
  __device__ static void join(const float (&score)[kTileKeys / 2], uint32_t (&weights)[kTileKeys / 8]) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 8; ++i) {
      const float* x = score + (i / 2) * 8 + (i % 2) * 2;
      weights[i] = __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[4]), 0x6420);
    }
  }
  __device__ static void multiply_keys(float (&score)[kTileKeys / 2], uint64_t q, uint64_t k) {
#pragma unroll
    for (int i = 0; i < kD / 32; ++i) wgmma_tiles8(score, further(q, i * 2), further(k, i * 2), i > 0);
  }
  __device__ static void multiply_values(float (&out)[kD / 2 + kSums], const uint32_t* weights, uint32_t values) {
    const uint64_t elements = rows_descriptor(values);
#pragma unroll
    for (int i = 0; i < kTileKeys / 32; ++i) wgmma_weights8(out, weights + i * 4, further(elements, i * 2));
  }
  // A row's first tile, which may be all that it sees: each weight to its nearest.
  __device__ static void pack(const float (&score)[kTileKeys / 2], uint32_t (&weights)[kTileKeys / 8]) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 8; ++i) {  // columns of tiles 2 * (i / 2) and the next, rows g and g + 8 in turn
      const float* x = score + (i / 2) * 8 + (i % 2) * 2;
      asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
          "mov.b32 %0, {low, high};}"
          : "=r"(weights[i])
          : "f"(x[0]), "f"(x[1]), "f"(x[4]), "f"(x[5]));
    }
  }
};

// Three dimensions of bytes, as boxes of 128 x 128, or as high as the middle one is. What a row lacks of 128 is zeros.
bool encode(CUtensorMap* map, const void* base, cuuint64_t inner, cuuint64_t middle, cuuint64_t outer,
            bool middle_in_box) {
  const cuuint64_t sizes[3] = {inner, middle, outer}, strides[2] = {inner, inner * middle};
  const cuuint32_t box[3] = {128, middle_in_box ? cuuint32_t(middle) : 1u, middle_in_box ? 1u : 128u},
                   ones[3] = {1, 1, 1};
  return encode_function()(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(base), sizes, strides, box, ones,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool prefill8_supports(const Shape& s, const CacheLayer& c, int compute_capability) {
  // Queries that come as E4M3 are read as they lie; others are rotated and rounded by append.
  const bool queries = s.io == DType::f8_e4m3 ? s.rope_style == 0 && !s.packed : s.fp8_query && s.io == DType::bf16;
  return compute_capability == 90 && (s.head_dim == 64 || s.head_dim == 128) && queries && c.dtype == DType::f8_e4m3 &&
         !s.streaming && s.cyclic == 0 && c.token % 16 == 0 && c.head % 16 == 0 && encode_function() != nullptr;
}

void launch_gather8(const Shape& s, const StepView& v, const Layer& l, int64_t old_rows, int64_t sequences,
                    cudaStream_t stream) {
  const int blocks = sequences >= 64 ? 8 : sequences >= 8 ? 32 : 256;
  auto* kernel = s.head_dim == 64 ? gather8_kernel<64> : gather8_kernel<128>;
  kernel<<<dim3(blocks, int(sequences), s.kv_heads), 128, 0, stream>>>(s, v, l.cache, static_cast<uint8_t*>(l.k_old),
                                                                       static_cast<uint8_t*>(l.v_old), old_rows);
}

namespace {

template <int kHeadDim>
cudaError_t launch(const Shape& s, const StepView& v, const Layer& l, const PrefillTile* tiles, int64_t count,
                   const TileQueue& queue, int64_t query_rows, int64_t old_rows, int multiprocessors,
                   cudaStream_t stream) {
  using M = Eight<kHeadDim>;
  typename M::Maps maps = {};
  if (!encode(&maps.q, l.q8 ? l.q8 : l.query, kHeadDim, cuuint64_t(s.heads), cuuint64_t(query_rows), false) ||
      !encode(&maps.k, l.k_old, kHeadDim, cuuint64_t(s.kv_heads), cuuint64_t(old_rows), false) ||
      !encode(&maps.v, l.v_old, cuuint64_t(old_rows), kHeadDim, cuuint64_t(s.kv_heads), true))
    return cudaErrorInvalidValue;
  return launch_tiles<M>(maps, s, v, l, tiles, count, queue, query_rows, multiprocessors, stream);
}

}  // namespace

cudaError_t launch_prefill8(const Shape& s, const StepView& v, const Layer& l, const PrefillTile* tiles, int64_t count,
                            const TileQueue& queue, int64_t query_rows, int64_t old_rows, int multiprocessors,
                            cudaStream_t stream) {
  return (s.head_dim == 64 ? launch<64> : launch<128>)(s, v, l, tiles, count, queue, query_rows, old_rows,
                                                       multiprocessors, stream);
}

}  // namespace kvasir::attention::cuda
