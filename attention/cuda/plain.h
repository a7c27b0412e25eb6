// What the plain kernel takes beside all that launch.h's does: a relative bias, which the faster ones do not know.
#pragma once

#include "attention/cuda/launch.h"

namespace kvasir::attention::cuda {

struct RelativeBias {
  const float* values = nullptr;  // [heads, 2 * reach + 1]; null: none
  int32_t reach = 0;
};

void launch_plain(const Shape&, const StepView&, const Layer&, const RelativeBias&, const QueryRow* rows, int64_t count,
                  cudaStream_t);

}  // namespace kvasir::attention::cuda
