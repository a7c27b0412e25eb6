// How soon a request could end at best, from what steps took lately. It is a bound from below: a request whose deadline
// comes before it cannot be served in time, and is better told so at once than after it has waited.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "core/clock.h"
#include "core/status.h"
#include "engine/engine.h"
#include "engine/request.h"

namespace kvasir::engine {

struct Work {
  int64_t ahead = 0;          // prompt tokens that wait before it
  int64_t prompt = 0;         // its own that must be computed
  int64_t outputs = 1;        // tokens it cannot end before
  double computed_share = 1;  // of prompt tokens, that the prefix cache does not have
  int64_t max_tokens_per_step = 1;
};

// Nothing before enough steps were seen.
std::optional<Duration> least_time(const std::deque<StepSample>& recent, const Work& work);

// DEADLINE_EXCEEDED, with the reason, for a request that comes too late whatever happens.
Status check_deadline(const Request& request, Duration left, const EngineOptions& options,
                      const std::deque<StepSample>& recent, const Stats& stats, int64_t waiting_tokens);

}  // namespace kvasir::engine
