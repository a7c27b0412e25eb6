// What a row needs between products and has no kernel of its own in kernels.h: plain loops, whose sums are in float64
// and in order, so that every instruction set gives the same bits.
#pragma once

#include <cstdint>

#include "model/config.h"

namespace kvasir::model::cpu {

// `bias` may be null; `in` may be `out`.
void layer_norm(const float* in, const float* weight, const float* bias, int64_t cols, float eps, float* out);
float activation_of(Activation activation, float x);
// ExpertsConfig's, with a limit.
void clamped_glu(const float* gate, const float* up, int64_t n, float limit, float slope, float* out);
void softcap(float* x, int64_t cols, float cap);
void add_to(float* x, const float* bias, int64_t cols);
// 1 + slope * log(1 + floor(position / unit))
float position_scale(int64_t position, float slope, int64_t unit);

}  // namespace kvasir::model::cpu
