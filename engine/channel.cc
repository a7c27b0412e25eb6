#include "engine/channel.h"

#include <iterator>

namespace kvasir::engine {
namespace {

bool ends_stream(const Event& e) {
  if (std::holds_alternative<Failed>(e)) return true;
  const auto* finished = std::get_if<Finished>(&e);
  return finished && finished->last;
}

}  // namespace

bool Channel::push(Event event) {
  std::lock_guard lock(mutex_);
  if (auto* tokens = std::get_if<Tokens>(&event)) {
    unread_tokens_ += int64_t(tokens->tokens.size());
    auto* last = events_.empty() ? nullptr : std::get_if<Tokens>(&events_.back());
    if (last && last->choice == tokens->choice) {
      std::move(tokens->tokens.begin(), tokens->tokens.end(), std::back_inserter(last->tokens));
      last->text += tokens->text;
      last->last = tokens->last;
    } else {
      events_.push_back(std::move(event));
    }
  } else {
    events_.push_back(std::move(event));
  }
  if (full_ || unread_tokens_ < limit_) return false;
  return full_ = true;
}

void Channel::announce() {
  {
    std::lock_guard lock(mutex_);
    if (announced_ || events_.empty()) return;
    announced_ = true;
    if (waiting_) ready_.notify_all();
  }
  call();
}

void Channel::call() {
  std::lock_guard lock(callback_mutex_);
  if (auto callback = callback_) (*callback)();
}

std::optional<Event> Channel::take(bool* drained) {
  *drained = false;
  if (events_.empty()) return std::nullopt;
  Event event = std::move(events_.front());
  events_.erase(events_.begin());
  if (events_.empty()) announced_ = false;
  if (const auto* tokens = std::get_if<Tokens>(&event)) unread_tokens_ -= int64_t(tokens->tokens.size());
  if (full_ && unread_tokens_ <= limit_ / 2) {
    full_ = false;
    *drained = true;
  }
  if (ends_stream(event)) over_ = true;
  return event;
}

std::optional<Event> Channel::poll(bool* drained) {
  std::lock_guard lock(mutex_);
  return take(drained);
}

std::optional<Event> Channel::wait(bool* drained) {
  std::unique_lock lock(mutex_);
  waiting_ = true;
  ready_.wait(lock, [&] { return over_ || !events_.empty(); });
  waiting_ = false;
  return take(drained);
}

void Channel::on_ready(std::function<void()> callback) {
  {
    std::lock_guard lock(callback_mutex_);
    callback_ = callback ? std::make_shared<const std::function<void()>>(std::move(callback)) : nullptr;
  }
  bool something;
  {
    std::lock_guard lock(mutex_);
    something = !events_.empty();
  }
  if (something) call();
}

void Channel::detach() {
  std::lock_guard lock(callback_mutex_);
  callback_ = nullptr;
}

bool Channel::full() const {
  std::lock_guard lock(mutex_);
  return full_;
}

}  // namespace kvasir::engine
