#include <string>

#include "attention/cpu/attend.h"

namespace kvasir::attention::cpu {

const Kernels* find_kernels(const char* wanted, std::string* known) {
  for (const Kernels* k :
       {kernels_amx(), kernels_avx512_vbmi(), kernels_avx512(), kernels_avx2(), kernels_neon(), kernels_portable()}) {
    if (!k) continue;
    if (!wanted || !*wanted || std::string_view(wanted) == k->name) return k;
    *known += (known->empty() ? "" : ", ") + std::string(k->name);
  }
  return nullptr;
}

}  // namespace kvasir::attention::cpu
