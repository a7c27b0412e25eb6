#include "model/cpu/vector_avx2.h"

// After the vectors it is written for.
#include "model/cpu/kernels_impl.h"

namespace kvasir::model::cpu {
const Kernels kKernelsAvx2 = make_kernels("avx2");
}
