// Words of packed weights (packing.h) taken apart, for those who multiply them.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "attention/cuda/mma.cuh"

namespace kvasir::model::cuda {

// No constant that the compiler sees, or it would take two operations to put this and a mask in.
__device__ inline uint32_t in_register(uint32_t constant) {
  uint32_t r;
  asm("mov.u32 %0, %1;" : "=r"(r) : "r"(constant));
  return r;
}
__device__ inline uint32_t low_nibbles(uint32_t w, int shift, uint32_t magic) {
  uint32_t y;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(y) : "r"(w >> shift), "r"(magic));  // (w & mask) | magic
  return y;
}
__device__ inline float2 pair_of(uint32_t halves) { return __half22float2(reinterpret_cast<const __half2&>(halves)); }
__device__ inline const uint4& at16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ inline uint32_t word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }
__device__ inline const uint2& at8(const uint8_t* p) { return *reinterpret_cast<const uint2*>(p); }

// Four E4M3 as bfloat16: the exponent has its place, and its bias comes by a product that is exact.
__device__ inline void widen_bytes(uint32_t four, uint32_t& low, uint32_t& high) {
  auto pair = [](uint32_t spread) {
    return attention::cuda::pair_mul<attention::cuda::Brain>((spread & 0x80008000u) | (spread >> 4 & 0x07f007f0u),
                                                             0x7b807b80u);
  };
  low = pair(__byte_perm(four, 0, 0x1404)), high = pair(__byte_perm(four, 0, 0x3424));
}

}  // namespace kvasir::model::cuda
