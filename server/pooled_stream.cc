#include "server/pooled_stream.h"

namespace kvasir::server {

Result<std::unique_ptr<engine::Stream>> PooledStream::begin(Ask ask, size_t prompts, size_t window) {
  std::unique_ptr<PooledStream> stream(new PooledStream(std::move(ask), prompts, window));
  KVASIR_TRY(stream->ask_more());
  stream->id_ = stream->open_.front().stream->id();
  return std::unique_ptr<engine::Stream>(std::move(stream));
}

// A full queue is no failure while one of these prompts is on its way: more are asked when that is done.
Status PooledStream::ask_more() {
  while (!full_ && open_.size() < window_ && (!again_.empty() || asked_ < results_.size())) {
    const size_t prompt = again_.empty() ? asked_ : again_.back();
    auto stream = ask_(prompt);
    if (!stream.ok()) {
      full_ = stream.status().code() == Code::resource_exhausted && !open_.empty();
      return full_ ? Status() : stream.status();
    }
    if (again_.empty())
      ++asked_;
    else
      again_.pop_back();
    open_.push_back({prompt, std::move(*stream)});
    if (callback_) open_.back().stream->on_ready(callback_);
  }
  return {};
}

std::optional<engine::Event> PooledStream::fail(Status why) {
  over_ = true;
  open_.clear();  // the others are cancelled
  return engine::Failed{std::move(why)};
}

std::optional<engine::Event> PooledStream::take(size_t prompt, engine::Event event, bool* over) {
  if (auto* failed = std::get_if<engine::Failed>(&event)) {
    if (failed->status.code() != Code::resource_exhausted || open_.size() == 1) return fail(failed->status);
    again_.push_back(prompt);
    full_ = *over = true;
    return std::nullopt;
  }
  auto* finished = std::get_if<engine::Finished>(&event);
  if (!finished) return std::nullopt;
  if (finished->reason == engine::FinishReason::cancelled)
    return fail(Status(Code::cancelled, "the request was cancelled"));
  usage_.prompt_tokens += finished->usage.prompt_tokens;
  usage_.cached_tokens += finished->usage.cached_tokens;
  if (!finished->pooled.empty()) results_[prompt] = std::move(finished->pooled[0]);
  ++done_;
  *over = true;
  full_ = false;
  return std::nullopt;
}

std::optional<engine::Event> PooledStream::end_if_done() {
  if (done_ < results_.size()) return std::nullopt;
  over_ = true;
  engine::Finished all{0, engine::FinishReason::stop_token};
  all.last = true;
  all.usage = usage_;
  all.pooled = std::move(results_);
  return all;
}

std::optional<engine::Event> PooledStream::poll() {
  std::lock_guard lock(mutex_);
  if (over_) return std::nullopt;
  for (size_t i = 0; i < open_.size();) {
    bool over = false;
    while (!over) {
      auto event = open_[i].stream->poll();
      if (!event) break;
      if (auto end = take(open_[i].prompt, std::move(*event), &over)) return end;
    }
    if (over)
      open_.erase(open_.begin() + ptrdiff_t(i));
    else
      ++i;
  }
  if (Status s = ask_more(); !s.ok()) return fail(s);
  return end_if_done();
}

std::optional<engine::Event> PooledStream::next() {
  while (!over_) {
    if (auto event = poll()) return event;
    bool over = false;
    auto event = open_.front().stream->next();
    if (!event) return fail(internal_error("a prompt's stream ended without a result"));
    if (auto end = take(open_.front().prompt, std::move(*event), &over)) return end;
    if (over) open_.pop_front();
  }
  return std::nullopt;
}

void PooledStream::on_ready(std::function<void()> callback) {
  std::lock_guard lock(mutex_);
  callback_ = std::move(callback);
  for (Open& o : open_) o.stream->on_ready(callback_);
}

void PooledStream::cancel() {
  std::lock_guard lock(mutex_);
  for (Open& o : open_) o.stream->cancel();
}

}  // namespace kvasir::server
