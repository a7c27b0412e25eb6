// The tokenizer of the served model as a zip of the files others build one from.
#pragma once

#include <string>

#include "core/status.h"
#include "engine/engine.h"

namespace kvasir::server::rpc {

// tokenizer.json and tokenizer_config.json, stored. The same tokenizer gives the same bytes.
Result<std::string> tokenizer_zip(const engine::Engine& engine);

}  // namespace kvasir::server::rpc
