// What the scheduler says happened, and every ending: each goes through on_event and comes out as one record.
#include "engine/step_loop.h"

namespace kvasir::engine {

void StepLoop::drain_events() {
  scheduler_->take_events(events_);
  for (const scheduler::Notice& e : events_) on_event(e);
}

void StepLoop::on_event(const scheduler::Notice& event) {
  JobPtr job = find(event.request);
  if (!job) return;
  using Kind = scheduler::Notice::Kind;
  switch (event.kind) {
    case Kind::admitted:
      job->admitted = true;
      job->cached_tokens = event.cached_tokens;
      leave_queue(*job);
      queued_.add(std::chrono::duration<double>(now() - job->arrived).count());
      if (job->request.prompt_logprobs < 0 || job->request.prompt.size() == 1) start_stream(job);
      return;
    case Kind::finished: {
      if (job->beams) {
        if (++job->beams_ended == job->beams->width()) publish_answers(job);
        return;
      }
      Choice& choice = job->choices[size_t(event.choice)];
      choice.ended = true;
      if (draft_model_) draft_model_->forget(event.seq);
      if (job->request.pooled && !finish_pooled(*job)) {
        records_.push_back({Publication::Kind::failed, false, 0, FinishReason::cancelled, job});
        return;
      }
      Publication record{Publication::Kind::finished, false, event.choice, FinishReason::length, job};
      if (event.reason == scheduler::Notice::Reason::stop) {
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
      auto kind = job->failure.ok() ? Publication::Kind::cancelled : Publication::Kind::failed;
      records_.push_back({kind, false, 0, FinishReason::cancelled, job});
      return;
    }
    case Kind::preempted: job->preempted.fetch_add(1, std::memory_order_relaxed); return;
    case Kind::resumed: return;  // the client need know neither
    case Kind::released:
      job->ended = true;
      if (job->paused) std::erase(paused_, job);
      forget_drafts(*job);
      jobs_.erase(event.request);
      return;
  }
}

// False: it came to nothing, and why is said.
bool StepLoop::finish_pooled(Job& job) {
  const Request& r = job.request;
  if (!job.failure.ok()) return false;
  if (!r.scored.empty()) return true;
  const auto rows = r.classified ? 1 : job.pooled_rows;
  const bool normalize = !r.classified && r.normalize.value_or(runner_.info().pooling.normalize);
  if (model::finish_embedding(job.pooled, rows, r.dimensions.value_or(0), normalize)) return true;
  job.failure = internal_error(
      "the model gave hidden states that are not numbers for this request (NaN or Inf); its "
      "weights or this prompt are at fault");
  return false;
}

void StepLoop::publish_answers(const JobPtr& job) {
  auto answers = job->beams->best(job->request.n);
  for (size_t i = 0; i < answers.size(); ++i) {
    Publication record{Publication::Kind::answer, answers[i].stopped, int32_t(i), FinishReason::length, job};
    record.answer = std::move(answers[i]);
    records_.push_back(std::move(record));
  }
}

void StepLoop::fail(Job& job, Status status) {
  if (job.ended || !job.failure.ok()) return;
  job.failure = std::move(status);
  (void)scheduler_->cancel(job.number);
}

void StepLoop::leave_queue(Job& job) {
  if (job.left_queue) return;
  job.left_queue = true;
  shared_.waiting.leave(job.request.tenant, int64_t(job.request.prompt.size()));
}

void StepLoop::start_stream(const JobPtr& job) {
  if (job->started) return;
  job->started = true;
  records_.push_back({Publication::Kind::started, false, 0, FinishReason::length, job});
}

JobPtr StepLoop::find(uint64_t number) const {
  auto it = jobs_.find(number);
  return it == jobs_.end() ? nullptr : it->second;
}

void StepLoop::flush_records(std::optional<StepSample> sample) {
  publisher_.post(std::move(records_), sample);
  records_.clear();
}

}  // namespace kvasir::engine
