// Rows of q on their way into the matrix units, and rows of results on their way out of them.
#pragma once

#include "attention/cuda/device.cuh"
#include "attention/cuda/mma.cuh"

namespace kvasir::attention::cuda {

// A row of q over the four lanes that share it, bfloat16 to float16: carried with a power of two of its own, so
// that nothing overflows and next to nothing underflows. Gives that power.
template <int kN>
__device__ inline float brain_to_half(uint32_t (&raw)[kN][2]) {
  float big = 0.0f;
#pragma unroll
  for (int i = 0; i < kN * 2; ++i) {
    const uint32_t w = raw[i / 2][i % 2];
    big = fmaxf(big, fmaxf(fabsf(__uint_as_float(w << 16)), fabsf(__uint_as_float(w & 0xffff0000u))));
  }
  big = fmaxf(big, __shfl_xor_sync(0xffffffffu, big, 1));
  big = fmaxf(big, __shfl_xor_sync(0xffffffffu, big, 2));
  const uint32_t exponent = __float_as_uint(big) & 0x7f800000u;
  const float unit = exponent > 0x01000000u && exponent < 0x7e000000u ? __uint_as_float(exponent) : 1.0f;
  const float inverse = 1.0f / unit;
#pragma unroll
  for (int i = 0; i < kN * 2; ++i) {
    uint32_t& w = raw[i / 2][i % 2];
    w = Half::pack(__uint_as_float(w << 16) * inverse, __uint_as_float(w & 0xffff0000u) * inverse);
  }
  return unit;
}

// kN elements side by side, as wide as they go.
template <int kN>
struct Run {
  float x[kN];
};
template <int kN>
__device__ inline void store_run(void* base, DType type, int64_t i, const Run<kN>& v) {
  if (type == DType::f32) {
    float* p = static_cast<float*>(base) + i;
    if constexpr (kN == 2) *reinterpret_cast<float2*>(p) = {v.x[0], v.x[1]};
    if constexpr (kN == 4) *reinterpret_cast<float4*>(p) = {v.x[0], v.x[1], v.x[2], v.x[3]};
  } else if (type == DType::f8_e4m3) {
    for (int k = 0; k < kN; ++k) store_float(base, type, i + k, v.x[k]);
  } else {
    uint32_t w[kN / 2];
#pragma unroll
    for (int k = 0; k < kN / 2; ++k)
      w[k] = type == DType::f16 ? Half::pack(v.x[k * 2], v.x[k * 2 + 1]) : Brain::pack(v.x[k * 2], v.x[k * 2 + 1]);
    uint16_t* p = static_cast<uint16_t*>(base) + i;
    if constexpr (kN == 2) *reinterpret_cast<uint32_t*>(p) = w[0];
    if constexpr (kN == 4) *reinterpret_cast<uint2*>(p) = {w[0], w[1]};
  }
}

}  // namespace kvasir::attention::cuda
