#include "core/cpu.h"

#include <cstdlib>
#include <string_view>
#include <vector>

#include "core/cpu_detect.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvasir {

namespace {

// Widest first: its name, and whether a machine has it.
struct Isa {
  std::string_view name;
  bool there;
};

std::vector<Isa> isas(const CpuFeatures& f) {
#if defined(__aarch64__)
  return {{"neon", f.neon}, {"portable", true}};
#else
  return {{"amx", f.amx_int8 && f.amx_bf16},
          {"avx512_vbmi", f.avx512_vbmi},
          {"avx512", f.avx512},
          {"avx2", f.avx2 && f.fma && f.f16c},
          {"portable", true}};
#endif
}

CpuFeatures up_to(CpuFeatures f, std::string_view isa) {
  if (isa == "amx") return f;
  f.amx_int8 = f.amx_bf16 = false;
  if (isa == "avx512_vbmi") return f;
  f.avx512_vbmi = false;
  if (isa == "avx512") return f;
  if (isa == "avx2") return {.avx2 = f.avx2, .fma = f.fma, .f16c = f.f16c};
  if (isa == "neon") return {.neon = f.neon};
  return isa == "portable" ? CpuFeatures{} : f;
}

}  // namespace

const char* wanted_isa() {
  const char* isa = std::getenv("KVASIR_ISA");
  return isa && *isa ? isa : nullptr;
}

std::string isa_complaint() {
  if (!wanted_isa()) return "";
  std::string has;
  for (const Isa& isa : isas(detect_cpu())) {
    if (isa.there && isa.name == wanted_isa()) return "";
    if (isa.there) has += (has.empty() ? "" : ", ") + std::string(isa.name);
  }
  return "KVASIR_ISA is '" + std::string(wanted_isa()) + "'; this processor has " + has;
}

const CpuFeatures& cpu() {
  static const CpuFeatures features = wanted_isa() ? up_to(detect_cpu(), wanted_isa()) : detect_cpu();
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
