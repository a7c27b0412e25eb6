// What the engine's options and the model it has loaded mean for the scheduler.
#pragma once

#include "engine/engine.h"
#include "scheduler/options.h"

namespace kvasir::engine {

// `kv_memory`: bytes for the cache. A recording begins here when one is asked for.
Result<scheduler::Settings> scheduler_options(const EngineOptions& options, const model::Runner& runner,
                                              int64_t kv_memory);

}  // namespace kvasir::engine
