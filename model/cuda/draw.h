// Tokens drawn where their logits are, as the host's sampler draws them: temperature, top-k, top-n-sigma, typical-p,
// top-p and min-p.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "model/sampling.h"

namespace kvasir::model::cuda {

// What a row asks for. scale: 1 / temperature, 0 of a row that is not drawn here.
struct Wish {
  float scale = 0, top_p = 1, min_p = 0, typical_p = 1, top_n_sigma = 0;
  int32_t top_k = 0;  // 0: off
  double u = 0;       // the random number
};

// `nth`: of the draws that a row may take (a constraint may refuse the first).
Wish wish_of(const SampleRow& row, int32_t vocab, uint32_t nth = 0);

// After launch_greatest() of the same rows: what it left is replaced where a wish is there. `which`: the rows of
// logits, where they are not all; the others are one a wish.
void launch_draw(const float* logits, const Wish* wishes, DeviceDraw* out, int32_t* tokens, int64_t rows, int64_t cols,
                 cudaStream_t stream, const int32_t* which = nullptr);

}  // namespace kvasir::model::cuda
