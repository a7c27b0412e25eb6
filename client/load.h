// Drives a target with a workload and keeps what happened to each request. Open loop: requests start when
// they are due, however many are under way, and their latency counts from then. Closed loop: a number of
// clients, each asking again when answered.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "client/target.h"
#include "client/workload.h"

namespace kvasir::client {

struct Record {
  double due = 0, sent = 0, first = -1, end = 0;  // seconds from the start of the run
  int output_tokens = 0;                          // counted here
  Usage usage;                                    // said by the server
  std::vector<float> gaps;                        // seconds between what arrived
  std::vector<int> counts;                        // tokens in each of those (the first one's too)
  Status status;
  std::string text;   // kept when asked for
  int prompt = 0;     // index in the workload
  int turn = 0;       // of its conversation
  std::string asked;  // what a later turn asked: all that was said before, and more
  // Where a piece of the text begins, and its token's log-probability; of contracts that always say it.
  std::vector<std::pair<size_t, float>> odds;
};

// Tokens of its answer: what was counted, or what the server says where a piece may carry several.
inline int64_t output_of(const Record& r) { return std::max<int64_t>(r.output_tokens, r.usage.output_tokens); }

struct LoadOptions {
  int requests = 100;
  double duration = 0;      // seconds after which nothing new starts; 0: all requests
  int concurrency = 0;      // closed loop when above 0
  int batch = 1;            // requests that are due together and go in one call, where the contract can
  int turns = 1;            // of a conversation
  int turn_words = 32;      // what each later turn adds, where the workload does not say
  std::vector<double> due;  // open loop: when conversations begin
  int max_in_flight = 20'000;
  double temperature = 0;
  bool ignore_eos = true;
  bool keep_text = false;
  uint64_t seed = 1;
};

struct Progress {
  double seconds = 0;
  int started = 0, finished = 0, failed = 0;
  int64_t tokens = 0;
};

struct LoadRun {
  std::vector<Record> records;  // of the requests that started, in the order they did
  double seconds = 0;           // from the start to the last end
  bool partial = false;         // cut short
  std::string why;              // why it was
};

// `stop` may be set from a signal handler. `progress` is called about twice a second.
LoadRun run_load(Target& target, const Workload& workload, const LoadOptions& options, const std::atomic<bool>& stop,
                 const std::function<void(const Progress&)>& progress);

const Prompt& prompt_of(const Workload& workload, const Record& record);
Ask ask_of(const Workload& workload, const Record& record, const LoadOptions& options);

}  // namespace kvasir::client
