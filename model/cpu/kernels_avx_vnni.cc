#include "model/cpu/panels_avx2.h"

namespace kvasir::model::cpu {
const Kernels kKernelsAvxVnni = panel_kernels("avx_vnni");
}
