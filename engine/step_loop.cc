// The life of the step thread: it reads its mail, steps while there is something to run, and sleeps.
#include "engine/step_loop.h"

#include <algorithm>

#include "core/cat.h"
#include "core/check.h"
#include "core/log.h"

namespace kvasir::engine {

StepLoop::StepLoop(const EngineOptions& options, model::Runner& runner, std::unique_ptr<scheduler::Scheduler> scheduler,
                   const std::vector<int32_t>& end_of_generation, Mailbox& mailbox, GrammarWorker* grammars,
                   std::unique_ptr<Drafter> draft_model, Publisher& publisher, Watchdog& watchdog, Shared& shared)
    : options_(options),
      runner_(runner),
      scheduler_(std::move(scheduler)),
      end_of_generation_(end_of_generation),
      mailbox_(mailbox),
      grammars_(grammars),
      publisher_(publisher),
      watchdog_(watchdog),
      shared_(shared),
      builder_(*scheduler_, {.page_size = options.page_size,
                             .index_mode = options.kv_index,
                             .most_pages = (runner.info().context_length + (runner.info().decoder_start >= 0) +
                                            options.page_size - 1) /
                                           options.page_size,
                             .depth = runner.depth(),
                             .pooling = runner.info().pooling.pooling,
                             .encodes = runner.info().decoder_start >= 0,
                             .drafted = draft_model != nullptr,
                             .streaming = runner.info().streaming}),
      draft_model_(std::move(draft_model)) {
  if (draft_model_) shared_.stats.draft_model.name = draft_model_->info().name;
  publish_stats();
}

void StepLoop::run() {
  for (;;) {
    mailbox_.take(mail_);
    handle(mail_, now());
    bool over = shared_.cut_short.load() || (shared_.draining.load() && shared_.waiting.all().requests == 0);
    if (over && (shared_.cut_short.load() || scheduler_->idle())) break;
    if (!step()) sleep();
  }
  mailbox_.close(mail_);
  if (grammars_ != nullptr) grammars_->end();
  handle(mail_, now());
  for (auto& [number, job] : std::unordered_map(jobs_)) fail(*job, unavailable("the server is shutting down"));
  while (!in_flight_.empty()) finish_oldest();
  drain_events();
  publish_stats();
  flush_records();
  watchdog_.working(false);
  scheduler_->check_integrity();
}

// Nothing can run now. Either there is nothing at all, or what there is waits for a reader, a mask or a time.
void StepLoop::sleep() {
  auto stats = scheduler_->stats();
  bool waits_for_others = !paused_.empty() || waits_for_masks();
  watchdog_.working(!scheduler_->idle() && !waits_for_others);
  if (scheduler_->idle()) {
    scheduler_->check_integrity();
    KVASIR_CHECK(stats.pages_free + stats.pages_cached == stats.pages_total, "idle with ", stats.pages_free,
                 " free and ", stats.pages_cached, " cached of ", stats.pages_total, " pages");
  }
  publish_stats();
  scheduler_->flush_recording();
  std::optional<Time> until = scheduler_->wake_at();
  for (const JobPtr& job : paused_) {
    Time limit = job->paused_since + options_.slow_reader_limit;
    until = until ? std::min(*until, limit) : limit;
  }
  mailbox_.wait(mail_, until);
  Time at = now();
  handle(mail_, at);
  end_slow_readers(at);
}

void StepLoop::handle(Mailbox::Mail& mail, Time at) {
  for (const JobPtr& job : mail.submitted) submit(job, at);
  for (const JobPtr& job : mail.touched) {
    job->touched.exchange(false, std::memory_order_acq_rel);
    look_at(*job, at);
  }
  mail.submitted.clear();
  mail.touched.clear();
  if (shared_.flush.exchange(false)) {
    scheduler_->flush_prefix_cache();
    if (draft_model_) draft_model_->forget_ended();
  }
}

void StepLoop::submit(const JobPtr& job, Time at) {
  const Request& r = job->request;
  Status refused = job->failure;  // the grammar did not compile
  if (refused.ok() && job->cancel_requested.load()) {
    job->ended = true;
    leave_queue(*job);
    records_.push_back({Publication::Kind::cancelled, false, 0, FinishReason::cancelled, job});
    return;
  }
  const bool has_grammar = r.constrained();
  if (refused.ok()) {
    scheduler::Submission s;
    s.id = job->number;
    s.tenant = r.tenant;
    s.prompt = r.prompt;
    s.n = r.beams ? r.beams->width : r.n;
    s.beam = r.beams.has_value();
    s.max_new = r.max_tokens;
    s.priority = r.priority;
    s.weight = r.weight;
    s.deadline = r.deadline;
    s.cache_salt = r.cache_salt;
    if (job->adapter) s.adapter = job->adapter->cache_key;
    s.no_prefix_read = r.prompt_logprobs >= 0;
    // What all of a prompt's tokens give is of use to no other prompt, and needs them all.
    const bool whole = runner_.info().encoder || runner_.info().decoder_start >= 0;
    s.no_prefix = whole || (r.pooled && r.scored.empty() && runner_.info().pooling.pooling != model::Pooling::last);
    s.whole = whole;
    s.needs_mask = has_grammar;
    auto seq = scheduler_->submit(std::move(s), at);
    if (seq.ok()) {
      job->first_seq = *seq;
      job->submitted = true;
      jobs_[job->number] = job;
      if (has_grammar) {  // the first masks are there, of all choices; the others begin when the prompt forks
        Status known = scheduler_->mask_ready(job->first_seq);
        KVASIR_CHECK(known.ok(), known.message());
      }
      return;
    }
    refused = seq.status();
  }
  job->failure = std::move(refused);
  job->ended = true;
  leave_queue(*job);
  records_.push_back({Publication::Kind::failed, false, 0, FinishReason::cancelled, job});
}

void StepLoop::look_at(Job& job, Time at) {
  if (!job.submitted || job.ended) return;
  if (job.cancel_requested.load()) {
    (void)scheduler_->cancel(job.number);  // gone already is fine
    return;
  }
  if (job.mask_failed.load(std::memory_order_acquire)) {
    fail(job, job.mask_status);
    return;
  }
  for (int32_t c = 0; c < job.request.n; ++c) {
    Choice& choice = job.choices[size_t(c)];
    scheduler::SeqId seq = job.first_seq + scheduler::SeqId(c);
    if (choice.grammar && choice.grammar->came() && !choice.ended) (void)scheduler_->mask_ready(seq);
    int64_t stop = choice.stop_at.load(std::memory_order_acquire);
    if (stop >= 0 && !choice.stop_told) {
      choice.stop_told = true;
      if (!choice.ended) (void)scheduler_->stop_at(seq, stop);  // it may have ended by itself
    }
  }
  bool full = job.channel.full();
  if (full && !job.paused) {
    job.paused = true;
    job.paused_since = at;
    paused_.push_back(job.shared_from_this());
    (void)scheduler_->pause(job.number);
  } else if (!full && job.paused) {
    job.paused = false;
    std::erase_if(paused_, [&](const JobPtr& p) { return p.get() == &job; });
    (void)scheduler_->resume(job.number);
  }
}

void StepLoop::end_slow_readers(Time at) {
  for (size_t i = paused_.size(); i-- > 0;) {
    Job& job = *paused_[i];
    if (at - job.paused_since < options_.slow_reader_limit) continue;
    fail(job,
         resource_exhausted(cat("the client read nothing for ",
                                std::chrono::duration_cast<std::chrono::seconds>(options_.slow_reader_limit).count(),
                                " s while its stream was full; the request was ended")));
  }
}

bool StepLoop::waits_for_masks() const {
  for (const auto& [number, job] : jobs_)
    for (const Choice& choice : job->choices)
      if (choice.grammar && choice.grammar->pending()) return true;
  return false;
}

}  // namespace kvasir::engine
