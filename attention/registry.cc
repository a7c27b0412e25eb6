#include "attention/backend.h"
#include "attention/cpu/cpu.h"
#include "attention/reference/reference.h"
#include "core/cat.h"
#ifdef KVASIR_CUDA
#include "attention/cuda/cuda.h"
#endif

namespace kvasir::attention {

// Adding a back end: its folder, its line in CMakeLists.txt, its line here.
const std::vector<const Backend*>& backends() {
  static const std::vector<const Backend*> all = {
#ifdef KVASIR_CUDA
      &cuda_backend(),
#endif
      &cpu_backend(),
      &reference_backend(),
  };
  return all;
}

Result<const Backend*> find_backend(std::string_view name) {
  std::string known;
  for (const Backend* b : backends()) {
    if (b->name() == name) return b;
    known += cat(known.empty() ? "" : ", ", b->name());
  }
  return not_found(cat("there is no attention back end '", name, "'; known: ", known)).with_field("backend");
}

}  // namespace kvasir::attention
