// A machine without contents whose every step takes the same time: for what depends on order and time alone.
#pragma once

#include <vector>

#include "core/check.h"
#include "scheduler/scheduler.h"

namespace kvasir::scheduler {

class Desk {
 public:
  explicit Desk(const Settings& o, Duration step = std::chrono::milliseconds(10)) : step_(step) {
    auto made = Scheduler::create(o);
    KVASIR_CHECK(made.ok(), made.status().to_string());
    scheduler = std::move(made).value();
  }
  // One step, or as much time without one. `events` is what it brought.
  void step() {
    scheduler->next_step(now, plan_);
    now += step_;
    results_.clear();
    for (const PlanItem& item : plan_.items)
      for (int32_t d = 0; item.samples && d < item.draws; ++d)
        results_.push_back({.seq = item.seq + SeqId(d), .tokens = {&kToken, 1}});
    if (!plan_.empty()) scheduler->advance(results_, now);
    scheduler->take_events(events);
  }

  const StepPlan& plan() const { return plan_; }

  std::unique_ptr<Scheduler> scheduler;
  Time now{};
  std::vector<Notice> events;

 private:
  static constexpr int32_t kToken = 7;
  Duration step_;
  StepPlan plan_;
  std::vector<SeqResult> results_;
};

}  // namespace kvasir::scheduler
