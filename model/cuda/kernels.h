// The plain kernels between products and attention. Activations are float32 between operations; a
// bfloat16 copy is made where a product or attention reads them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kvasir::model::cuda {

// out[t] = scale * table[tokens[t]], table in bfloat16.
void launch_embed(const int32_t* tokens, const void* table, float scale, float* out, int64_t rows, int64_t cols,
                  cudaStream_t stream);
// out = in / rms(in) * weight over each row; `add`: out += that. Rows are `stride` apart.
void launch_norm(const float* in, int64_t in_stride, const float* weight, float eps, bool add, float* out,
                 int64_t out_stride, int64_t rows, int64_t cols, cudaStream_t stream);
// norm() in place of `heads` heads from `first` on, each `size` wide, of rows `stride` apart.
void launch_head_norm(float* x, int64_t stride, int64_t first, int64_t heads, int64_t size, const float* weight,
                      float eps, int64_t rows, cudaStream_t stream);
// out = f(first half of in) * second half.
void launch_glu(bool gelu, const float* in, float* out, int64_t rows, int64_t cols, cudaStream_t stream);
void launch_to_bf16(const float* in, void* out, int64_t count, cudaStream_t stream);
void launch_from_bf16(const void* in, float* out, int64_t count, cudaStream_t stream);
// out[i] = in[which[i]]
void launch_take_rows(const float* in, const int32_t* which, float* out, int64_t rows, int64_t cols,
                      cudaStream_t stream);

}  // namespace kvasir::model::cuda
