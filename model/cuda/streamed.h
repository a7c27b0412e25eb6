// Products of a few rows by large weights, which pass through shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include "model/cuda/form.h"

namespace kvasir::model::cuda {

bool streamed_takes(int64_t rows, int64_t n, int64_t k, Form form);
// As launch_few_rows().
void launch_streamed(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k, Form form,
                     cudaStream_t stream);
// The same by E4M3 weights, feature f of which stands for scales[f] times itself.
bool streamed_bytes_takes(int64_t rows, int64_t n, int64_t k, Form form);
void launch_streamed_bytes(const void* in, const void* weight, const float* scales, void* out, int64_t rows, int64_t n,
                           int64_t k, Form form, cudaStream_t stream);

}  // namespace kvasir::model::cuda
