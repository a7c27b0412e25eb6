// Weights of dummy models, made on the device: the same numbers that model/formats/dummy.cc makes on the host.
#pragma once

#include <cuda_runtime_api.h>

#include "model/formats/weights.h"

namespace kvasir::model::cuda {

// A seeded tensor as bfloat16.
void launch_seeded(const HostTensor& tensor, void* out, cudaStream_t stream);

}  // namespace kvasir::model::cuda
