// One step: plan, launch, wait, advance, publish.
#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "engine/step_loop.h"

namespace kvasir::engine {
namespace {

float us(Duration d) { return std::chrono::duration<float, std::micro>(d).count(); }
double seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

constexpr size_t kRecentSteps = 256;
constexpr double kNewest = 0.125;  // weight in moving averages

using std::chrono::microseconds;

// How long one request's masks may keep a model with states waiting, in all.
constexpr Duration kMostMaskWait = std::chrono::seconds(1);
constexpr Duration kQuickMask = std::chrono::milliseconds(5);  // costs a request nothing of that

}  // namespace

bool StepLoop::step() {
  if (!paused_.empty()) end_slow_readers(now());
  // What follows a constrained draw, or a draft, is planned when it is known; launched meanwhile, a step would lack
  // that sequence.
  while (int(in_flight_.size()) < runner_.depth() &&
         (in_flight_.empty() || (!in_flight_.back()->constrained && !drafting_)) && launch_next()) {
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
  if (packed->constrained) {
    grammars_->begin_step();
    // For each token that a sequence may get, and not much longer than for one where it may get many.
    packed->batch.wait_for_masks = [this, step = packed.get(), end = std::optional<Time>()]() mutable {
      if (runner_.info().state_bytes > 0) return wait_for_all_masks(*step);
      const Duration once = std::clamp<Duration>(last_step_ / 8, microseconds(500), microseconds(5000));
      if (!end) end = now() + 4 * once;
      grammars_->wait(std::min(*end, now() + once));
    };
  }
  if (draft_model_ && options_.max_draft > 0)
    draft_model_->lend_places(int64_t(packed->batch.tokens.size()), packed->batch.kept_at);
  packed->began = began;
  packed->ahead = !in_flight_.empty();
  packed->planned = now();
  flush_records();  // endings and starts need not wait for the step
  Status launched = runner_.launch(packed->batch, packed->rows);
  packed->failed = !launched.ok();
  in_flight_.push_back(std::move(packed));
  if (!launched.ok()) fail_step(*in_flight_.back(), launched);
  return true;
}

// A sequence with a state cannot run its last position again: its mask is waited for, as long as the request may keep
// all that run beside it waiting. Each pays for its own masks, and only for slow ones: whoever waits beside it does
// not.
void StepLoop::wait_for_all_masks(const PackedStep& step) {
  std::vector<std::pair<Job*, ChoiceGrammar*>> waited_for;
  Duration most{0};
  for (const RowOwner& owner : step.owners) {
    ChoiceGrammar* grammar = owner.job->choices[size_t(owner.choice)].grammar.get();
    if (!grammar || !grammar->pending() || (!waited_for.empty() && waited_for.back().second == grammar)) continue;
    waited_for.emplace_back(owner.job.get(), grammar);
    most = std::max(most, std::max(kQuickMask, kMostMaskWait - owner.job->mask_wait));
  }
  const Time began = now();
  grammars_->wait(began + most);
  const Duration waited = now() - began;
  for (const auto& [job, grammar] : waited_for) {
    const Duration own = grammar->is_computed() ? std::min(waited, grammar->mask_took()) : waited;
    job->mask_wait += std::max<Duration>(own - kQuickMask, Duration(0));
  }
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
  if (!step->failed && runner_.depth() > 1) compare_overlap(*step, ran);
  draws_.clear();
  results_.clear();
  drawn_.clear();
  if (!step->failed) take_results(*step, sampled);
  scheduler_->advance(results_, ran);
  publish_draws();
  drain_events();

  Time done = now();
  last_step_ = ran - std::max(step->planned, last_ran_);  // it waited for the step before, if that was in flight
  last_ran_ = ran;
  auto stats = scheduler_->stats();
  StepSample sample{step->batch.step,   step->began,       done,
                    step->decodes,      step->prefills,    int64_t(step->batch.tokens.size()),
                    stats.running,      stats.waiting,     stats.pages_free,
                    stats.pages_cached, stats.pages_total, us(step->planned - step->began),
                    us(last_step_),     us(done - ran)};
  for (const Draw& draw : draws_) sample.late += draw.sampled->late;
  step_time_.add(seconds(last_step_));
  batch_size_.add(double(step->batch.size()));
  step_tokens_.add(double(sample.tokens));
  const int64_t handled = stats.prompt_tokens + stats.output_tokens;
  handled_tokens_.add(double(handled - std::exchange(handled_before_, handled)));
  {
    std::lock_guard lock(shared_.mutex);
    shared_.recent.push_back(sample);
    if (shared_.recent.size() > kRecentSteps) shared_.recent.pop_front();
  }
  publish_stats();  // first: who has read his last event finds this step in what stats() says
  flush_records(sample);
  show_states(*step);
  propose_drafts();    // a draft model takes its time, and nobody is to wait for what is drawn
  step->jobs.clear();  // a spare holds on to nobody
  step->owners.clear();
  spare_.push_back(std::move(step));
}

// What a step without prompts takes, launched ahead of the end of the one before it or after it.
void StepLoop::compare_overlap(const PackedStep& step, Time ran) {
  if (step.prefills > 0) return;
  double& mean = step.ahead ? ahead_us_ : alone_us_;
  const double took = us(ran - (step.ahead ? last_ran_ : step.began));
  mean = mean == 0 ? took : mean + kNewest * (std::min(took, 4 * mean) - mean);  // one that was held up is an exception
}

void StepLoop::take_results(PackedStep& step, std::vector<model::Sampled>& sampled) {
  bool draft_holds = false;  // of the verification whose rows these are, so far
  bool late = false;         // a mask was, in it: from there on nothing was judged
  for (size_t i = 0; i < sampled.size(); ++i) {
    RowOwner& owner = step.owners[i];
    Job& job = *owner.job;
    if (job.ended) continue;
    ChoiceDrafts& drafts = job.choices[size_t(owner.choice)].drafts;
    late = (late && owner.after_draft) || sampled[i].late;
    if (owner.after_draft && !late) {
      ++counts_[size_t(drafts.source)].drafted;
      draft_runs_ += i == 0 || !step.owners[i - 1].after_draft;
      job.drafted.fetch_add(1, std::memory_order_relaxed);
    }
    if (owner.after_draft && !draft_holds) continue;
    draft_holds = false;
    if (job.mask_failed.load(std::memory_order_acquire)) {
      fail(job, job.mask_status);
      continue;
    }
    if (sampled[i].bad_logits) {
      fail(job, internal_error("the model gave logits that are not numbers for this request (NaN or Inf); its "
                               "weights or this prompt are at fault"));
      continue;
    }
    if (sampled[i].late && runner_.info().state_bytes > 0) {
      fail(job,
           resource_exhausted("what this request's grammar allows took more than a second to find out, in all, and "
                              "a model with recurrent states keeps others waiting meanwhile; ask for a simpler "
                              "schema or grammar"));
      continue;
    }
    if (sampled[i].nothing_allowed) {
      fail(job,
           internal_error("no token may follow what this request has drawn: its grammar, its allowed_token_ids and "
                          "what else holds for it leave none"));
      continue;
    }
    if (owner.scored >= 0) {
      job.pooled[size_t(owner.scored)] = sampled[i].logprob;
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
    draft_holds = !stop && sampled[i].token == owner.draft;
    if (owner.draft >= 0 && !late) {
      drafts.verified(draft_holds);
      if (drafts.source == DraftSource::model) model_right_ += kNewest / 2 * (double(draft_holds) - model_right_);
    }
    draws_.push_back({&owner, stop, &sampled[i]});
  }
  // After the loop: a request may have failed by a later row.
  std::erase_if(draws_, [](const Draw& d) { return d.owner->job->ended || !d.owner->job->failure.ok(); });
  advance_searches();
  gather_results();
}

// One of each sequence: its token, or of a verification the accepted ones and the one after them.
void StepLoop::gather_results() {
  drawn_.reserve(draws_.size());  // results_ point into it
  for (Draw& d : draws_) {
    d.result = results_.size();
    if (d.owner->after_draft) {
      scheduler::SeqResult& r = results_.back();
      --d.result, d.place = r.tokens.size();
      if (d.sampled->late) continue;  // the step ends with the token before
      drawn_.push_back(d.sampled->token);
      r.tokens = {r.tokens.data(), r.tokens.size() + 1};
      r.stop = d.stop;
      continue;
    }
    scheduler::SeqResult r;
    r.seq = d.owner->seq;
    if (const auto& beams = d.owner->job->beams) {
      const BeamSearch::Next& next = beams->next()[size_t(d.owner->choice)];
      r.tokens = {&next.token, 1};
      r.parent = next.parent;
      r.stop = beams->done();
      results_.push_back(r);
      continue;
    }
    drawn_.push_back(d.sampled->token);
    r.tokens = {&drawn_.back(), d.sampled->late ? 0u : 1u};
    r.stop = d.stop;
    results_.push_back(r);
  }
}

// All beams of a search are in the same step, by choice; before the first token they are one row.
void StepLoop::advance_searches() {
  for (size_t i = 0; i < draws_.size(); ++i) {
    Job& job = *draws_[i].owner->job;
    if (!job.beams || draws_[i].owner->choice != 0) continue;
    std::vector<std::span<const model::TokenLogprob>> rows(size_t(job.beams->width()));
    for (const Draw& d : draws_)
      if (d.owner->job.get() == &job) rows[size_t(d.owner->choice)] = d.sampled->top;
    if (!job.beams->begun()) rows.resize(1);
    job.beams->advance(rows);
  }
}

void StepLoop::publish_draws() {
  const size_t before = records_.size();
  for (const Draw& draw : draws_) {
    if (size_t(results_[draw.result].accepted) <= draw.place) continue;  // past its end, or without its mask
    const RowOwner& owner = *draw.owner;
    if (owner.job->beams) continue;  // its answers come at the end
    model::Sampled& sampled = *draw.sampled;
    Choice& choice = owner.job->choices[size_t(owner.choice)];
    if (draw.stop) choice.stop_token = sampled.token;
    if (owner.after_draft) {
      ++counts_[size_t(choice.drafts.source)].accepted;
      owner.job->accepted.fetch_add(1, std::memory_order_relaxed);
    }
    Publication record{Publication::Kind::token, draw.stop, owner.choice, FinishReason::length, owner.job};
    record.token = {sampled.token, sampled.logprob, std::move(sampled.top)};
    records_.push_back(std::move(record));
  }
  const size_t drawn = records_.size();
  drain_events();  // a choice that just ended needs no mask
  mark_last(before, drawn);
  for (const Draw& draw : draws_)
    if (size_t(results_[draw.result].accepted) == draw.place + 1 && !draw.owner->job->beams) plan_mask(*draw.owner);
}

// Of the tokens among records_[from, to): those that ended their choice. A verification gives several of one choice.
void StepLoop::mark_last(size_t from, size_t to) {
  for (size_t i = from; i < to; ++i) {
    Publication& record = records_[i];
    if (record.kind != Publication::Kind::token || !record.job->choices[size_t(record.choice)].ended) continue;
    const bool more = i + 1 < to && records_[i + 1].job == record.job && records_[i + 1].choice == record.choice;
    record.last = !more;
  }
}

// The next draw is tried without a mask, and most often right. Only where a mask takes longer than a step it is
// computed before, and the sequence sits out until it is there.
void StepLoop::plan_mask(const RowOwner& owner) {
  Choice& choice = owner.job->choices[size_t(owner.choice)];
  if (!choice.grammar || choice.ended || owner.job->ended) return;
  if (choice.grammar->pending()) return;  // of a verification that it cut short: look_at() is told when it is there
  if (choice.grammar->mask_took() > std::max<Duration>(last_step_, microseconds(5000)))
    choice.grammar->ask(true);
  else
    (void)scheduler_->mask_ready(owner.seq);
}

void StepLoop::fail_step(const PackedStep& step, const Status& why) {
  log_error("a step failed", {{"step", int64_t(step.batch.step)}, {"why", why.message()}});
  if (Status lost = runner_.lost(); !lost.ok()) {
    std::lock_guard lock(shared_.mutex);
    shared_.lost = std::move(lost);
  }
  for (const JobPtr& job : step.jobs) fail(*job, why);
}

void StepLoop::publish_stats() {
  scheduler::Stats s = scheduler_->stats();
  shared_.tokens_per_second.store(s.tokens_per_second, std::memory_order_relaxed);
  std::lock_guard lock(shared_.mutex);
  Stats& out = shared_.stats;
  out.running = s.running;
  out.expected_wait = s.expected_wait_s;
  out.wait_bound = s.wait_bound_s;
  out.paused = s.paused;
  out.waiting = s.preempted;
  out.pages_total = s.pages_total;
  out.pages_free = s.pages_free;
  out.pages_cached = s.pages_cached;
  out.prompt_tokens = s.prompt_tokens;
  out.cached_tokens = s.cached_tokens;
  out.preemptions = s.preemptions;
  out.moved = s.swaps;
  out.steps = s.steps;
  out.steps_cut = s.steps_cut;
  out.experts = runner_.expert_load();
  out.drafts = counts_;
  out.draft_runs = draft_runs_;
  if (draft_model_) {
    out.draft_model.pages_total = draft_model_->pages();
    out.draft_model.pages_free = draft_model_->free_pages();
    out.draft_model.seconds = draft_model_->seconds();
  }
  out.tokens_per_second = s.tokens_per_second;
  out.outputs_per_second = s.running > 0 ? s.outputs_per_second : 0;
  out.step_time = step_time_;
  out.queued = queued_;
  out.batch_size = batch_size_;
  out.step_tokens = step_tokens_;
  out.handled_tokens = handled_tokens_;
}

}  // namespace kvasir::engine
