// What a network takes of the host's memory, told without loading it.
#pragma once

#include <vector>

#include "model/config.h"
#include "model/formats/weights.h"
#include "model/runner.h"

namespace kvasir::model::cpu {

struct Footprint {
  int64_t weights = 0;  // as kernels multiply them, or as narrow as they are stored
  int64_t steps = 0;    // activations, once a step has been as large as it may
};

// `parts`: each rank's network (model/ranks.h). Reads what decides how weights lie: of GGUF files and most folders only
// vectors, of folders in 4 bits all of it.
Result<Footprint> footprint(const std::vector<ModelConfig>& parts, Weights& weights, const RunnerOptions& options);

// Whether every rank's columns begin where a scale for 128 of them does; else E4M3 becomes bfloat16.
bool leaves_bytes(const std::vector<ModelConfig>& parts);

}  // namespace kvasir::model::cpu
