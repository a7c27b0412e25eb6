#include "attention/cpu/kernels.h"
#include "core/cpu.h"

#if defined(__x86_64__)
#include "attention/cpu/vector_kernels.h"

namespace kvasir::attention::cpu {
namespace {
constexpr Kernels kTable = vector_kernels("avx512");
}

const Kernels* kernels_avx512() { return kvasir::cpu().avx512 ? &kTable : nullptr; }

}  // namespace kvasir::attention::cpu
#else
namespace kvasir::attention::cpu {
const Kernels* kernels_avx512() { return nullptr; }
}  // namespace kvasir::attention::cpu
#endif
