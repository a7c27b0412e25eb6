// Products of a few rows by large weights, which pass through shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include "model/cuda/form.h"

namespace kvasir::model::cuda {

bool streamed_takes(int64_t rows, int64_t n, int64_t k, Form form);
// As launch_few_rows().
void launch_streamed(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k, Form form,
                     cudaStream_t stream);

}  // namespace kvasir::model::cuda
