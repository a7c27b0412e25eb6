// Weights of dummy models, made on the device: the same numbers that model/formats/dummy.cc makes on the host.
#pragma once

#include <cuda_runtime_api.h>

#include "model/cuda/packing.h"
#include "model/formats/weights.h"

namespace kvasir::model::cuda {

// A seeded tensor as bfloat16.
void launch_seeded(const HostTensor& tensor, void* out, cudaStream_t stream);
// The same in blocks (packing.h), from row `first` on, of Q4_0, Q4_1, Q8_0 and INT4; blocks are zero before.
void launch_seeded_blocks(const HostTensor& t, Packing packing, float unit, int64_t half, void* out, int64_t first,
                          cudaStream_t stream);
float seeded_unit(const HostTensor& t);

}  // namespace kvasir::model::cuda
