// What the served tokenizer is, in the words of a tokenizer_config.json.
#pragma once

#include <nlohmann/json.hpp>

#include "engine/engine.h"

namespace kvasir::server {

// Of the engine alone, whatever files the model came in. There must be a tokenizer.
nlohmann::ordered_json tokenizer_config(const engine::Engine& engine);
// With what the model's own file says beside it, and the special tokens by id: vLLM's /tokenizer_info.
nlohmann::ordered_json tokenizer_info(const engine::Engine& engine);

}  // namespace kvasir::server
