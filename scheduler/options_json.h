// Options as JSON: what `simulate --config`, configs/cost and the first line of a recording say.
#pragma once

#include <string>

#include "core/status.h"
#include "scheduler/options.h"

namespace kvasir::scheduler {

std::string options_to_json(const Settings& options);
// Sets what `json` names and leaves the rest; `source` is the file's name, for messages.
Status apply_json(const std::string& json, Settings* options, const std::string& source);

std::string json_string(const std::string& text);  // quoted

}  // namespace kvasir::scheduler
