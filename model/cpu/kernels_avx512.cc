#include "model/cpu/panels_avx512.h"

namespace kvasir::model::cpu {
const Kernels kKernelsAvx512 = panel_kernels("avx512");
}
