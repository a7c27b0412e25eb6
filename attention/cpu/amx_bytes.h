// The matrix unit's products of bytes, for the table of kernels that amx.cc makes.
#pragma once

#include "attention/cpu/kernels.h"

namespace kvasir::attention::cpu {

const TileKernel* amx_bytes_kernel();  // null where the processor lacks them; enable_amx() comes first

}  // namespace kvasir::attention::cpu
