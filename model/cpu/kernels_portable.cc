// Plain C++: the kernels every machine runs.
#define KVASIR_SIMD_PORTABLE
#include "model/cpu/block_kernels.h"

namespace kvasir::model::cpu {
const Kernels kKernelsPortable = make_kernels("portable");
}
