// Room in shared memory past what every kernel has, which is given to a kernel once on each device.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace kvasir::attention::cuda {

// `given`: on which devices this kernel has it already, a static of the caller's.
template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, int bytes, std::atomic<uint64_t>& given) {
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  const uint64_t bit = uint64_t(1) << (device & 63);
  if (given.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e == cudaSuccess) given.fetch_or(bit, std::memory_order_relaxed);
  return e;
}

}  // namespace kvasir::attention::cuda
