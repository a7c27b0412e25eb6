#include "core/cpu.h"

#include <cstdlib>
#include <cstring>

#include "core/cpu_detect.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvasir {

const CpuFeatures& cpu() {
  static const CpuFeatures features = [] {
    CpuFeatures f = detect_cpu();
    const char* cap = std::getenv("KVASIR_ISA");
    const bool only_avx2 = cap && std::strcmp(cap, "avx2") == 0;
    if (only_avx2) f.avx512 = f.avx512_vbmi = f.avx512_vnni = f.avx512_bf16 = f.gfni = f.avx_vnni = false;
    if (only_avx2 || (cap && std::strcmp(cap, "avx512") == 0)) f.amx_int8 = f.amx_bf16 = false;
    return f;
  }();
  return features;
}

bool enable_amx() {
#if defined(__x86_64__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted =
      (cpu().amx_int8 || cpu().amx_bf16) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

std::string CpuFeatures::to_string() const {
  std::string out;
  auto add = [&](bool has, const char* name) {
    if (has) out += (out.empty() ? "" : " ") + std::string(name);
  };
  add(avx2, "avx2"), add(fma, "fma"), add(f16c, "f16c"), add(avx_vnni, "avx_vnni"), add(avx512, "avx512");
  add(avx512_vbmi, "avx512_vbmi"), add(avx512_vnni, "avx512_vnni"), add(avx512_bf16, "avx512_bf16"), add(gfni, "gfni");
  add(amx_int8, "amx_int8"), add(amx_bf16, "amx_bf16"), add(neon, "neon");
  add(neon_dot, "neon_dot");
  return out.empty() ? "none" : out;
}

}  // namespace kvasir
