// What this processor can run, asked once. Code for a wider instruction set lives in translation units
// of its own and is chosen by these flags at run time.
#pragma once

#include <string>

namespace kvasir {

struct CpuFeatures {
  // A flag is set only when the operating system saves the registers too.
  bool avx2 = false, fma = false, f16c = false;
  bool avx_vnni = false;
  bool avx512 = false;  // F, BW, DQ, VL: what every AVX-512 server processor has
  bool avx512_vbmi = false, avx512_vnni = false, avx512_bf16 = false, gfni = false;
  bool amx_int8 = false, amx_bf16 = false;  // present; enable_amx() before the first use
  bool neon = false, neon_dot = false;

  std::string to_string() const;  // "avx2 fma f16c avx512 avx512_vnni"
};

// The one switch of instruction sets: $KVASIR_ISA is the widest that is used, so that every path can be tested on a
// machine that has them all. portable, avx2, avx512, avx512_vbmi, amx; neon on ARM (without its dot products). Unset:
// all that there are, each where it is faster. Null: unset.
const char* wanted_isa();

// Empty, or why $KVASIR_ISA cannot be done here.
std::string isa_complaint();

// The features of this machine up to $KVASIR_ISA.
const CpuFeatures& cpu();

// Linux grants the AMX tile registers to a process on request; false when it does not.
bool enable_amx();

// Empty, or why kvasir cannot run on such a processor.
const char* cpu_complaint(const CpuFeatures& features);

// Ends the process with one clear line where cpu_complaint has one. main() calls it; linking it in also
// runs it before any other static initializer, so that no AVX2 instruction can come first.
void require_supported_cpu();

}  // namespace kvasir
