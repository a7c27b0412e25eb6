// What a Recorder wrote, read back: to be run again and compared plan by plan, or to be simulated as a workload
// under other policies, or to fit a cost model to the time its steps took.
#pragma once

#include <istream>
#include <optional>
#include <string>

#include "scheduler/scheduler.h"
#include "scheduler/simulate.h"

namespace kvasir::scheduler {

bool is_recording(const std::string& first_line);

struct ReplayReport {
  std::string about, policy;
  int64_t calls = 0, steps = 0, requests = 0, refused = 0, output_tokens = 0, preemptions = 0, swaps = 0;
  int64_t prompt_tokens = 0, cached_tokens = 0;
  double seconds = 0;      // from the first call to the last
  bool identical = true;   // every plan and every answer is what was recorded
  std::string difference;  // the first, with its line
  bool cut_short = false;  // the last line is incomplete, or the writer could not keep up: all before was compared
};

// An error is a file that is no recording, or one that has been tampered with. `steps`, when wanted, is given the
// time of each step that ran alone: the first after a wait, or one behind another that was in flight.
Result<ReplayReport> replay(std::istream& in, std::vector<StepTime>* steps = nullptr);
std::string to_json(const ReplayReport& report);

// The same requests with the same beginnings, at the times they came; a request of n choices becomes n requests.
struct RecordedWorkload {
  Settings options;
  SimWorkload workload;
};
Result<RecordedWorkload> read_workload(std::istream& in);

}  // namespace kvasir::scheduler
