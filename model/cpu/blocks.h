// The block operations of the instruction set that this translation unit is compiled for (simd/simd.h): integers I of
// as many lanes as a vector has, a lane an output row, and
//   kTile: rows of activations that are multiplied together; kAhead, kLocality: how many groups ahead weights are
//     prefetched, and how near (as __builtin_prefetch() has it)
//   kMakesBlocks: W is 8 vectors that stored integers may be made in; else they are made in a buffer (expand.h)
//   two_e4m3(p, first, second): see blocks_portable.h
//   W: the integers of a block of 32 inputs of a vector's rows; load4 (nibbles), load8 (bytes)
//   dot<bits, zero>(W, x, first, count, offset): the sum over chunks [first, first + count) of 4 inputs of weight less
//     zero, given offset = -zero * the sum of the inputs
//   more for row_sums.h
// Nothing here may use a library function that another unit could share: the linker would keep one copy.
#pragma once

#include "simd/simd.h"

#if defined(KVASIR_SIMD_PORTABLE)
#include "model/cpu/blocks_portable.h"
#elif defined(__AVX512VNNI__)
#include "model/cpu/blocks_avx512.h"
#elif defined(__AVX2__)
#include "model/cpu/blocks_avx2.h"
#elif defined(__ARM_NEON)
#include "model/cpu/blocks_neon.h"
#else
#include "model/cpu/blocks_portable.h"
#endif
