// Small kernels between products that only some architectures need.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "model/config.h"

namespace kvasir::model::cuda {

// out = (in - mean) / deviation * weight + bias over each row, in bfloat16 (`half`) or float32; `bias` may be null.
void launch_layer_norm(const void* in, bool half_in, const float* weight, const float* bias, float eps, void* out,
                       bool half_out, int64_t rows, int64_t cols, cudaStream_t stream);
// x += bias over each row; x is bfloat16 (`half`) or float32.
void launch_add_bias(void* x, bool half, const float* bias, int64_t rows, int64_t cols, cudaStream_t stream);
// out = activation(in), in bfloat16; `gated`: activation(first half of in's row) * second half. `in` is bfloat16
// (`half`) or float32.
void launch_activate(Activation activation, bool gated, const void* in, bool half, void* out, int64_t rows,
                     int64_t cols, cudaStream_t stream);
// out += the table's row which[i] + shift, or its last one; the table is bfloat16.
void launch_add_row(const void* table, const int32_t* which, int64_t shift, int64_t last, float* out, int64_t rows,
                    int64_t cols, cudaStream_t stream);
// out += in, x *= factor.
void launch_add(const float* in, float* out, int64_t count, cudaStream_t stream);
void launch_scale(float* x, float factor, int64_t count, cudaStream_t stream);
// out = activation(in) * by, in bfloat16; rows of `by` are `stride` apart.
void launch_gate(Activation activation, const float* in, const float* by, int64_t stride, void* out, int64_t rows,
                 int64_t cols, cudaStream_t stream);
// Hidden states lie in bfloat16, rows `stride` apart. Rows of `in` (bfloat16, `half`, or float32) times `factor` to
// those that `at` names (-1: none), into columns from `first`; and rows out of them, in float32.
void launch_keep_states(const void* in, bool half, float factor, const int32_t* at, void* states, int64_t first,
                        int64_t stride, int64_t rows, int64_t cols, cudaStream_t stream);
void launch_take_states(const void* states, const int32_t* at, int64_t stride, float* out, int64_t rows, int64_t cols,
                        cudaStream_t stream);
// Rows into columns from `first` of rows `stride` apart; either is bfloat16 (`half`, `to_half`) or float32.
void launch_place(const void* in, bool half, void* out, bool to_half, int64_t first, int64_t stride, int64_t rows,
                  int64_t cols, cudaStream_t stream);
void launch_softcap(float* x, float cap, int64_t count, cudaStream_t stream);
// Columns [0, cols) of rows `stride` apart, times 1 + slope * log(1 + floor(position / unit)).
void launch_scale_by_position(float* x, const int32_t* positions, float slope, int64_t unit, int64_t rows, int64_t cols,
                              int64_t stride, cudaStream_t stream);

}  // namespace kvasir::model::cuda
