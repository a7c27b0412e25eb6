#include "scheduler/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/cat.h"

namespace kvasir::scheduler {
namespace {

constexpr int kFactors = 6;
constexpr int64_t kFewestSteps = 50;
using Factors = std::array<double, kFactors>;

Factors row_of(const StepTime& s) {
  return {1, s.prefill_tokens, s.prefill_context, s.decodes, s.decode_context, s.moves};
}

// Coordinate descent on |A x - b|^2 with x >= 0, from the normal equations. Convex in six numbers, so it ends.
Factors solve(const std::array<Factors, kFactors>& ata, const Factors& atb) {
  Factors x{};
  for (int round = 0; round < 200000; ++round) {
    double moved = 0;
    for (int i = 0; i < kFactors; ++i) {
      if (ata[i][i] <= 0) continue;
      double rest = atb[i];
      for (int k = 0; k < kFactors; ++k)
        if (k != i) rest -= ata[i][k] * x[k];
      const double next = std::max(0.0, rest / ata[i][i]);
      moved = std::max(moved, std::abs(next - x[i]));
      x[i] = next;
    }
    if (moved < 1e-12) break;
  }
  return x;
}

}  // namespace

// A verified token costs what a decode does: its logits are wanted, which of a prompt only the last token's are.
void add_work(StepTime& work, Phase phase, int64_t begin, int64_t count) {
  const auto n = static_cast<double>(count);
  const double context = n * (static_cast<double>(begin) + 0.5 * n);
  (phase == Phase::prefill ? work.prefill_tokens : work.decodes) += n;
  (phase == Phase::prefill ? work.prefill_context : work.decode_context) += context;
}

StepTime work_of(const StepPlan& plan) {
  StepTime w;
  w.moves = static_cast<double>(plan.moves.size());
  for (const PlanItem& item : plan.items) add_work(w, item.phase, item.begin, item.count);
  return w;
}

// The positive root of context/2 n^2 + (token + context begin) n = time, in the form that a context of 0 does not hurt.
double prompt_tokens_in(double seconds, int64_t begin, const StepCost& cost) {
  const double time = 1e6 * seconds, each = cost.token_us + cost.context_us * static_cast<double>(begin);
  if (time <= 0) return 0;
  return 2 * time / std::max(1e-9, each + std::sqrt(each * each + 2 * cost.context_us * time));
}

double step_seconds(const StepTime& work, const StepCost& cost) {
  return 1e-6 * (cost.fixed_us + cost.page_move_us * work.moves + cost.token_us * work.prefill_tokens +
                 cost.context_us * work.prefill_context + cost.decode_token_us * work.decodes +
                 cost.decode_context_us * work.decode_context);
}

Result<CostFit> fit_cost(const std::vector<StepTime>& all) {
  std::vector<const StepTime*> steps;
  for (const StepTime& s : all)
    if (s.seconds > 0) steps.push_back(&s);
  if (static_cast<int64_t>(steps.size()) < kFewestSteps)
    return invalid_argument(
        cat("the recording has ", steps.size(), " timed steps; a fit wants at least ", kFewestSteps));

  // Each column is scaled to a largest entry of 1, each row divided by its time: all steps count the same.
  Factors scale{};
  for (const StepTime* s : steps) {
    const Factors r = row_of(*s);
    for (int i = 0; i < kFactors; ++i) scale[i] = std::max(scale[i], r[i] / s->seconds);
  }
  if (scale[1] == 0 || scale[3] == 0)
    return invalid_argument("the recording has no prefills or no decodes; a fit wants both");
  std::array<Factors, kFactors> ata{};
  Factors atb{};
  for (const StepTime* s : steps) {
    Factors r = row_of(*s);
    for (int i = 0; i < kFactors; ++i) r[i] = scale[i] > 0 ? r[i] / s->seconds / scale[i] : 0;
    for (int i = 0; i < kFactors; ++i) {
      atb[i] += r[i];
      for (int k = 0; k < kFactors; ++k) ata[i][k] += r[i] * r[k];
    }
  }
  Factors x = solve(ata, atb);
  for (int i = 0; i < kFactors; ++i) x[i] = scale[i] > 0 ? 1e6 * x[i] / scale[i] : 0;

  CostFit fit;
  fit.steps = static_cast<int64_t>(steps.size());
  fit.moves_measured = scale[5] > 0;
  fit.cost = {x[0], x[1], x[2], x[3], x[4], fit.moves_measured ? x[5] : StepCost().page_move_us};
  std::vector<double> errors;
  errors.reserve(steps.size());
  for (const StepTime* s : steps) errors.push_back(std::abs(step_seconds(*s, fit.cost) / s->seconds - 1));
  std::sort(errors.begin(), errors.end());
  fit.median_error = errors[errors.size() / 2];
  fit.p90_error = errors[errors.size() * 9 / 10];
  return fit;
}

std::string to_json(const CostFit& fit, const std::string& source) {
  auto rounded = [](double x) {  // four digits: a fit knows no more
    char text[32];
    std::snprintf(text, sizeof text, "%.4g", x);
    return std::strtod(text, nullptr);
  };
  const StepCost& c = fit.cost;
  nlohmann::ordered_json j;
  j["source"] =
      cat("fitted by kvasir simulate --fit to ", fit.steps, " steps of ", source, ": a step's time is off by ",
          rounded(100 * fit.median_error), " % (median), ", rounded(100 * fit.p90_error), " % (p90)",
          fit.moves_measured ? "" : "; no page moved: page_move_us is the default");
  j["cost"] = {{"fixed_us", rounded(c.fixed_us)},
               {"token_us", rounded(c.token_us)},
               {"context_us", rounded(c.context_us)},
               {"decode_token_us", rounded(c.decode_token_us)},
               {"decode_context_us", rounded(c.decode_context_us)},
               {"page_move_us", rounded(c.page_move_us)}};
  return j.dump(2);
}

}  // namespace kvasir::scheduler
