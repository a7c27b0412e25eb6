#pragma once

#include "client/target.h"

namespace kvasir::client {

// /v1/completions, or /v1/chat/completions with `chat`.
Result<std::unique_ptr<Target>> make_openai_target(const TargetOptions& options, bool chat);

}  // namespace kvasir::client
