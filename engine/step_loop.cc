#include "engine/step_loop.h"

#include <algorithm>

#include "core/cat.h"
#include "core/check.h"
#include "core/log.h"

namespace kvasir::engine {
namespace {

using std::chrono::microseconds;

Time now() { return std::chrono::steady_clock::now(); }
float us(Duration d) { return std::chrono::duration<float, std::micro>(d).count(); }
double seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

constexpr size_t kRecentSteps = 256;

}  // namespace

StepLoop::StepLoop(const EngineOptions& options, model::Runner& runner, std::unique_ptr<scheduler::Scheduler> scheduler,
                   const std::vector<int32_t>& end_of_generation, Mailbox& mailbox, GrammarWorker* grammars,
                   Publisher& publisher, Watchdog& watchdog, Shared& shared)
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
                             .most_pages = (runner.info().context_length + options.page_size - 1) / options.page_size,
                             .depth = runner.depth()}) {
  publish_stats();
}

void StepLoop::run() {
  for (;;) {
    mailbox_.take(mail_);
    handle(mail_, now());
    bool over = shared_.cut_short.load() || (shared_.draining.load() && shared_.waiting_requests.load() == 0);
    if (over && (shared_.cut_short.load() || scheduler_->idle())) break;
    if (!step()) sleep();
  }
  mailbox_.close(mail_);
  handle(mail_, now());
  for (auto& [number, job] : std::unordered_map(jobs_)) fail(*job, unavailable("the server is shutting down"));
  while (!in_flight_.empty()) finish_oldest();
  drain_events();
  flush_records();
  publish_stats();
  watchdog_.working(false);
  scheduler_->check_integrity();
}

// Nothing can run now. Either there is nothing at all, or what there is waits for a reader, a mask or a time.
void StepLoop::sleep() {
  auto stats = scheduler_->stats();
  bool waits_for_others = masks_outstanding_ > 0 || !paused_.empty();
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

// ---- mail

void StepLoop::handle(Mailbox::Mail& mail, Time at) {
  for (const JobPtr& job : mail.submitted) submit(job, at);
  for (const JobPtr& job : mail.touched) {
    job->touched.exchange(false, std::memory_order_acq_rel);
    look_at(*job, at);
  }
  mail.submitted.clear();
  mail.touched.clear();
  if (shared_.flush.exchange(false)) scheduler_->flush_prefix_cache();
}

void StepLoop::submit(const JobPtr& job, Time at) {
  const Request& r = job->request;
  Status refused = job->failure;  // the grammar did not compile
  if (refused.ok() && job->cancel_requested.load()) {
    job->ended = true;
    leave_queue(*job);
    records_.push_back({Record::Kind::cancelled, false, 0, FinishReason::cancelled, job});
    return;
  }
  bool has_grammar = r.grammar.kind != text::GrammarSpec::Kind::none;
  if (refused.ok()) {
    scheduler::Submission s;
    s.id = job->number;
    s.tenant = r.tenant;
    s.prompt = r.prompt;
    s.n = r.n;
    s.max_new = r.max_tokens;
    s.priority = r.priority;
    s.deadline = r.deadline;
    s.cache_salt = r.cache_salt;
    s.no_prefix_read = r.prompt_logprobs >= 0;
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
  records_.push_back({Record::Kind::failed, false, 0, FinishReason::cancelled, job});
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
    if (choice.mask_pending && choice.mask_done.exchange(false, std::memory_order_acq_rel)) {
      choice.mask_pending = false;
      --masks_outstanding_;
      if (!choice.ended) (void)scheduler_->mask_ready(seq);
    }
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

// A mask takes some 100 us and a step many milliseconds: better a short wait than a step sat out.
void StepLoop::wait_for_masks() {
  Duration most = std::min<Duration>(std::max<Duration>(last_step_ / 20, microseconds(300)), microseconds(5000));
  Time until = now() + most;
  while (masks_outstanding_ > 0 && now() < until) {
    mailbox_.wait(mail_, until);
    handle(mail_, now());
  }
}

// ---- a step

bool StepLoop::step() {
  if (masks_outstanding_ > 0 && in_flight_.empty()) wait_for_masks();
  if (!paused_.empty()) end_slow_readers(now());
  while (int(in_flight_.size()) < runner_.depth() && launch_next()) {
  }
  flush_records();
  if (in_flight_.empty()) return false;
  finish_oldest();
  return true;
}

bool StepLoop::launch_next() {
  Time began = now();
  scheduler_->next_step(began, plan_);
  drain_events();
  if (plan_.empty()) return false;
  watchdog_.working(true);
  std::unique_ptr<PackedStep> packed;
  if (spare_.empty()) {
    packed = std::make_unique<PackedStep>();
  } else {
    packed = std::move(spare_.back());
    spare_.pop_back();
  }
  builder_.pack(
      plan_,
      [this](uint64_t request) -> const JobPtr& {
        auto it = jobs_.find(request);
        KVASIR_CHECK(it != jobs_.end(), "the plan names request ", request, ", which the engine does not know");
        return it->second;
      },
      in_flight_.empty() ? nullptr : in_flight_.back().get(), *packed);
  packed->began = began;
  packed->planned = now();
  flush_records();  // endings and starts need not wait for the step
  Status launched = runner_.launch(packed->batch, packed->rows);
  packed->failed = !launched.ok();
  in_flight_.push_back(std::move(packed));
  if (!launched.ok()) fail_step(*in_flight_.back(), launched);
  return true;
}

void StepLoop::finish_oldest() {
  std::unique_ptr<PackedStep> step = std::move(in_flight_.front());
  in_flight_.pop_front();
  std::vector<model::Sampled> sampled;
  if (!step->failed) {
    auto waited = runner_.wait();
    if (waited.ok()) {
      sampled = std::move(*waited);
      KVASIR_CHECK(sampled.size() == step->rows.size(), "the runner gave ", sampled.size(), " of ", step->rows.size(),
                   " rows");
    } else {
      step->failed = true;
      fail_step(*step, waited.status());
    }
  }
  Time ran = now();
  watchdog_.beat();
  draws_.clear();
  results_.clear();
  if (!step->failed) take_results(*step, sampled);
  scheduler_->advance(results_, ran);
  publish_draws();
  drain_events();

  Time done = now();
  last_step_ = ran - step->planned;
  auto stats = scheduler_->stats();
  StepSample sample{step->batch.step,   step->began,       done,
                    step->decodes,      step->prefills,    int64_t(step->batch.tokens.size()),
                    stats.running,      stats.waiting,     stats.pages_free,
                    stats.pages_cached, stats.pages_total, us(step->planned - step->began),
                    us(last_step_),     us(done - ran)};
  step_time_.add(seconds(last_step_));
  batch_size_.add(double(step->batch.size()));
  step_tokens_.add(double(sample.tokens));
  {
    std::lock_guard lock(shared_.mutex);
    shared_.recent.push_back(sample);
    if (shared_.recent.size() > kRecentSteps) shared_.recent.pop_front();
  }
  flush_records(sample);
  publish_stats();
  step->jobs.clear();  // a spare holds on to nobody
  step->owners.clear();
  spare_.push_back(std::move(step));
}

void StepLoop::take_results(PackedStep& step, std::vector<model::Sampled>& sampled) {
  for (size_t i = 0; i < sampled.size(); ++i) {
    RowOwner& owner = step.owners[i];
    Job& job = *owner.job;
    if (job.ended) continue;
    if (sampled[i].bad_logits) {
      fail(job, internal_error("the model gave logits that are not numbers for this request (NaN or Inf); its "
                               "weights or this prompt are at fault"));
      continue;
    }
    if (owner.prompt_position >= 0) {
      TokenOut& out = job.prompt_logprobs[size_t(owner.prompt_position)];
      out.logprob = sampled[i].logprob;
      out.top = std::move(sampled[i].top);
      job.scored = std::max(job.scored, owner.prompt_position);
      if (job.scored + 1 == int32_t(job.request.prompt.size())) start_stream(owner.job);
      continue;
    }
    bool stop = std::binary_search(job.stop_set.begin(), job.stop_set.end(), sampled[i].token);
    draws_.push_back({&owner, stop, &sampled[i]});
  }
  // After the loop: a request may have failed by a later row.
  std::erase_if(draws_, [](const Draw& d) { return d.owner->job->ended || !d.owner->job->failure.ok(); });
  for (const Draw& d : draws_) {
    scheduler::SeqResult r;
    r.seq = d.owner->seq;
    r.tokens = {&d.sampled->token, 1};
    r.stop = d.stop;
    results_.push_back(r);
  }
}

void StepLoop::publish_draws() {
  for (size_t i = 0; i < draws_.size(); ++i) {
    if (results_[i].accepted == 0) continue;  // past its end
    const RowOwner& owner = *draws_[i].owner;
    model::Sampled& sampled = *draws_[i].sampled;
    Choice& choice = owner.job->choices[size_t(owner.choice)];
    ++choice.drawn;
    if (draws_[i].stop) choice.stop_token = sampled.token;
    Record record{Record::Kind::token, draws_[i].stop, owner.choice, FinishReason::length, owner.job};
    record.token = {sampled.token, sampled.logprob, std::move(sampled.top)};
    records_.push_back(std::move(record));
  }
  size_t draws = draws_.size();
  drain_events();  // a choice that just ended needs no mask
  for (size_t i = 0; i < draws; ++i) {
    const RowOwner& owner = *draws_[i].owner;
    Choice& choice = owner.job->choices[size_t(owner.choice)];
    if (!choice.matcher || choice.ended || owner.job->ended || results_[i].accepted == 0) continue;
    choice.mask_pending = true;
    ++masks_outstanding_;
    grammars_->advance(owner.job, owner.choice, draws_[i].sampled->token, choice.drawn);
  }
}

// ---- endings

void StepLoop::drain_events() {
  scheduler_->take_events(events_);
  for (const scheduler::Event& e : events_) on_event(e);
}

void StepLoop::on_event(const scheduler::Event& event) {
  JobPtr job = find(event.request);
  if (!job) return;
  using Kind = scheduler::Event::Kind;
  switch (event.kind) {
    case Kind::admitted:
      job->admitted = true;
      job->cached_tokens = event.cached_tokens;
      leave_queue(*job);
      queued_.add(seconds(now() - job->arrived));
      if (job->request.prompt_logprobs < 0 || job->request.prompt.size() == 1) start_stream(job);
      return;
    case Kind::finished: {
      Choice& choice = job->choices[size_t(event.choice)];
      choice.ended = true;
      Record record{Record::Kind::finished, false, event.choice, FinishReason::length, job};
      if (event.reason == scheduler::Event::Reason::stop) {
        record.reason = choice.stop_token >= 0 ? FinishReason::stop_token : FinishReason::stop_string;
        record.token.id = choice.stop_token;
      }
      records_.push_back(std::move(record));
      return;
    }
    case Kind::expired:
      if (job->failure.ok())
        job->failure =
            Status(Code::deadline_exceeded, job->admitted ? "the deadline passed before the answer was complete"
                                                          : "the deadline passed while the request was waiting");
      [[fallthrough]];
    case Kind::cancelled: {
      job->ended = true;
      leave_queue(*job);
      auto kind = job->failure.ok() ? Record::Kind::cancelled : Record::Kind::failed;
      records_.push_back({kind, false, 0, FinishReason::cancelled, job});
      return;
    }
    case Kind::preempted:
    case Kind::resumed: return;  // the client need not know
    case Kind::released:
      job->ended = true;
      if (job->paused) std::erase(paused_, job);
      for (Choice& choice : job->choices)
        if (choice.mask_pending) --masks_outstanding_, choice.mask_pending = false;
      jobs_.erase(event.request);
      return;
  }
}

void StepLoop::fail(Job& job, Status status) {
  if (job.ended || !job.failure.ok()) return;
  job.failure = std::move(status);
  (void)scheduler_->cancel(job.number);
}

void StepLoop::fail_step(const PackedStep& step, const Status& why) {
  log_error("a step failed", {{"step", int64_t(step.batch.step)}, {"why", why.message()}});
  for (const JobPtr& job : step.jobs) fail(*job, why);
}

void StepLoop::leave_queue(Job& job) {
  if (job.left_queue) return;
  job.left_queue = true;
  shared_.waiting_requests.fetch_sub(1);
  shared_.waiting_tokens.fetch_sub(int64_t(job.request.prompt.size()));
}

void StepLoop::start_stream(const JobPtr& job) {
  if (job->started) return;
  job->started = true;
  records_.push_back({Record::Kind::started, false, 0, FinishReason::length, job});
}

JobPtr StepLoop::find(uint64_t number) const {
  auto it = jobs_.find(number);
  return it == jobs_.end() ? nullptr : it->second;
}

void StepLoop::flush_records(std::optional<StepSample> sample) {
  publisher_.post(std::move(records_), std::move(sample));
  records_.clear();
}

void StepLoop::publish_stats() {
  scheduler::Stats s = scheduler_->stats();
  shared_.tokens_per_second.store(s.tokens_per_second, std::memory_order_relaxed);
  std::lock_guard lock(shared_.mutex);
  Stats& out = shared_.stats;
  out.running = s.running;
  out.paused = s.paused;
  out.pages_total = s.pages_total;
  out.pages_free = s.pages_free;
  out.pages_cached = s.pages_cached;
  out.prompt_tokens = s.prompt_tokens;
  out.cached_tokens = s.cached_tokens;
  out.preemptions = s.preemptions;
  out.moved = s.swaps;
  out.steps = s.steps;
  out.tokens_per_second = s.tokens_per_second;
  out.step_time = step_time_;
  out.queued = queued_;
  out.batch_size = batch_size_;
  out.step_tokens = step_tokens_;
}

}  // namespace kvasir::engine
