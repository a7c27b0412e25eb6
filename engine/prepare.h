// What the engine adds to a request that it takes: the length of an answer that names none, and what its steps read.
#pragma once

#include "engine/job.h"
#include "engine/validate.h"
#include "model/runner.h"

namespace kvasir::engine {

void set_max_tokens(Request& request, const RequestLimits& limits, const model::ModelInfo& info);

// Masks, the tokens that end it, room for what it asks of the prompt. `end_of_generation`: the model's own ends.
Status prepare(Job& job, const model::ModelInfo& info, const std::vector<int32_t>& end_of_generation);

}  // namespace kvasir::engine
