// Layers of multi-token prediction, as GGUF files say them.
#pragma once

#include <algorithm>

#include "model/config_keys.h"

namespace kvasir::model {

// The files count them with the others, and put them last.
inline Status read_next_layers(const GgufKeys& in, ModelConfig& config) {
  KVASIR_TRY(in.get("nextn_predict_layers", &config.next_layers));
  config.next_layers = std::min(config.next_layers, config.layers);
  config.layers -= config.next_layers;
  return {};
}

}  // namespace kvasir::model
