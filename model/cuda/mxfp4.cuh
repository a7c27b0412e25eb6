// MXFP4 as the tensor cores want it: numbers of 4 bits, 32 of a row by one power of two.
#pragma once

#include "attention/cuda/mma.cuh"

namespace kvasir::model::cuda {

// Of sixteen elements of k a lane has, for rows g and g + 8, pairs 2 * tid and 2 * tid + 8: registers of m16n8k16 and
// of wgmma alike, 0 and 2 of row g, 1 and 3 of row g + 8. A pair's first numbers share the lower half of a word, its
// second ones the upper half. There a number's sign and magnitude lie as a bfloat16 has them, 0, 3 and 6 places further
// down for registers 0, 1 and 2; register 3 has what is left: bits 14, 13, 11 and 10.
struct Mxfp4Lane {
  uint4 words;   // for each sixteen of a stage's 64
  uint2 scales;  // bfloat16: of g's two blocks, and of (g + 8)'s; 2^126 times themselves
};

__host__ __device__ constexpr uint32_t mxfp4_bits(int r, uint32_t nibble) {
  const uint32_t sign = nibble >> 3, magnitude = nibble & 7;
  return r < 3 ? sign << (15 - 3 * r) | magnitude << (6 - 3 * r)
               : sign << 14 | (magnitude >> 2) << 13 | (magnitude & 3) << 10;
}

// Registers of the i-th sixteen. A magnitude's three bits become the lowest of a bfloat16's exponent and the highest of
// its mantissa: it is then 2^-126 of itself, also where it is no normal number.
__device__ inline void widen(const Mxfp4Lane& lane, int i, uint32_t* a) {
  using attention::cuda::Brain;
  using attention::cuda::pair_mul;
  constexpr uint32_t kNumber = 0x81c081c0u;
  const uint32_t w = i == 0 ? lane.words.x : i == 1 ? lane.words.y : i == 2 ? lane.words.z : lane.words.w;
  const uint32_t twice = i / 2 == 0 ? 0x1010 : 0x3232;
  const uint32_t low = __byte_perm(lane.scales.x, 0, twice), high = __byte_perm(lane.scales.y, 0, twice);
  a[0] = pair_mul<Brain>(w & kNumber, low);
  a[1] = pair_mul<Brain>(w << 3 & kNumber, high);
  a[2] = pair_mul<Brain>(w << 6 & kNumber, low);
  a[3] = pair_mul<Brain>((w << 1 & 0x80008000u) | (w >> 5 & 0x01000100u) | (w >> 4 & 0x00c000c0u), high);
}

}  // namespace kvasir::model::cuda
