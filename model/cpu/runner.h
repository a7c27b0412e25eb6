// A network on the host: launch() runs the whole step, wait() hands its samples over.
#pragma once

#include <memory>

#include "model/arch/registry.h"
#include "model/runner.h"

namespace kvasir::model::cpu {

// Loads the weights (repacking them, and giving the file's pages back).
Result<std::unique_ptr<Runner>> make_runner(const ModelConfig& config, std::unique_ptr<Weights> weights,
                                            const RunnerOptions& options, const LoadProgress& progress);

}  // namespace kvasir::model::cpu
