// `kvasir bench` without its terminal: settings in, report out.
#pragma once

#include "client/report.h"

namespace kvasir::client {

struct BenchOptions {
  TargetOptions target;
  WorkloadOptions workload;
  ArrivalOptions arrival;
  int requests = 0;  // 0: what fits in `duration`, or all of a file, or else 100
  double duration = 0;
  double rate = 0;  // open loop when above 0, or when the workload is a trace; of conversations when `turns` is above 1
  int concurrency = 8;
  bool closed = false;  // a closed loop even where the workload is a trace
  int batch = 1;
  int turns = 1, turn_words = 32;
  double time_scale = 1;  // of a trace: 2 is twice as fast
  double temperature = 0;
  bool ignore_eos = true;
  uint64_t seed = 1;
  Slo slo;
  double slo_share = 0.99;  // of requests that must be within it
  std::string sweep;        // "", "rate" or "concurrency"
  double sweep_low = 1, sweep_high = 1024;
  int verify = 0;
  bool keep_text = false;  // of the answers, in the run's records
};

using OnProgress = std::function<void(const std::string& what, const Progress&)>;

struct Bench {
  Report report;
  LoadRun run;  // the one that the figures are of
  Workload workload;
};
Result<Bench> run_bench(Target& target, const BenchOptions& options, const std::atomic<bool>& stop,
                        const OnProgress& progress);

}  // namespace kvasir::client
