// The matrix unit's products of float16, for the table of kernels that amx.cc makes.
#pragma once

#include "attention/cpu/kernels.h"

namespace kvasir::attention::cpu {

const TileKernel* amx_halves_kernel();  // null where the processor lacks it; enable_amx() comes first

}  // namespace kvasir::attention::cpu
