#include "engine/publisher.h"

#include <algorithm>

#include "engine/mailbox.h"

namespace kvasir::engine {
namespace {

constexpr size_t kMostBatches = 8;

double seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

Usage usage_of(const Job& job) {
  return {int64_t(job.request.prompt.size()), job.completion_tokens, job.cached_tokens, job.drafted.load(),
          job.accepted.load()};
}

}  // namespace

Publisher::Publisher(std::string trace_file, Closed closed)
    : closed_(std::move(closed)), trace_(std::move(trace_file)), thread_([this] { run(); }) {}

Publisher::~Publisher() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    more_.notify_one();
  }
  thread_.join();
}

void Publisher::post(std::vector<Publication>&& records, std::optional<StepSample> step) {
  if (records.empty() && !(step && trace_.on())) return;
  {
    std::unique_lock lock(mutex_);
    less_.wait(lock, [&] { return queue_.size() < kMostBatches; });
    queue_.push_back({std::move(records), step});
  }
  more_.notify_one();  // with the lock let go: woken on this very processor, it would only find it taken
}

Published Publisher::counts() const {
  std::lock_guard lock(counts_mutex_);
  return counts_;
}

void Publisher::wait_empty() {
  std::unique_lock lock(mutex_);
  less_.wait(lock, [&] { return queue_.empty() && !busy_; });
}

void Publisher::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    more_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Batch batch = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    {
      std::lock_guard counting(counts_mutex_);
      Time now = std::chrono::steady_clock::now();
      for (Publication& record : batch.records) publish(record, now);
    }
    for (const JobPtr& job : touched_) job->channel.announce();
    touched_.clear();
    if (batch.step) trace_.write(*batch.step);
    batch.records.clear();
    lock.lock();
    busy_ = false;
    less_.notify_all();
  }
}

void Publisher::push(Job& job, Event event) {
  if (touched_.empty() || touched_.back().get() != &job) touched_.push_back(job.shared_from_this());
  if (job.channel.push(std::move(event))) job.touch();  // full: the step thread pauses it
}

void Publisher::publish(Publication& record, Time now) {
  Job& job = *record.job;
  if (job.closed) return;
  switch (record.kind) {
    case Publication::Kind::started: return start(job);
    case Publication::Kind::token: return token(job, record, now);
    case Publication::Kind::answer: return answer(job, record, now);
    case Publication::Kind::finished: {
      Finished event{record.choice, record.reason};
      if (record.reason == FinishReason::stop_token) event.stop_token = record.token.id;
      if (job.request.pooled) event.pooled.push_back(std::move(job.pooled));
      return finish(job, record.choice, std::move(event), now);
    }
    case Publication::Kind::cancelled:
      ++counts_.cancelled;
      if (job.open_choices == 0) job.open_choices = job.request.n;  // it had not started
      for (int32_t c = 0; c < job.request.n; ++c) finish(job, c, Finished{c, FinishReason::cancelled}, now);
      return;
    case Publication::Kind::failed:
      ++counts_.failed;
      ++counts_.errors[code_name(job.failure.code())];
      close(job, now);
      return push(job, Failed{job.failure});
  }
}

void Publisher::start(Job& job) {
  job.open_choices = job.request.n;
  job.started_at = std::chrono::steady_clock::now();
  if (job.request.detokenize)
    for (ChoiceText& text : job.texts)
      text.detokenizer.emplace(tokenizer_, job.request.skip_special, job.request.stop_strings, job.request.include_stop,
                               own_texts_, job.request.stop_expressions);
  counts_.prompt_tokens.add(double(job.request.prompt.size()));
  push(job, Started{job.request.sampling.seed, job.cached_tokens, std::move(job.prompt_logprobs)});
}

void Publisher::token(Job& job, Publication& record, Time now) {
  ChoiceText& text = job.texts[record.choice];
  if (text.finished) return;  // drawn before the step thread heard of the stop string
  if (text.tokens++ == 0) {
    counts_.first_token.add(seconds(now - job.arrived));
  } else {
    counts_.between_tokens.add(seconds(now - text.last_token));
  }
  text.last_token = now;
  if (job.first_at == Time{}) {
    job.first_at = now;
    counts_.prefill.add(seconds(now - std::min(now, job.started_at)));
  }
  ++job.completion_tokens;
  ++counts_.output_tokens;
  const bool shown = !record.stop_token || job.request.include_stop;
  if (!shown && !job.request.every_token) return;  // the finish follows, and names it

  Tokens event{record.choice};
  text::Detokenizer::Piece piece;
  if (text.detokenizer && shown) {
    piece = text.detokenizer->push(record.token.id);
    event.text = std::move(piece.text);
  }
  event.tokens.push_back(std::move(record.token));
  event.last = record.last || piece.stopped;
  push(job, std::move(event));
  if (piece.stopped) {
    job.choices[record.choice].stop_at.store(text.tokens, std::memory_order_release);
    job.touch();
    finish(job, record.choice, Finished{record.choice, FinishReason::stop_string, std::move(piece.stop)}, now);
  }
}

void Publisher::answer(Job& job, Publication& record, Time now) {
  ChoiceText& text = job.texts[size_t(record.choice)];
  std::vector<TokenOut>& tokens = record.answer.tokens;
  if (job.first_at == Time{}) {
    job.first_at = now;
    counts_.first_token.add(seconds(now - job.arrived));
    counts_.prefill.add(seconds(now - std::min(now, job.started_at)));
  }
  text.tokens = std::ssize(tokens);
  job.completion_tokens += text.tokens;
  counts_.output_tokens += text.tokens;
  Finished end{record.choice, record.answer.stopped ? FinishReason::stop_token : FinishReason::length};
  end.score = record.answer.score;
  const bool hidden = record.answer.stopped && !job.request.include_stop;
  if (record.answer.stopped) end.stop_token = tokens.back().id;
  Tokens event{record.choice};
  event.last = true;
  if (text.detokenizer)
    for (size_t i = 0; i + hidden < tokens.size(); ++i) event.text += text.detokenizer->push(tokens[i].id).text;
  if (hidden && !job.request.every_token) tokens.pop_back();
  event.tokens = std::move(tokens);
  push(job, std::move(event));
  finish(job, record.choice, std::move(end), now);
}

void Publisher::finish(Job& job, int32_t choice, Finished event, Time now) {
  ChoiceText& text = job.texts[choice];
  if (text.finished) return;
  text.finished = true;
  if (text.detokenizer && event.reason != FinishReason::stop_string) {
    auto rest = text.detokenizer->finish();
    if (!rest.text.empty()) push(job, Tokens{choice, {}, std::move(rest.text), true});
  }
  if (!job.request.pooled) counts_.output_length.add(double(text.tokens));
  counts_.longest = std::max(counts_.longest, int64_t(job.request.prompt.size()) + text.tokens);
  event.last = --job.open_choices == 0;
  event.usage = usage_of(job);
  bool last = event.last, cancelled = event.reason == FinishReason::cancelled;
  if (last) {
    if (!cancelled) ++counts_.finished;
    close(job, now);
  }
  push(job, std::move(event));
}

// Before the last event can be read: with it in hand a client may ask again under the same id.
void Publisher::close(Job& job, Time now) {
  job.closed = true;
  counts_.whole.add(seconds(now - job.arrived));
  counts_.preempted.add(double(job.preempted.load(std::memory_order_relaxed)));
  if (job.first_at != Time{}) counts_.decode.add(seconds(now - job.first_at));
  for (ChoiceText& text : job.texts) text.detokenizer.reset();
  closed_(job);
}

}  // namespace kvasir::engine
