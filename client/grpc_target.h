#pragma once

#include "client/target.h"

namespace kvasir::client {

Result<std::unique_ptr<Target>> make_kvasir_target(const TargetOptions& options);
Result<std::unique_ptr<Target>> make_ppl_target(const TargetOptions& options);
Result<std::unique_ptr<Target>> make_vllm_target(const TargetOptions& options);

}  // namespace kvasir::client
