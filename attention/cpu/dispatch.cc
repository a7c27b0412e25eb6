#include "attention/cpu/attend.h"

namespace kvasir::attention::cpu {

const Kernels& best_kernels() {
  static const Kernels& best = []() -> const Kernels& {
    for (const Kernels* k : {kernels_amx(), kernels_avx512_vbmi(), kernels_avx512(), kernels_avx2(), kernels_neon()})
      if (k) return *k;
    return *kernels_portable();
  }();
  return best;
}

}  // namespace kvasir::attention::cpu
