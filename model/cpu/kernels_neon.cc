#include "model/cpu/block_kernels.h"

namespace kvasir::model::cpu {
const Kernels kKernelsNeon = make_kernels("neon");
}
