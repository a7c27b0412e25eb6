// The vector type V of W floats, and its operations, of the instruction set that this translation unit is compiled for.
// Kernels are written once over them and compiled once a set. Everything is in an unnamed namespace: a unit built for a
// wider set must not leave copies of shared code behind that the linker could hand to a processor without it.
#pragma once

#if defined(KVASIR_SIMD_PORTABLE)
#include "simd/portable.h"
#elif defined(__AVX512F__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#elif defined(__ARM_NEON)
#include "simd/neon.h"
#else
#include "simd/portable.h"
#endif

namespace kvasir::simd {
namespace {

// Lane i is the sum, or the greatest, of row i of W rows of W.
inline V sum_rows(const float* rows) { return fold_rows(rows, add); }
inline V max_rows(const float* rows) { return fold_rows(rows, max_v); }

}  // namespace
}  // namespace kvasir::simd
