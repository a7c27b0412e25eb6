// Llama 1 to 3.x and everything shaped like it (SmolLM2, TinyLlama, Mistral).
#include "model/arch/registry.h"

namespace kvasir::model {

extern const Architecture kLlama{
    .name = "llama", .models = "Llama 1 to 3.3, SmolLM 2, TinyLlama, Yi, Vicuna", .gguf_turns_neighbours = true};
extern const Architecture kMistral{
    .name = "mistral", .models = "Mistral 7B, Mistral Nemo, Mistral Small", .gguf_turns_neighbours = true};

}  // namespace kvasir::model
