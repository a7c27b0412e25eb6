// The step thread: mail, plan, launch, wait, advance, publish; sleeps when there is nothing to do.
// All scheduler calls are here, and every ending goes through on_event and comes out as one record.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "engine/batch_builder.h"
#include "engine/drafter.h"
#include "engine/grammar_worker.h"
#include "engine/mailbox.h"
#include "engine/publisher.h"
#include "engine/shared.h"
#include "engine/watchdog.h"
#include "scheduler/scheduler.h"

namespace kvasir::engine {

class StepLoop {
 public:
  StepLoop(const EngineOptions& options, model::Runner& runner, std::unique_ptr<scheduler::Scheduler> scheduler,
           const std::vector<int32_t>& end_of_generation, Mailbox& mailbox, GrammarWorker* grammars,
           std::unique_ptr<Drafter> draft_model, Publisher& publisher, Watchdog& watchdog, Shared& shared);

  void run();  // until drained or cut short

 private:
  struct Draw {
    const RowOwner* owner;
    bool stop;
    model::Sampled* sampled;
    size_t result = 0;  // of results_, and which of its tokens
    size_t place = 0;
  };
  static Time now() { return std::chrono::steady_clock::now(); }

  // Mail (step_loop.cc).
  void handle(Mailbox::Mail& mail, Time now);
  void submit(const JobPtr& job, Time now);
  void look_at(Job& job, Time now);
  bool waits_for_masks() const;
  void end_slow_readers(Time now);
  void sleep();

  // A step (step.cc).
  bool step();  // false: there was nothing to run
  bool launch_next();
  void wait_for_all_masks(const PackedStep& step);
  void finish_oldest();
  void compare_overlap(const PackedStep& step, Time ran);
  void take_results(PackedStep& step, std::vector<model::Sampled>& sampled);
  void advance_searches();
  void gather_results();
  void publish_draws();
  void mark_last(size_t from, size_t to);
  void plan_mask(const RowOwner& owner);
  void fail_step(const PackedStep& step, const Status& why);
  void publish_stats();

  // Drafts (drafting.cc).
  struct Draft {
    scheduler::SeqId seq;
    Job* job;
    Choice* choice;
    DraftSource source;
    DraftWorth worth;
    std::vector<int32_t> tokens;      // of a grammar
    std::span<const int32_t> before;  // what is known of the sequence
  };
  struct Gain {  // microseconds: what a right token saves, what any one takes, and a sequence's share of a step
    double gain, price, share;
  };
  void propose_drafts();
  std::optional<Draft> best_draft(const Draw& draw);
  void weigh_lookup(std::span<const int32_t> tokens, const Gain& by, Draft& best) const;
  void weigh_grammar(const Gain& by, Draft& best) const;
  void weigh_model(const Gain& by, Draft& best);
  void propose(Draft& draft, std::vector<int32_t> tokens);
  void ask_draft_model();
  void show_states(PackedStep& step);
  void draft_model_failed(const Status& why);
  void forget_drafts(const Job& job);

  // Endings (endings.cc).
  void drain_events();
  void on_event(const scheduler::Notice& event);
  void fail(Job& job, Status status);
  void leave_queue(Job& job);
  bool finish_pooled(Job& job);
  void publish_answers(const JobPtr& job);
  void start_stream(const JobPtr& job);
  void flush_records(std::optional<StepSample> sample = std::nullopt);
  JobPtr find(uint64_t number) const;

  const EngineOptions& options_;
  model::Runner& runner_;
  const std::unique_ptr<scheduler::Scheduler> scheduler_;
  const std::vector<int32_t>& end_of_generation_;
  Mailbox& mailbox_;
  GrammarWorker* const grammars_;
  Publisher& publisher_;
  Watchdog& watchdog_;
  Shared& shared_;
  const BatchBuilder builder_;

  std::unordered_map<uint64_t, JobPtr> jobs_;  // known to the scheduler
  std::vector<JobPtr> paused_;
  Mailbox::Mail mail_;

  scheduler::StepPlan plan_;
  std::deque<std::unique_ptr<PackedStep>> in_flight_;
  std::vector<std::unique_ptr<PackedStep>> spare_;
  std::vector<Draw> draws_;
  std::vector<scheduler::SeqResult> results_;
  std::vector<int32_t> drawn_;  // the tokens of results_
  std::vector<scheduler::Notice> events_;
  std::vector<Publication> records_;
  DraftCounts counts_{};
  std::vector<Draft> drafts_;
  std::unique_ptr<Drafter> draft_model_;  // null: none, or no more
  std::vector<Drafter::Want> wants_;
  double model_right_ = 0.75;           // share of its tokens that were right, lately and of all sequences
  double model_batch_ = 1;              // sequences that it last drafted for
  int64_t unmodelled_steps_ = 0;        // since
  int first_tries_ = 8;                 // left of them
  bool drafting_ = false;               // the next step is planned when the one in flight is known
  double ahead_us_ = 0, alone_us_ = 0;  // mean step, launched before the one before it ended or after
  Duration last_step_{};
  Time last_ran_{};
  Histogram step_time_ = time_histogram(), queued_ = time_histogram();
  Histogram batch_size_ = size_histogram(), step_tokens_ = size_histogram(), handled_tokens_ = size_histogram();
  int64_t handled_before_ = 0;  // in handled_tokens_ already
  int64_t draft_runs_ = 0;      // drafts that were verified, of whatever length
};

}  // namespace kvasir::engine
