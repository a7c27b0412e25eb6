// Launches that may begin before the previous kernel has ended: each waits in the kernel for it.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/cuda/device.cuh"

namespace kvasir::model::cuda {

using attention::cuda::let_next_kernel_start;
using attention::cuda::wait_for_previous_kernel;

template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(unsigned(threads));
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace kvasir::model::cuda
