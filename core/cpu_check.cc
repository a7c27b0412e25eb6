// The first code of the process. See core/cpu_detect.h for what it may not use.
#include <string.h>
#include <unistd.h>

#include "core/cpu_detect.h"

namespace kvasir {

const char* cpu_complaint(const CpuFeatures& f) {
#if defined(__x86_64__)
  if (!f.avx2 || !f.fma || !f.f16c)
    return "kvasir: this processor (or the virtual machine's view of it) has no AVX2, FMA and F16C; kvasir needs an "
           "x86-64 processor of 2013 or later (Intel Haswell, AMD Zen)\n";
#endif
  (void)f;
  return "";
}

__attribute__((constructor(101))) static void check_before_everything() { require_supported_cpu(); }

void require_supported_cpu() {
  const char* complaint = cpu_complaint(detect_cpu());
  if (!*complaint) return;
  if (write(2, complaint, strlen(complaint)) < 0) _exit(2);
  _exit(1);
}

}  // namespace kvasir
