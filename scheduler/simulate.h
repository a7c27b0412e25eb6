// A day in a minute: the real scheduler, with a cost model in place of the device.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "scheduler/cost_model.h"
#include "scheduler/scheduler.h"

namespace kvasir::scheduler {

// One request of a workload; JSONL has the same names.
struct WorkItem {
  double arrival_s = 0;  // with `follows`: seconds after that request's end
  int64_t prompt_tokens = 0, output_tokens = 0;
  // Equal ids in equal places mean equal text: each stands for `prefix_block` tokens at the beginning.
  std::vector<int64_t> prefix_ids;
  std::string tenant;
  int32_t priority = 0;
  std::optional<double> deadline_s;   // after arrival
  std::optional<double> cancel_at_s;  // after arrival
  // Requests of one conversation share what comes after prefix_ids: a prompt that is as long as an
  // earlier one and its output repeats both. -1: nobody else's.
  int64_t conversation = -1;
  int64_t follows = -1;       // index of an earlier request
  std::vector<int32_t> text;  // prompt and output where they are known, of a recording; wins over all of the above
};

struct SimWorkload {
  std::vector<WorkItem> items;
  int64_t prefix_block = 16;
};
Result<SimWorkload> parse_workload(const std::string& jsonl);

struct Percentiles {
  double p50 = 0, p90 = 0, p99 = 0, mean = 0;
};
struct TenantReport {
  std::string name;
  int64_t finished = 0, output_tokens = 0;
  Percentiles ttft_s;
};
struct SimReport {
  std::string policy;
  double simulated_s = 0, wall_s = 0;
  int64_t requests = 0, finished = 0, refused = 0, expired = 0, cancelled = 0;
  int64_t steps = 0, steps_cut = 0, preemptions = 0, swaps = 0;
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0, on_time_tokens = 0;
  double output_tokens_per_s = 0, goodput_tokens_per_s = 0;  // goodput: of requests that ended on time
  double hit_rate = 0, page_use_mean = 0, page_use_peak = 0;
  double fairness = 1;  // Jain's index over the tenants' output tokens
  double longest_wait_s = 0;
  Percentiles ttft_s, itl_s, latency_s;
  std::vector<TenantReport> tenants;
};

// What a machine that is one of several adds to the figures of all.
struct OneOfMany {
  bool prompts_come_computed = false;  // from elsewhere: what is left of a prompt here is its last token's decode
  struct Served {
    double first_s = -1, last_s = -1;  // tokens; -1: there was none
  };
  std::vector<Served> served;  // of each request
  std::vector<double> itl_s;
};

// `machine`: what its steps take, where that is not what options.cost expects; its first one takes `warm_up_s` more.
Result<SimReport> simulate(const Settings& options, const SimWorkload& workload, const StepCost* machine = nullptr,
                           OneOfMany* one = nullptr, double warm_up_s = 0);
Percentiles percentiles(std::vector<double>& values);  // sorts them

std::string to_json(const std::vector<SimReport>& reports);
std::string to_svg(const std::vector<SimReport>& reports);  // policies side by side

}  // namespace kvasir::scheduler
