#include "scheduler/learned_cost.h"

#include <algorithm>
#include <cmath>

namespace kvasir::scheduler {
namespace {

// Relative variances: of a first guess (it may be off by many times), and of one step's time around what it should be.
constexpr double kFirstDoubt = 4, kNoise = 0.02;
// How much of a surprise becomes new doubt: machines get busier, and models are no straight lines.
constexpr double kRenewal = 0.05;
// What a part costs at least, in microseconds: from nothing, no correction would lead away.
constexpr double kLeast = 0.01;
// A doubt below this is no more than what steps differ by.
constexpr double kUsualDoubt = 0.25;

}  // namespace

// In the order of the work they are multiplied with (learn).
const LearnedCost::Parts LearnedCost::kMembers = {&StepCost::fixed_us,          &StepCost::token_us,
                                                  &StepCost::context_us,        &StepCost::decode_token_us,
                                                  &StepCost::decode_context_us, &StepCost::page_move_us};

LearnedCost::LearnedCost(const StepCost& first_guess) : cost_(first_guess) {
  doubt_.fill(kFirstDoubt);
  for (double StepCost::*part : {&StepCost::fixed_us, &StepCost::token_us, &StepCost::decode_token_us})
    cost_.*part = std::max(cost_.*part, kLeast);
}

StepCost LearnedCost::least() const {
  StepCost sure = cost_;
  for (int i = 0; i < kParts; ++i)
    sure.*kMembers[i] /= 1 + 2 * std::max(0.0, std::sqrt(std::max(doubt_[i], 0.0)) - kUsualDoubt);
  return sure;
}

// A Kalman filter over the parts' relative errors, each with a doubt of its own: what is doubted most, and had the
// largest share in the step, is corrected most.
void LearnedCost::learn(const StepTime& step) {
  const std::array<double, kParts> work = {
      1, step.prefill_tokens, step.prefill_context, step.decodes, step.decode_context, step.moves};
  const double predicted = 1e6 * step_seconds(step, cost_), measured = 1e6 * step.seconds;
  if (!(predicted > 0 && measured > 0)) return;
  std::array<double, kParts> share;
  double variance = kNoise;
  for (int i = 0; i < kParts; ++i) {
    share[i] = work[i] * (cost_.*kMembers[i]) / predicted;
    variance += share[i] * share[i] * doubt_[i];
  }
  // Symmetrical: twice as long counts as much as half. One step that something else held up hardly counts.
  const bool longer = measured > predicted;
  const double most = 3 * std::sqrt(variance);
  const double surprise = std::min(most, longer ? measured / predicted - 1 : predicted / measured - 1);
  for (int i = 0; i < kParts; ++i) {
    const double gain = share[i] * doubt_[i] / variance;
    const double by = std::min(4.0, 1 + gain * surprise);
    double& part = cost_.*kMembers[i];
    part = longer ? part * by : part / by;
    doubt_[i] =
        std::min(kFirstDoubt, doubt_[i] * (1 - gain * share[i]) + kRenewal * share[i] * share[i] * surprise * surprise);
  }
}

}  // namespace kvasir::scheduler
