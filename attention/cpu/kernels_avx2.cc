#include "attention/cpu/kernels.h"
#include "core/cpu.h"

#if defined(__x86_64__)
#include "attention/cpu/group_sums.h"
#include "attention/cpu/group_words.h"
#include "attention/cpu/vector_kernels.h"

namespace kvasir::attention::cpu {
namespace {

constexpr Kernels kWithGroupSums = [] {
  Kernels table = vector_kernels("avx2");
  table.tile_kernels[0] = &kGroupWords;
  table.tile_kernels[1] = &kGroupSums;
  return table;
}();

}  // namespace

const Kernels* kernels_avx2() {
  return kvasir::cpu().avx2 && kvasir::cpu().fma && kvasir::cpu().f16c ? &kWithGroupSums : nullptr;
}

}  // namespace kvasir::attention::cpu
#else
namespace kvasir::attention::cpu {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace kvasir::attention::cpu
#endif
