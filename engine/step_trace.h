// One step in numbers, and the Chrome trace (chrome://tracing, Perfetto) that shows them in time.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "core/clock.h"
#include "core/status.h"

namespace kvasir::engine {

struct StepSample {
  uint64_t step = 0;
  Time began{}, ended{};  // planned to sampled
  int32_t decodes = 0, prefills = 0;
  int64_t tokens = 0;  // computed: decodes and prompt tokens
  int64_t running = 0, waiting = 0;
  int64_t pages_free = 0, pages_cached = 0, pages_total = 0;
  float plan_us = 0, run_us = 0, advance_us = 0;
  int32_t late = 0;  // decodes that drew nothing, because their masks were not there
};

class StepTrace {
 public:
  explicit StepTrace(std::string file);  // empty: off
  ~StepTrace();
  StepTrace(const StepTrace&) = delete;

  const Status& status() const { return status_; }  // why there is none although one was asked for
  bool on() const { return on_; }                   // from any thread
  void write(const StepSample& step);

 private:
  FILE* file_ = nullptr;
  bool on_ = false;  // as it was at the start
  Status status_;
  Time origin_{};
};

}  // namespace kvasir::engine
