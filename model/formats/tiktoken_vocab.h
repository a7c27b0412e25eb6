// tiktoken's file of a vocabulary (a line a token: its bytes in base64, and its rank), for folders that have no
// tokenizer.json: those of Kimi K2 and Moonlight.
#pragma once

#include <string>
#include <string_view>

#include "core/status.h"

namespace kvasir::model {

// As the tokenizer.json that says the same. What the file does not say comes from `config_json`, the folder's
// tokenizer_config.json: the class, which knows how words are cut off, and the special tokens behind the others.
Result<std::string> read_tiktoken(std::string_view text, const std::string& config_json, const std::string& name);

}  // namespace kvasir::model
