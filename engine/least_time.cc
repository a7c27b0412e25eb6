#include "engine/least_time.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/cat.h"

namespace kvasir::engine {
namespace {

constexpr size_t kFewSteps = 16;

// One decimal more than would be read as a lie.
std::string in_seconds(double s) { return cat(std::round(std::max(s, 0.0) * 1000) / 1000, " s"); }

// What it must say before it may end.
int64_t outputs_of(const Request& r) {
  bool may_stop = !r.ignore_eos || !r.stop_strings.empty() || !r.stop_regex.empty() || !r.stop_tokens.empty() ||
                  r.grammar.kind != text::GrammarSpec::Kind::none || !r.max_tokens;
  return std::max<int64_t>(1, may_stop ? r.min_tokens : *r.max_tokens);
}

}  // namespace

std::optional<Duration> least_time(const std::deque<StepSample>& recent, const Work& work) {
  if (recent.size() < kFewSteps) return std::nullopt;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  double step = kNever, token = kNever;  // the quickest step, and the quickest token of those that were well filled
  for (const StepSample& s : recent) {
    double took = double(s.run_us) * 1e-6;
    step = std::min(step, took);
    if (s.tokens * 2 >= work.max_tokens_per_step) token = std::min(token, took / double(s.tokens));
  }
  double computed = double(work.ahead + work.prompt) * work.computed_share;
  double prompts = step * std::max(1.0, std::ceil(computed / double(work.max_tokens_per_step)));
  if (token != kNever) prompts = std::max(prompts, computed * token);
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(prompts + step * double(work.outputs - 1)));
}

Status check_deadline(const Request& r, Duration left, const EngineOptions& options,
                      const std::deque<StepSample>& recent, const Stats& stats, int64_t waiting_tokens) {
  Work work;
  work.ahead = options.policy == "fcfs" ? waiting_tokens : 0;                // under the others it may overtake them
  const bool may_be_cached = options.prefix_cache && r.prompt_logprobs < 0;  // whatever was found for others
  work.prompt = may_be_cached ? 1 : int64_t(r.prompt.size());
  work.outputs = outputs_of(r);
  work.max_tokens_per_step = options.max_tokens_per_step;
  work.computed_share = 1 - stats.cache_hit_rate();
  auto least = least_time(recent, work);
  if (!least || *least <= left) return {};
  auto seconds = [](Duration d) { return in_seconds(std::chrono::duration<double>(d).count()); };
  return Status(Code::deadline_exceeded,
                cat("the deadline is in ", seconds(left), " and this request takes at least ", seconds(*least), ": ",
                    work.ahead, " prompt tokens wait before its ", r.prompt.size(), ", and it ends after ",
                    work.outputs, " tokens at the soonest; give it more time, or ask for less"))
      .with_field("deadline");
}

}  // namespace kvasir::engine
