// For processors without any of the others.
#define KVASIR_SIMD_PORTABLE
#include "attention/cpu/kernels.h"
#include "attention/cpu/vector_kernels.h"

namespace kvasir::attention::cpu {
namespace {
constexpr Kernels kTable = vector_kernels("portable");
}
const Kernels* kernels_portable() { return &kTable; }
}  // namespace kvasir::attention::cpu
