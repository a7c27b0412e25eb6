// How long a step takes: a sum over what it computes, whose factors are fitted to steps that were recorded.
#pragma once

#include <string>
#include <vector>

#include "core/status.h"
#include "scheduler/options.h"
#include "scheduler/plan.h"

namespace kvasir::scheduler {

// What a step computes, and how long it took where that was measured.
struct StepTime {
  double seconds = 0;
  double prefill_tokens = 0, prefill_context = 0;  // tokens, and tokens attended to by them
  double decodes = 0, decode_context = 0;
  double moves = 0;
};
void add_work(StepTime& work, Phase phase, int64_t begin, int64_t count);
StepTime work_of(const StepPlan& plan);
double step_seconds(const StepTime& work, const StepCost& cost);
// Prompt tokens from `begin` on that a step has time for in so many seconds.
double prompt_tokens_in(double seconds, int64_t begin, const StepCost& cost);

struct CostFit {
  StepCost cost;
  int64_t steps = 0;
  double median_error = 0, p90_error = 0;  // of a step's time, relative
  bool moves_measured = false;             // if not, page_move_us is the default
};
// Least squares on relative errors, no factor below zero. An error when the steps are too few or too much alike.
Result<CostFit> fit_cost(const std::vector<StepTime>& steps);
std::string to_json(const CostFit& fit, const std::string& source);  // as configs/cost has it

}  // namespace kvasir::scheduler
