// Prefill in FP8, where query, key, value and cache are E4M3: everything is read back from the cache first.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/cuda/types.h"

namespace kvasir::attention::cuda {

bool prefill8_supports(const Shape&, const CacheLayer&, int compute_capability);
// `old_rows`: what k_old and v_old have room for, a multiple of 128.
void launch_gather8(const Shape&, const StepView&, const Layer&, int64_t old_rows, int64_t sequences, cudaStream_t);
cudaError_t launch_prefill8(const Shape&, const StepView&, const Layer&, const PrefillTile*, int64_t tiles,
                            const TileQueue&, int64_t query_rows, int64_t old_rows, int multiprocessors, cudaStream_t);

}  // namespace kvasir::attention::cuda
