// What a gate becomes before it is multiplied.
#pragma once

namespace kvasir::model::cuda {

__device__ inline float silu(float g) { return __fdividef(g, 1.0f + __expf(-g)); }
__device__ inline float gelu_tanh(float g) {
  return 0.5f * g * (1.0f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g)));
}

}  // namespace kvasir::model::cuda
