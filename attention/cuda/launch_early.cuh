// Launches that may begin before the previous kernel has ended: they wait for it themselves
// (wait_for_previous_kernel), once what needs nothing of it is done.
#pragma once

#include <cuda_runtime.h>

namespace kvasir::attention::cuda {

template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes,
                         cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Arguments&&>(arguments)...);
}

}  // namespace kvasir::attention::cuda
