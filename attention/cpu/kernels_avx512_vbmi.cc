// AVX-512 where bytes and bit fields can be moved anywhere in a vector too (Ice Lake and later, Zen 4).
#include "attention/cpu/byte_vectors.h"
#include "attention/cpu/kernels.h"
#include "core/cpu.h"

#if defined(__x86_64__)
#include "attention/cpu/vector_kernels.h"

namespace kvasir::attention::cpu {
namespace {
constexpr Kernels kTable = vector_kernels("avx512_vbmi");
}

// The table is put together only where these instructions are, for the copy is made of them.
[[gnu::noinline]] static const Kernels& with_bytes() {
  static const Kernels table = [] {
    Kernels all = kTable;
    all.tile_kernels[0] = byte_vectors();
    return all;
  }();
  return table;
}

const Kernels* kernels_avx512_vbmi() {
  return kvasir::cpu().avx512 && kvasir::cpu().avx512_vbmi ? &with_bytes() : nullptr;
}

}  // namespace kvasir::attention::cpu
#else
namespace kvasir::attention::cpu {
const Kernels* kernels_avx512_vbmi() { return nullptr; }
}  // namespace kvasir::attention::cpu
#endif
