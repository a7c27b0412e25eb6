// Llama 1 to 3.x and everything shaped like it (SmolLM2, TinyLlama, Mistral).
#include "model/arch/experts.h"
#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

// Mixtral's files are Llama's by their architecture.
Status metadata(const GgufKeys& in, ModelConfig& c) {
  if (!in.has("expert_count")) return {};
  int32_t count = 0;
  KVASIR_TRY(in.get("expert_count", &count));
  if (count == 0) return {};
  c.experts.routing.normalized = true;
  return read_experts(in, c);
}

}  // namespace

extern const Architecture kLlama{.name = "llama",
                                 .models = "Llama 1 to 3.3, SmolLM 2, TinyLlama, Yi, Vicuna",
                                 .gguf_turns_neighbours = true,
                                 .metadata = metadata};
extern const Architecture kMistral{
    .name = "mistral", .models = "Mistral 7B, Mistral Nemo, Mistral Small", .gguf_turns_neighbours = true};

}  // namespace kvasir::model
