// Overload: how long one that came now would wait, and who is better refused at once than left to wait for nothing.
// While more comes than can be done, what is let in must still be of use when it ends: before its deadline, before its
// client leaves. So the queue is bounded by time, and time is estimated by what makes room: slots that become free one
// after the other, and prompts that are computed. What is not known yet refuses nobody: a guess at the cost may be off
// by many times, the first step waits for what no other waits for, and how long answers are only answers tell.
#include <algorithm>
#include <cmath>

#include "core/cat.h"
#include "scheduler/state.h"

namespace kvasir::scheduler {
namespace {

std::chrono::milliseconds after(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(std::clamp(seconds, 0.05, 600.0) * 1000)));
}

// Until so many steps have been seen, what one takes is not known; until so many answers, not how long they are.
constexpr int64_t kFewSteps = 8, kFewAnswers = 8;

double rounded(double seconds) { return std::round(seconds * 1000) / 1000; }

}  // namespace

bool Scheduler::State::knows() const { return load.steps >= kFewSteps && stats.finished > 0; }

// What steps take now counts as much as what whole answers took: the latter is known late when the load grows. The
// first answers to end are the short ones; that others run for so long already is as sure.
double Scheduler::State::answer_seconds(int64_t max_new) const {
  double so_far = 0;
  if (stats.finished < kFewAnswers && !running.empty()) so_far = in_seconds(clock - running.front()->admitted);
  if (!knows()) return so_far;
  const double outputs = std::min(load.output_tokens, static_cast<double>(std::max<int64_t>(max_new, 1)));
  return std::max(
      {so_far, load.slot_seconds, (load.slot_seconds > 0 ? load.output_tokens : outputs) * load.step_seconds});
}

// Surely no less. Prompts have what the decodes beside them leave of a step (prompt_room).
double Scheduler::State::prompt_seconds(int64_t tokens) const {
  const double computed = stats.prompt_tokens > 0
                              ? 1 - static_cast<double>(stats.cached_tokens) / static_cast<double>(stats.prompt_tokens)
                              : 1;
  const double n = static_cast<double>(tokens) * computed;
  const StepCost sure = learned.least();
  const double token = 1e-6 * std::max(sure.token_us, 1e-3);
  double rest = 1e-6 * sure.fixed_us, a_step = static_cast<double>(options.max_tokens_per_step);
  if (load.decodes_seconds > 0) {
    rest = load.decodes_seconds;
    if (options.max_step_ms > 0)
      a_step = std::min(a_step, (std::max(1e-3 * options.max_step_ms, 2 * rest) - rest) / token);
  }
  return n / std::max(a_step, 1.0) * (rest + a_step * token);
}

double Scheduler::State::wait_behind(const Queued& ahead, int64_t slots, int64_t max_new) const {
  const int64_t all = std::max<int64_t>(load.slots, 1);
  const int64_t turns = ahead.slots + slots - (all - static_cast<int64_t>(running.size()));
  const double a_turn = answer_seconds(max_new) / static_cast<double>(all);
  // Whether prompts keep somebody waiting for too long is not known before it is known how long answers take.
  const double prompts = knows() && stats.finished >= kFewAnswers ? prompt_seconds(ahead.tokens) : 0;
  return std::max(static_cast<double>(std::max<int64_t>(turns, 0)) * a_turn, prompts);
}

double Scheduler::State::expected_wait(const Sequence& s) const {
  const RequestState& r = *s.request;
  return wait_behind(policy->ahead(s, queued, tenants[r.tenant].queued), r.forked ? 1 : r.n, r.max_new);
}

// From its admission on: its prompt, then a step a token. How many tokens is not known where an answer may end by
// itself.
double Scheduler::State::expected_work(const Sequence& s) const {
  const double left = static_cast<double>(s.request->max_new - s.outputs());
  return prompt_seconds(static_cast<int64_t>(s.tokens.size())) +
         std::min(2 * load.output_tokens, left) * load.step_seconds;
}

// Those who do not wait are left to try, except where the policy promises to be in time.
bool Scheduler::State::hopeless(const Sequence& s, Time now) const {
  const std::optional<Time>& deadline = s.request->deadline;
  if (!deadline || load.step_seconds <= 0) return false;
  const bool others_wait = queued.slots > s.queued_slots;
  return in_seconds(*deadline - now) < (others_wait || policy->promises() ? expected_work(s) : load.step_seconds);
}

double Scheduler::State::wait_bound(int64_t max_new) const {
  return std::max(options.max_wait_s, options.max_wait_answers * answer_seconds(max_new));
}

Status Scheduler::State::check_wait(const Sequence& s, Time now) const {
  if (load.step_seconds <= 0) return {};  // nothing is known yet
  const RequestState& r = *s.request;
  const double wait = expected_wait(s);
  if (r.deadline && (wait > 0 || policy->promises())) {
    const double left = in_seconds(*r.deadline - now), own = knows() ? expected_work(s) : 0;
    if (own + wait > left)
      return Status(Code::deadline_exceeded, cat("the deadline is in ", rounded(left), " s; ", rounded(wait),
                                                 " s of waiting and ", rounded(own), " s of work are expected"))
          .with_field("deadline");
  }
  const double bound = wait_bound(r.max_new);
  if (bound == 0 || wait == 0) return {};
  if (wait > bound) {
    const auto ms = after(wait - bound);
    return resource_exhausted(cat("a wait of ", rounded(wait), " s is expected, at most ", rounded(bound),
                                  " s may be; try again in ", ms.count(), " ms"))
        .with_retry_after(ms);
  }
  if (options.tenant_queue_share == 0 || tenants[r.tenant].name.empty()) return {};
  const double a_turn = answer_seconds(r.max_new) / static_cast<double>(std::max<int64_t>(load.slots, 1));
  const double own = std::min(wait, a_turn * static_cast<double>(tenants[r.tenant].queued.slots));
  const double share = options.tenant_queue_share * (bound - wait);
  if (own <= share) return {};
  const auto ms = after(own - share);
  return resource_exhausted(cat("what you have waiting takes ", rounded(own), " s, at most ", rounded(share),
                                " s are yours while others may come; try again in ", ms.count(), " ms"))
      .with_retry_after(ms);
}

}  // namespace kvasir::scheduler
