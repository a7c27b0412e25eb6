// Sums and maxima over a warp, the same in each of its lanes.
#pragma once

#include <cuda_runtime_api.h>

namespace kvasir::model::cuda {

constexpr unsigned kAll = 0xffffffffu;

__device__ inline float warp_sum(float v) {
  for (int s = 16; s > 0; s /= 2) v += __shfl_xor_sync(kAll, v, s);
  return v;
}
__device__ inline float warp_max(float v) {
  for (int s = 16; s > 0; s /= 2) v = fmaxf(v, __shfl_xor_sync(kAll, v, s));
  return v;
}

}  // namespace kvasir::model::cuda
