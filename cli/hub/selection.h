// Names that come from outside, and which files of a repository make a model.
#pragma once

#include <string_view>

#include "cli/hub/hub.h"

namespace kvasir::hub {

bool is_hex(std::string_view text, size_t length);
// A path inside a folder: plain characters, no empty part, no part that begins with a dot.
bool is_safe_path(std::string_view path);

}  // namespace kvasir::hub
