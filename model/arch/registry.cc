#include "model/arch/registry.h"

namespace kvasir::model {

extern const Architecture kLlama, kMistral, kGemma3;

namespace {
const Architecture* const kAll[] = {&kLlama, &kMistral, &kGemma3};
}

const Architecture* find_architecture(std::string_view name) {
  for (const Architecture* a : kAll)
    if (a->name == name) return a;
  return nullptr;
}

std::string known_architectures() {
  std::string out;
  for (const Architecture* a : kAll) out += (out.empty() ? "" : ", ") + std::string(a->name);
  return out;
}

}  // namespace kvasir::model
