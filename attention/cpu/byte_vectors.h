// Products of bytes by vectors, for the tables of kernels that avx512.cc and amx.cc make.
#pragma once

#include "attention/cpu/kernels.h"

namespace kvasir::attention::cpu {

const TileKernel* byte_vectors();  // null where the processor lacks them

}  // namespace kvasir::attention::cpu
