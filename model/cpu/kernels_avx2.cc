#include "model/cpu/panels_avx2.h"

namespace kvasir::model::cpu {
const Kernels kKernelsAvx2 = panel_kernels("avx2");
}
