// Rows as E4M3, each with the float32 that its elements are to be multiplied by: weights once, when they are loaded,
// and what many-row products read, by itself or where a norm or a gate makes it. All round to bfloat16 first, so that
// an element is the same whichever way it came.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kvasir::model::cuda {

struct Bytes {
  void* elements = nullptr;
  float* scales = nullptr;
};

// Of a product's two sides: its input's rows, and the weight's, which are the result's columns.
struct Scales {
  const float *in = nullptr, *weight = nullptr;
};

// `in` is bfloat16 [rows, cols]. cols is a multiple of 8, here and below.
void launch_to_bytes(const void* in, Bytes out, int64_t rows, int64_t cols, cudaStream_t stream);
// What a product gave without its scales, by these: in bfloat16 or float32 as it lies, or added to float32 `out`.
void launch_scale_half(void* in_out, Scales by, int64_t rows, int64_t cols, cudaStream_t stream);
void launch_scale(const float* in, Scales by, bool add, float* out, int64_t rows, int64_t cols, cudaStream_t stream);
// Back again, as bfloat16.
void launch_from_bytes(Bytes in, void* out, int64_t rows, int64_t cols, cudaStream_t stream);
// in / rms(in) * weight, also as bfloat16; rows of up to most_norm_bytes().
void launch_norm_bytes(const float* in, const float* weight, float eps, void* half, Bytes out, int64_t rows,
                       int64_t cols, cudaStream_t stream);
int64_t most_norm_bytes();
// The same of x + sums, scaled, which stays in x.
void launch_add_norm_bytes(const float* sums, Scales by, float* x, const float* weight, float eps, void* half,
                           Bytes out, int64_t rows, int64_t cols, cudaStream_t stream);
// f(first half of in) * second half, `in` bfloat16 [rows, 2 * cols], to be scaled where there are scales.
void launch_glu_bytes(bool gelu, const void* in, Scales by, Bytes out, int64_t rows, int64_t cols, cudaStream_t stream);

}  // namespace kvasir::model::cuda
