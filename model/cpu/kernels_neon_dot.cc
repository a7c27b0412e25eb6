#include "model/cpu/block_kernels.h"

namespace kvasir::model::cpu {
const Kernels kKernelsNeonDot = make_kernels("neon_dot");
}
