// What serving a network takes of a GPU's memory, told without one and without loading it.
#pragma once

#include "model/config.h"
#include "model/formats/weights.h"
#include "model/runner.h"

namespace kvasir::model::cuda {

struct GpuFootprint {
  int64_t weights = 0;
  int64_t steps = 0;      // activations, attention's workspace, experts' rows: of the largest step
  int64_t libraries = 0;  // the driver's context, code, cuBLASLt and its workspace
  int64_t all() const { return weights + steps + libraries; }
};

// `part`: of one rank. Reads no more of the weights than decides how they lie.
Result<GpuFootprint> footprint(const ModelConfig& part, Weights& weights, const RunnerOptions& options);

}  // namespace kvasir::model::cuda
