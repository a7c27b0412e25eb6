// Who runs in the next step, and where their K/V lives: a pure function of state, events and time.
// No threads, no clock of its own, no locks: one thread (or one simulation) drives it.
//
//   submit ... -> next_step(now) -> run the plan -> advance(results, now) -> next_step(now) ...
//
// Up to `depth` plans may be in flight. An empty plan means there is nothing to do until an event
// (submit, mask_ready, resume, advance) or until wake_at().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "scheduler/options.h"
#include "scheduler/plan.h"

namespace kvasir::scheduler {

struct Submission {
  RequestId id = 0;
  std::string tenant;
  std::vector<int32_t> prompt;     // at least one token
  int32_t n = 1;                   // choices, forked when the prompt is in
  bool beam = false;               // the n choices are beams of one search: advance says each one's parent
  std::optional<int64_t> max_new;  // unset: what context and pool allow; 0: prompt only
  int32_t priority = 0;            // higher runs first
  double weight = 0;               // policy fair: its tenant's from now on, unless the options name it; 0: as it was
  std::optional<Time> deadline;
  std::string cache_salt;  // requests share cached pages only with equal tenant, salt and adapter
  std::string adapter;
  bool no_prefix_read = false;  // every prompt position is to be computed (prompt log-probabilities)
  bool no_prefix = false;       // likewise, and what is computed is of use to no other request
  bool whole = false;           // the prompt is computed in one step (encoders, whose tokens see those behind them)
  // Sits out of a step that samples until mask_ready(seq), each token anew. If the mask is missing at the draw all the
  // same, the result has no token, and the sequence runs that position again after the next mask_ready.
  bool needs_mask = false;
};

// What one item of a plan gave. Filled by the engine but for `accepted`.
struct SeqResult {
  SeqId seq = 0;
  // The sampled token; for a verification the accepted draft tokens and the one after them; empty
  // for a prefill chunk that did not sample. Results of chunks that sample nothing may be left out.
  // Empty also where a mask came late, which the first token's and those of beams must not.
  std::span<const int32_t> tokens;
  bool stop = false;    // its last token ends the sequence (stop token, end of sequence, grammar's end)
  int32_t parent = -1;  // beams only: the choice this one continues from now on
  // Out: how many of `tokens` count. 0: the sequence had ended before (an overrun), publish nothing.
  int32_t accepted = 0;
};

struct Notice {
  enum class Kind : uint8_t {
    admitted,   // first admission of a request; cached_tokens is known
    finished,   // one choice: `reason`; output_tokens is final
    expired,    // the request's deadline passed; all its choices ended
    cancelled,  // the request; all its choices ended
    preempted,  // a choice lost its pages; it will run again by itself
    resumed,    // a preempted choice runs again
    released,   // nothing of the request is left; its id may be used again
  };
  enum class Reason : uint8_t { none, stop, length };
  Kind kind = Kind::admitted;
  Reason reason = Reason::none;
  RequestId request = 0;
  SeqId seq = 0;
  int32_t choice = 0;
  int64_t cached_tokens = 0;
  int64_t output_tokens = 0;
};

struct Stats {
  int64_t running = 0, waiting = 0;  // sequences whose request is not paused
  int64_t paused = 0;                // of paused requests, whatever they hold
  int64_t swapped = 0;               // whose pages are in the second tier
  int64_t preempted = 0;             // that ran, wait again and are not paused
  int64_t waiting_tokens = 0;
  int64_t pages_total = 0, pages_free = 0, pages_cached = 0;  // group 0; cached: kept for prefixes, unused
  int64_t host_pages_total = 0, host_pages_free = 0;
  int64_t requests = 0, refused = 0, finished = 0, cancelled = 0, expired = 0, preemptions = 0, swaps = 0;
  int64_t steps = 0;
  int64_t steps_cut = 0;  // that took up fewer prompt tokens, for max_step_ms
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0, recomputed_tokens = 0;
  double tokens_per_second = 0;  // computed tokens, a moving average
  double outputs_per_second = 0;
  double expected_wait_s = 0, wait_bound_s = 0;  // of one that came now, last of all; 0: no bound
};

class Scheduler {
 public:
  static Result<std::unique_ptr<Scheduler>> create(const Settings& options);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;

  // The SeqId of choice 0; choice c is that plus c. A refusal for load carries retry_after.
  Result<SeqId> submit(Submission submission, Time now);

  Status cancel(RequestId request);
  // A reader that is slow: its request keeps its pages while nobody else needs them.
  Status pause(RequestId request);
  Status resume(RequestId request);
  // The text ended after this many output tokens; later ones are discarded.
  Status stop_at(SeqId seq, int64_t output_tokens);
  // The grammar's mask for the next token is there, or will be before it is drawn.
  Status mask_ready(SeqId seq);
  // Proposed next tokens, verified in the next step this sequence runs in.
  Status propose(SeqId seq, std::vector<int32_t> draft);

  // Ends what has expired, admits, preempts, and says what to run. `plan` is reused by the caller.
  // At most `depth` plans may be unretired.
  void next_step(Time now, StepPlan& plan);
  StepPlan next_step(Time now) {
    StepPlan plan;
    next_step(now, plan);
    return plan;
  }

  // The oldest unretired plan is done. Its copies and moves are done too.
  void advance(std::span<SeqResult> results, Time now);

  // What happened since the last call, in order. Swapped with `out`, which is cleared first.
  void take_events(std::vector<Notice>& out);

  // Prompt and known output of a live sequence; empty when there is none.
  std::span<const int32_t> tokens(SeqId seq) const;
  bool alive(SeqId seq) const;  // it exists and is not over
  int in_flight() const;
  bool idle() const;                    // nothing is running, waiting, paused or in flight
  std::optional<Time> wake_at() const;  // the next deadline that next_step should see
  Stats stats() const;
  Stats brief_stats() const;     // without counting sequences by state: the same in a few nanoseconds
  const StepCost& cost() const;  // what steps take, as far as it has learned
  void flush_recording();        // what is recorded reaches its file
  void flush_prefix_cache();     // forgets what nobody is using
  std::vector<RequestId> live_requests() const;

  // Every page is owned as often as it is counted, every request is in one place: a crash if not.
  void check_integrity() const;

 private:
  struct State;
  class PlanMaker;
  explicit Scheduler(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace kvasir::scheduler
