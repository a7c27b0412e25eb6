// The plain kernels between products and attention. Activations are float32 where they are added up, and bfloat16
// where only a product or attention reads them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "model/sampling.h"

namespace kvasir::model::cuda {

// out[t] = scale * table[tokens[t]], table in bfloat16. A token t below 0 is before[-1 - t].
void launch_embed(const int32_t* tokens, const int32_t* before, const void* table, float scale, float* out,
                  int64_t rows, int64_t cols, cudaStream_t stream);
// out = in / rms(in) * weight over each row, in bfloat16. Invariant, here and below: however many rows there are, each
// is summed in one order. `out_stride`: between rows of `out`, where they are longer.
void launch_norm(const float* in, const float* weight, float eps, void* out, int64_t rows, int64_t cols,
                 cudaStream_t stream, bool invariant = false, int64_t out_stride = 0);
// out += that.
void launch_add_norm(const float* in, const float* weight, float eps, float* out, int64_t rows, int64_t cols,
                     cudaStream_t stream, bool invariant = false);
// norm() in place of the first `heads` heads, each `size` wide, of rows `stride` apart.
void launch_head_norm(float* x, int64_t stride, int64_t heads, int64_t size, const float* weight, float eps,
                      int64_t rows, cudaStream_t stream, bool invariant = false);
// A row's first q_heads and kv_heads pieces of `size`, normed; then as many of the latter as they are; in bfloat16.
// `size` is a multiple of 4, at most kMostHead.
constexpr int64_t kMostHead = 512;
void launch_qk_norm(const float* in, int64_t q_heads, const float* q, int64_t kv_heads, const float* k, int64_t size,
                    float eps, void* out, int64_t rows, cudaStream_t stream);
// out = f(first half of in) * second half, in bfloat16; `in` is that too, or float32.
void launch_glu(bool gelu, const void* in, bool half, void* out, int64_t rows, int64_t cols, cudaStream_t stream);
void launch_to_bf16(const float* in, void* out, int64_t count, cudaStream_t stream);
// out[i] = in[which[i]]
void launch_take_rows(const float* in, const int32_t* which, float* out, int64_t rows, int64_t cols,
                      cudaStream_t stream);
// Of each row its greatest value, as the host's sampler finds it, and the tokens alone (0 of a row that is no numbers).
// `out` may be host memory that is pinned. `which`: the rows of logits, where they are not all.
void launch_greatest(const float* logits, DeviceDraw* out, int32_t* tokens, int64_t rows, int64_t cols,
                     cudaStream_t stream, const int32_t* which = nullptr);

}  // namespace kvasir::model::cuda
