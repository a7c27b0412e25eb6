#include "model/cpu/vector_avx512.h"

// After the vectors it is written for.
#include "model/cpu/kernels_impl.h"

namespace kvasir::model::cpu {
const Kernels kKernelsAvx512 = make_kernels("avx512");
}
