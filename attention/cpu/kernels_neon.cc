#include "attention/cpu/kernels.h"

#if defined(__aarch64__)
#include "attention/cpu/vector_kernels.h"

namespace kvasir::attention::cpu {
namespace {
constexpr Kernels kTable = vector_kernels("neon");
}
const Kernels* kernels_neon() { return &kTable; }
}  // namespace kvasir::attention::cpu
#else
namespace kvasir::attention::cpu {
const Kernels* kernels_neon() { return nullptr; }
}  // namespace kvasir::attention::cpu
#endif
