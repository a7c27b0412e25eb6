// SmolLM 3: Llama whose every fourth layer does not rotate.
#include <nlohmann/json.hpp>

#include "model/arch/registry.h"

namespace kvasir::model {
namespace {

void rotate_but(ModelConfig& c, int32_t interval) {
  c.layer_kinds.resize(size_t(std::clamp(c.layers, 0, 1024)));
  for (size_t i = 0; i < c.layer_kinds.size(); ++i) c.layer_kinds[i].rotated = (int64_t(i) + 1) % interval != 0;
}

Status json(const JsonKeys& in, ModelConfig& c) {
  if (!in.has("use_sliding_window")) c.window = 0;
  const bool kinds = !c.layer_kinds.empty();
  int32_t interval = 4;
  KVASIR_TRY(in.get({"no_rope_layer_interval"}, &interval));
  rotate_but(c, std::max(1, interval));
  if (const nlohmann::json* list = in.find("no_rope_layers")) {
    if (!list->is_array() || list->size() < c.layer_kinds.size()) return in.wrong("no_rope_layers", "a 0 or 1 a layer");
    for (size_t i = 0; i < c.layer_kinds.size(); ++i) c.layer_kinds[i].rotated = (*list)[i] != 0;
  }
  if (!kinds)
    for (LayerKind& k : c.layer_kinds) k.windowed = c.window > 0 && !k.rotated;
  return {};
}

Status metadata(const GgufKeys&, ModelConfig& c) {
  rotate_but(c, 4);
  return {};
}

void family(ModelConfig& c) {
  c.rope.base = 2e6;
  c.tied_head = true;
}

}  // namespace

extern const Architecture kSmolLm3{.name = "smollm3",
                                   .models = "SmolLM 3",
                                   .gguf_turns_neighbours = true,
                                   .family = family,
                                   .json = json,
                                   .metadata = metadata};

}  // namespace kvasir::model
