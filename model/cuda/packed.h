// Products by quantized weights that stay packed (packing.h), and what else reads them.
#pragma once

#include <cuda_runtime_api.h>

#include "model/cuda/form.h"
#include "model/cuda/packing.h"

namespace kvasir::model::cuda {

// Rows of the input that one launch takes, of few and of many.
constexpr int64_t kPackedRows = 16, kManyPackedRows = 128;
// Whether this device multiplies packed weights.
bool packs();

// out[rows, n] = in[rows, k] (bfloat16) * weight[n, k]', summed in float32. For silu and gelu the weight has 2n rows,
// those of the gate first, whose strips lie beside those of what it lets through. Rows past 16 read the weights again.
void launch_packed(Packing packing, const void* in, const void* weight, float unit, void* out, int64_t rows, int64_t n,
                   int64_t k, Form form, cudaStream_t stream);

// The same of at most kPackedRows rows, by one packing (packed_kernel.cuh).
template <Packing kPacking>
void launch_few(const void* in, const void* weight, float unit, void* out, int64_t rows, int64_t n, int64_t k,
                Form form, cudaStream_t stream);

// The same for more rows than a few, read once for each 128: elements are rounded to bfloat16 before they are
// multiplied.
void launch_packed_many(Packing packing, const void* in, const void* weight, float unit, void* out, int64_t rows,
                        int64_t n, int64_t k, Form form, cudaStream_t stream);

// The same of at most kManyPackedRows rows, by one packing (packed_many.cuh).
template <Packing kPacking>
void launch_many(const void* in, const void* weight, float unit, void* out, int64_t rows, int64_t n, int64_t k,
                 Form form, cudaStream_t stream);

// Rows [first, first + rows) of the weight as bfloat16; `half` as in block_at().
void launch_unpack(Packing packing, const void* weight, float unit, int64_t half, void* out, int64_t first,
                   int64_t rows, int64_t cols, cudaStream_t stream);
// out[i] = scale * row of tokens[i]; a token t below 0 is before[-1 - t].
void launch_embed_packed(Packing packing, const int32_t* tokens, const int32_t* before, const void* weight, float unit,
                         float scale, float* out, int64_t rows, int64_t cols, cudaStream_t stream);

}  // namespace kvasir::model::cuda
