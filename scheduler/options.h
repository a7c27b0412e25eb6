// What a scheduler is told once.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "kvcache/cache_events.h"
#include "kvcache/view.h"

namespace kvasir::scheduler {

// Layers that keep the same tokens share page tables: one group for most models, two for those that
// mix full and sliding-window attention.
struct PageGroup {
  int64_t pages = 0;   // in its pool
  int32_t window = 0;  // 0: full attention; else pages wholly behind the window are given back
  int32_t sinks = 0;   // first tokens, counted inside the window, whose pages stay
};

// What a step costs, for choosing between ways to the same result and for max_step_ms (never for being right).
struct StepCost {
  double fixed_us = 500;            // a step of any size
  double token_us = 100;            // each new token
  double context_us = 0.002;        // each token attended to by a new token of a prefill
  double decode_token_us = 100;     // each decode
  double decode_context_us = 0.02;  // each token a decode attends to
  double page_move_us = 20;         // a page between device and host
};

class Recorder;

constexpr double kMostWeight = 1e6;  // of a tenant

struct Settings {
  int32_t page_size = 16;         // 1 to kvcache::kMostPageTokens
  std::vector<PageGroup> groups;  // at least one
  kvcache::IndexMode index_mode = kvcache::IndexMode::page_table;
  int64_t host_pages = 0;  // the second tier; 0: none
  // Each running sequence has a recurrent state beside its pages, in one of max_running slots. It is not moved, and
  // does not go back: no host_pages and drafts. A prefix is of use where its state was kept, in one of so many slots
  // more.
  bool recurrent = false;
  int64_t kept_states = 0;
  int64_t max_context = 4096;
  int64_t max_tokens_per_step = 512;
  int32_t max_running = 64;
  double max_step_ms = 0;         // of a step with decodes: prompts beside them are cut (plan_step.cc); 0: no bound
  int depth = 1;                  // plans in flight
  int32_t lookahead_tokens = 64;  // growth an admission leaves room for, each running sequence
  int32_t max_draft = 8;
  bool prefix_cache = true;

  std::string policy = "fcfs";                   // fcfs, lpm, priority, deadline, fair
  Duration patience{std::chrono::seconds(10)};   // what one level of priority, or a whole cached prompt, is worth
  std::map<std::string, double> tenant_weights;  // fair: 1 when not named

  int64_t max_waiting = 1024;  // requests
  int64_t max_waiting_tokens = 1 << 20;
  int64_t tenant_max_waiting = 0;  // 0: no bound of its own
  int64_t tenant_max_waiting_tokens = 0;
  // Who would not have their turn within this is refused at once: whichever of the two is longer; both 0: no bound.
  double max_wait_s = 0;
  double max_wait_answers = 0;  // in times that an answer takes
  // What one tenant may have waiting, in parts of what is then left for everybody: 1 lets a tenant alone fill half, two
  // a third each. 0: no bound of its own; a tenant without a name has none.
  double tenant_queue_share = 0;
  double tenant_cache_share = 1.0;  // of the pages, that one tenant's cached prefixes may fill

  StepCost cost;
  std::shared_ptr<kvcache::CacheEvents> cache_events;  // what is cached and what goes, for routers; null: untold
  std::shared_ptr<Recorder> recorder;                  // of every call, for replay; null: none

  Status validate() const;
};

}  // namespace kvasir::scheduler
