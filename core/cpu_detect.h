// Reads the processor's own answer. Plain C only: it runs before main() on processors we refuse, so it
// may not touch an inline function that a translation unit built for AVX2 also emits.
#pragma once

#include "core/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvasir {

#if defined(__x86_64__)
static inline unsigned long long saved_registers() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}
#endif

static inline CpuFeatures detect_cpu() {
  CpuFeatures f;
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !((c >> 27) & 1)) return f;  // OSXSAVE: xgetbv may be asked
  const bool fma = (c >> 12) & 1, f16c = (c >> 29) & 1;
  const unsigned long long saved = saved_registers();
  const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xe6) == 0xe6, tiles = (saved & 0x60000) == 0x60000;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  const unsigned leaves = a;
  f.avx2 = ymm && ((b >> 5) & 1);
  f.fma = ymm && fma;
  f.f16c = ymm && f16c;
  f.avx512 = zmm && ((b >> 16) & 1) && ((b >> 17) & 1) && ((b >> 30) & 1) && ((b >> 31) & 1);
  f.avx512_vbmi = f.avx512 && ((c >> 1) & 1);
  f.avx512_vnni = f.avx512 && ((c >> 11) & 1);
  f.gfni = f.avx512 && ((c >> 8) & 1);
  f.amx_bf16 = tiles && ((d >> 22) & 1);
  f.amx_int8 = tiles && ((d >> 25) & 1);
  if (leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    f.avx_vnni = f.avx2 && ((a >> 4) & 1);
    f.avx512_bf16 = f.avx512 && ((a >> 5) & 1);
  }
#elif defined(__aarch64__)
  f.neon = true;
  f.neon_dot = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#endif
  return f;
}

}  // namespace kvasir
