// What this machine can do at most, measured in the same run: reads from memory and float32 FMAs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir::bench {

// Reads all of it with the widest vectors there are; the value keeps the loop from being dropped.
uint64_t read_all(const void* data, size_t bytes);
// `rounds` rounds of independent FMAs; returns the floating-point operations done.
double fma_rounds(int64_t rounds, float* sink);

// The instruction set both of them use: KVASIR_ISA, or the widest there is.
const char* simd_name();

// Seconds of processor time of the calling thread: what a shared machine leaves comparable.
double thread_seconds();

}  // namespace kvasir::bench
