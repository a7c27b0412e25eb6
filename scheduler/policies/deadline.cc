// Earliest deadline first, and no promise that cannot be kept: a request that would not make its deadline,
// or would make others miss theirs, is refused when it comes. Requests without one are treated as due
// `patience` after their arrival, so that they cannot be put off for ever.
#include <algorithm>

#include "core/cat.h"
#include "scheduler/policy.h"

namespace kvasir::scheduler {
namespace {

class Deadline final : public KeyedPolicy {
 public:
  explicit Deadline(const Options& o) : patience_(o.patience), max_running_(o.max_running) {}

  Status judge(const Sequence& s, Time now, const Load& load) override {
    if (!s.request->deadline || load.step_seconds <= 0 || load.slot_seconds <= 0) return {};
    const double left = in_seconds(*s.request->deadline - now), own = work(s, load);
    const double a_turn = load.slot_seconds / max_running_;  // a slot becomes free so often
    // All of the queue counts: those due later were promised their time, too.
    const double turns = 1 + static_cast<double>(queue_.size()) - static_cast<double>(max_running_ - load.running);
    const double wait = std::max(0.0, turns) * a_turn;
    if (own + wait <= left) return {};
    return Status(Code::deadline_exceeded,
                  cat("the deadline is in ", left, " s; ", wait, " s of waiting and ", own, " s of work are expected"))
        .with_field("deadline");
  }
  bool hopeless(const Sequence& s, Time now, const Load& load) const override {
    return s.request->deadline && load.step_seconds > 0 && in_seconds(*s.request->deadline - now) < work(s, load);
  }
  double rank(const Sequence& s) const override { return due(s); }

 private:
  // Of a sequence that runs: its prefill, then a step a token.
  static double work(const Sequence& s, const Load& load) {
    const double left = static_cast<double>(s.request->max_new - s.outputs());
    return static_cast<double>(s.tokens.size()) / load.tokens_per_second +
           std::min(2 * load.output_tokens, left) * load.step_seconds;
  }
  double due(const Sequence& s) const {
    return in_seconds(s.request->deadline.value_or(s.request->arrival + patience_));
  }
  double key(const Sequence& s) const override { return due(s); }

  Duration patience_;
  int32_t max_running_;
};

}  // namespace

std::unique_ptr<Policy> make_deadline(const Options& o) { return std::make_unique<Deadline>(o); }

}  // namespace kvasir::scheduler
