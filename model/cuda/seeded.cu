#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "core/dtype.h"
#include "model/cuda/seeded.h"

namespace kvasir::model::cuda {
namespace {

constexpr int kThreads = 256;

// model/philox.h with the same keys and counters.
__device__ uint4 random_words(uint64_t counter, uint64_t stream, uint64_t seed) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = uint32_t(stream), c3 = uint32_t(stream >> 32);
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t a = __umulhi(0xD2511F53u, c0), a_low = 0xD2511F53u * c0;
    const uint32_t b = __umulhi(0xCD9E8D57u, c2), b_low = 0xCD9E8D57u * c2;
    c0 = b ^ c1 ^ k0, c1 = b_low, c2 = a ^ c3 ^ k1, c3 = a_low;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {c3, c2, c1, c0};  // in the order in which they are taken
}

__device__ float uniform_in(uint32_t word, float spread) {
  return (float(int32_t(word >> 8) - (1 << 23)) + 0.5f) * 0x1p-23f * spread;
}

// A thread makes what four random words make.
__global__ void seeded(WeightType type, Seeded from, float step, float least, __nv_bfloat16* out, int64_t count) {
  const int64_t counter = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const uint4 r = random_words(uint64_t(counter), from.stream, from.seed);
  const uint32_t words[4] = {r.x, r.y, r.z, r.w};
  auto put = [&](int64_t at, float v) {
    if (at < count) out[at] = __float2bfloat16_rn(v);
  };
  if (type == WeightType::q8_0) {
    for (int i = 0; i < 16; ++i) put(counter * 16 + i, step * float(int8_t(words[i / 4] >> i % 4 * 8)));
  } else if (type == WeightType::q4_0 || type == WeightType::q4_1 || type == WeightType::int4) {
    for (int i = 0; i < 32; ++i) {
      const float q = float(words[i % 16 / 4] >> (i % 4 * 8 + i / 16 * 4) & 15);
      put(counter * 32 + i, __fadd_rn(__fmul_rn(step, type == WeightType::q4_1 ? q : q - 8), least));
    }
  } else {
    for (int i = 0; i < 4; ++i) {
      const float v = uniform_in(words[i], from.spread);
      put(counter * 4 + i, type == WeightType::f16 ? __half2float(__float2half_rn(v)) : v);
    }
  }
}

// Of a part of a tensor: a thread makes one element, wherever it lies among those that the same words make.
__global__ void seeded_part(WeightType type, Seeded from, float step, float least, __nv_bfloat16* out, int64_t rows,
                            int64_t cols) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= rows * cols) return;
  const int64_t whole = (from.row + at / cols) * from.whole_cols + from.col + at % cols;
  const bool eight = type == WeightType::q8_0,
             four = type == WeightType::q4_0 || type == WeightType::q4_1 || type == WeightType::int4;
  const int each = eight ? 16 : four ? 32 : 4, i = int(whole % each);
  const uint4 r = random_words(uint64_t(whole / each), from.stream, from.seed);
  const uint32_t words[4] = {r.x, r.y, r.z, r.w};
  float v;
  if (eight) {
    v = step * float(int8_t(words[i / 4] >> i % 4 * 8));
  } else if (four) {
    const float q = float(words[i % 16 / 4] >> (i % 4 * 8 + i / 16 * 4) & 15);
    v = __fadd_rn(__fmul_rn(step, type == WeightType::q4_1 ? q : q - 8), least);
  } else {
    v = uniform_in(words[i], from.spread);
    if (type == WeightType::f16) v = __half2float(__float2half_rn(v));
  }
  out[at] = __float2bfloat16_rn(v);
}

// A thread makes 32 elements of a row, which have the same d and m (bits of float16).
__global__ void seeded_blocks(Packing packing, Seeded from, uint16_t d, uint16_t m, uint8_t* out, int64_t half,
                              int64_t first, int64_t rows, int64_t groups) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (thread >= rows * groups) return;
  const int64_t row = first + thread / groups, group = thread % groups;
  const int64_t whole_groups = from.whole_cols > 0 ? from.whole_cols / 32 : groups;
  const int64_t at = (from.row + thread / groups) * whole_groups + from.col / 32 + group;
  uint8_t q[32];
  if (packing == Packing::q8) {
    for (int half = 0; half < 2; ++half) {
      const uint4 r = random_words(uint64_t(at * 2 + half), from.stream, from.seed);
      const uint32_t words[4] = {r.x, r.y, r.z, r.w};
      for (int i = 0; i < 16; ++i) q[half * 16 + i] = uint8_t(words[i / 4] >> i % 4 * 8) ^ 0x80;
    }
  } else {
    const uint4 r = random_words(uint64_t(at), from.stream, from.seed);
    const uint32_t words[4] = {r.x, r.y, r.z, r.w};
    for (int i = 0; i < 32; ++i) q[i] = words[i % 16 / 4] >> (i % 4 * 8 + i / 16 * 4) & 15;
  }
  const int64_t blocks = block_count(groups * 32);
  pack32(packing, out + block_at(row / kBlockRows, group / 4, blocks, half) * block_bytes(packing),
         int(row % kBlockRows), int(group % 4), q, &d, &m);
}

}  // namespace

float seeded_unit(const HostTensor& t) { return std::exp2(std::ceil(std::log2(t.seeded->spread)) - 14); }

void launch_seeded_blocks(const HostTensor& t, Packing packing, float unit, int64_t half_strips, void* out,
                          int64_t first, cudaStream_t stream) {
  auto half = [](float x) { return f16_to_f32(f32_to_f16(x)); };
  const float step = t.seeded->spread / (packing == Packing::q8 ? 127.0f : 8.0f), d = half(step);
  const float m = packing == Packing::q8 ? 0 : t.type == WeightType::q4_1 ? half(-7.5f * step) : -8 * d;
  const int64_t groups = t.cols / 32, threads = t.rows * groups;
  seeded_blocks<<<unsigned((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      packing, *t.seeded, f32_to_f16(d / unit), f32_to_f16(m / unit), static_cast<uint8_t*>(out), half_strips, first,
      t.rows, groups);
}

void launch_seeded(const HostTensor& t, void* out, cudaStream_t stream) {
  const int64_t count = t.rows * t.cols;
  const bool eight = t.type == WeightType::q8_0,
             four = t.type == WeightType::q4_0 || t.type == WeightType::q4_1 || t.type == WeightType::int4;
  const int64_t threads = (count + (eight ? 15 : four ? 31 : 3)) / (eight ? 16 : four ? 32 : 4);
  auto half = [](float x) { return f16_to_f32(f32_to_f16(x)); };
  const float step = t.seeded->spread / (eight ? 127.0f : 8.0f);
  const float least = t.type == WeightType::q4_1 ? half(-7.5f * step) : 0.0f;
  auto* to = static_cast<__nv_bfloat16*>(out);
  if (t.seeded->whole_cols > 0) {
    seeded_part<<<unsigned((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(t.type, *t.seeded, half(step),
                                                                                      least, to, t.rows, t.cols);
    return;
  }
  seeded<<<unsigned((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(t.type, *t.seeded, half(step), least,
                                                                                 to, count);
}

}  // namespace kvasir::model::cuda
