// What a run amounts to.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "client/load.h"

namespace kvasir::client {

struct Slo {
  double ttft = 0, itl = 0, e2e = 0;  // seconds; 0: not asked for. itl is a request's mean gap between tokens
  bool any() const { return ttft > 0 || itl > 0 || e2e > 0; }
};
Result<Slo> parse_slo(const std::string& text);  // "ttft=500ms,itl=50ms,e2e=10s"

struct Spread {
  int64_t count = 0;
  double mean = 0, p50 = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
  std::vector<double> curve;  // the 0th to 100th percentile
};
Spread spread_of(std::vector<double> values);

struct Second {
  int started = 0, finished = 0, failed = 0;
  int running = 0;  // in its middle
  int64_t tokens = 0;
};

struct Figures {
  int requests = 0, good = 0, failed = 0;
  double seconds = 0;
  int64_t prompt_tokens = 0, output_tokens = 0, cached_tokens = 0;
  double requests_per_second = 0, output_per_second = 0, total_per_second = 0;
  double goodput = 0, within_slo = 0;  // requests a second, and share of all requests
  Spread ttft, itl, tpot, e2e;         // seconds
  Spread late;                         // how long after they were due requests were sent: the client's own fault
  std::map<std::string, int> errors;   // by cause
  std::vector<Second> timeline;
  bool partial = false;
  std::string why;
};
Figures figures_of(const LoadRun& run, const Slo& slo);

}  // namespace kvasir::client
