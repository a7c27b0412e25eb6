#include "model/cpu/kernels.h"

#include "core/cpu.h"

namespace kvasir::model::cpu {

std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> out;
#if defined(__x86_64__)
  const CpuFeatures& f = ::kvasir::cpu();
  bool wide = f.avx512 && f.avx512_vnni && f.f16c;
  if (wide && f.gfni && f.amx_int8 && enable_amx()) out.push_back(&kKernelsAmx);
  if (wide) out.push_back(&kKernelsAvx512);
  if (f.avx2 && f.avx_vnni && f.fma && f.f16c) out.push_back(&kKernelsAvxVnni);
  if (f.avx2 && f.fma && f.f16c) out.push_back(&kKernelsAvx2);
#elif defined(__aarch64__)
  if (::kvasir::cpu().neon_dot) out.push_back(&kKernelsNeonDot);
  out.push_back(&kKernelsNeon);
#endif
  out.push_back(&kKernelsPortable);
  return out;
}

const Kernels& best_kernels() {
  static const Kernels& best = *runnable_kernels().front();
  return best;
}

}  // namespace kvasir::model::cpu
