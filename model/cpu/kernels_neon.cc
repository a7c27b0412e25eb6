#include "model/cpu/vector_neon.h"

// After the vectors it is written for.
#include "model/cpu/kernels_impl.h"

namespace kvasir::model::cpu {
const Kernels kKernelsNeon = make_kernels("neon");
}
