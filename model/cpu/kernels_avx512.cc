#include "model/cpu/pairs_avx512.h"

namespace kvasir::model::cpu {
const Kernels kKernelsAvx512 = pair_kernels("avx512");
}
