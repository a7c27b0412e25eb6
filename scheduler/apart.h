// Prefill and decode on machines of their own, with a link between them, beside as many machines that do both.
#pragma once

#include "scheduler/simulate.h"

namespace kvasir::scheduler {

struct Pools {
  int64_t prefill = 0, decode = 0;  // machines
  double link_gbps = 0;             // gigabits a second, of each machine that prefills
  int64_t bytes_per_token = 0;      // of the cache
};

struct FleetReport {
  int64_t machines = 0, finished = 0, refused = 0, preemptions = 0, output_tokens = 0;
  double simulated_s = 0, output_tokens_per_s = 0;
  Percentiles ttft_s, itl_s, latency_s;  // itl_s: all gaps of all requests
};
struct ApartReport {
  std::string policy;
  FleetReport together, apart;
  double link_bytes = 0, link_use = 0;  // its share of the time, of all machines that prefill
  Percentiles moved_s;                  // from a prompt's end to where its cache is whole on the other side
};

// Requests go to the machine with the least work before it. The first token comes from where the prompt was computed,
// the others from where its cache was moved. Refused: requests that follow others, are cancelled, or whose text is
// known (recordings).
Result<ApartReport> simulate_apart(const Settings& options, const SimWorkload& workload, const Pools& pools,
                                   const StepCost* machine = nullptr);

std::string to_json(const std::vector<ApartReport>& reports);

}  // namespace kvasir::scheduler
