// A load test that also proves correctness: a sample of what was answered under load is asked again alone.
#pragma once

#include "client/load.h"

namespace kvasir::client {

struct Verification {
  int compared = 0, equal = 0, near_ties = 0, different = 0, failed = 0;
  std::vector<std::string> examples;  // of what differed
};

// Asks the sample one at a time and compares the texts. Where they part, a near-tie is counted apart: the two
// likeliest tokens closer than 1e-3 in log-probability, so that rounding alone may choose. A contract that tells
// only the chosen token's own is judged by whether both answers' tokens there are equally likely.
Verification verify(Target& target, const Workload& workload, const LoadOptions& options, const LoadRun& run,
                    int sample, const std::atomic<bool>& stop);

}  // namespace kvasir::client
