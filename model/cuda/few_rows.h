// Products of a few rows, which take as long as their weights are on their way: these are prefetched before the
// previous kernel has ended.
#pragma once

#include <cuda_runtime_api.h>

#include "model/cuda/form.h"

namespace kvasir::model::cuda {

bool few_rows_takes(int64_t rows, int64_t n, int64_t k, Form form);
// out[rows, n] = in[rows, k] (bfloat16) * weight[n, k]' (bfloat16), summed in float32. For silu and gelu the weight has
// 2n rows, those of the gate first.
void launch_few_rows(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k, Form form,
                     cudaStream_t stream);

}  // namespace kvasir::model::cuda
