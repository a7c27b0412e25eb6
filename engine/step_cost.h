// What steps and page moves cost on this machine: the scheduler decides by it, as between moving pages to the host and
// computing them again.
#pragma once

#include <string>

#include "core/status.h"
#include "model/runner.h"
#include "scheduler/options.h"

namespace kvasir::engine {

// A file as configs/cost has them, and `kvasir simulate --fit` writes.
Status read_cost_model(const std::string& file, scheduler::StepCost* cost);

// Microseconds of a page between the device and the second tier, either way. Before the first step only: the pages
// are overwritten.
Result<double> time_page_moves(model::Runner& runner, int64_t pages, int64_t host_pages);

}  // namespace kvasir::engine
