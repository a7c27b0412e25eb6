#include "server/http/background.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/cat.h"
#include "server/http/streams_producer.h"

namespace kvasir::server::http {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kEnough = 64 << 10;    // is written to a follower before more events are copied
constexpr size_t kAskEvery = 16 << 10;  // bytes of events

}  // namespace

class BackgroundResponse::Follower final : public Producer {
 public:
  Follower(std::shared_ptr<BackgroundResponse> followed, size_t from,
           std::vector<std::pair<std::string, std::string>> headers, size_t without)
      : followed_(std::move(followed)), next_(from), without_(without) {
    head_.content_type = kEventStream;
    head_.headers = std::move(headers);
    head_.headers.emplace_back("Cache-Control", "no-cache");
    head_.headers.emplace_back("X-Accel-Buffering", "no");
  }
  ~Follower() override {
    std::lock_guard lock(followed_->mutex_);
    followed_->followers_.erase(this);
  }

  Progress poll() override {
    std::lock_guard lock(followed_->mutex_);
    const auto& events = followed_->events_;
    while (next_ < events.size() && out_.size() < kEnough) {
      const std::string& event = events[next_++];
      const size_t left_out = std::min(without_, event.size());
      out_.append(event, left_out);
      without_ -= left_out;
    }
    if (next_ >= events.size() && followed_->over_) return Progress::done;
    return out_.empty() ? Progress::waiting : Progress::writable;
  }
  const HttpResponse& head() const override { return head_; }
  bool streams() const override { return true; }
  std::string take() override { return std::exchange(out_, {}); }
  void on_ready(std::function<void()> callback) override {
    auto shared = std::make_shared<std::function<void()>>(std::move(callback));
    bool waits = false;
    {
      std::lock_guard lock(followed_->mutex_);
      waits = followed_->over_ || next_ < followed_->events_.size();
      followed_->followers_[this] = shared;
    }
    if (waits) (*shared)();
  }

 private:
  const std::shared_ptr<BackgroundResponse> followed_;
  size_t next_, without_;
  HttpResponse head_;
  std::string out_;
};

std::string BackgroundResponse::response() const {
  std::lock_guard lock(mutex_);
  return response_;
}

bool BackgroundResponse::over() const {
  std::lock_guard lock(mutex_);
  return over_;
}

size_t BackgroundResponse::bytes() const {
  std::lock_guard lock(mutex_);
  return response_.size() + event_bytes_;
}

void BackgroundResponse::tell() {
  std::vector<Callback> told;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [follower, callback] : followers_) told.push_back(callback);
  }
  for (const Callback& callback : told) (*callback)();
}

void BackgroundResponse::now(std::string response) {
  std::lock_guard lock(mutex_);
  if (!over_) response_ = std::move(response);
}

void BackgroundResponse::append(std::string_view events) {
  if (!has_events_ || events.empty()) return;
  {
    std::lock_guard lock(mutex_);
    if (over_) return;
    while (!events.empty()) {
      const size_t blank = events.find("\n\n");
      const size_t end = blank == std::string_view::npos ? events.size() : blank + 2;
      events_.emplace_back(events.substr(0, end));
      event_bytes_ += end + sizeof(std::string);
      events.remove_prefix(end);
    }
  }
  tell();
}

void BackgroundResponse::finish() {
  {
    std::lock_guard lock(mutex_);
    over_ = true;
  }
  tell();
}

void BackgroundResponse::cancel() {
  std::function<void()> cancelled;
  {
    std::lock_guard lock(mutex_);
    if (over_) return;
    over_ = true;
    cancelled = cancelled_;
    Json state = Json::parse(response_, nullptr, false);
    // Before its first event was made: who follows learns what there was.
    if (has_events_ && events_.empty() && state.is_object()) {
      const Json created = {{"type", "response.created"}, {"sequence_number", 0}, {"response", state}};
      events_.push_back(
          cat("event: response.created\ndata: ", created.dump(-1, ' ', false, Json::error_handler_t::replace), "\n\n"));
      event_bytes_ += events_.back().size() + sizeof(std::string);
    }
    if (state.is_object() && (state["status"] == "queued" || state["status"] == "in_progress")) {
      state["status"] = "cancelled";
      response_ = state.dump(-1, ' ', false, Json::error_handler_t::replace);
    }
  }
  if (cancelled) cancelled();
  tell();
}

void BackgroundResponse::on_cancel(std::function<void()> callback) {
  std::lock_guard lock(mutex_);
  cancelled_ = std::move(callback);
}

std::unique_ptr<Producer> BackgroundResponse::follow(size_t from,
                                                     std::vector<std::pair<std::string, std::string>> headers,
                                                     size_t without) {
  return std::make_unique<Follower>(shared_from_this(), from, std::move(headers), without);
}

BackgroundRuns::~BackgroundRuns() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  rung_.notify_one();
  if (thread_.joinable()) thread_.join();
  for (auto& [id, run] : runs_) run.response->on_cancel(nullptr);
}

void BackgroundRuns::start(std::shared_ptr<BackgroundResponse> response, std::unique_ptr<Producer> producer,
                           std::function<bool()> kept) {
  uint64_t id = 0;
  {
    std::lock_guard lock(mutex_);
    id = next_++;
  }
  response->on_cancel([this, id] { ring(id); });
  producer->on_ready([this, id] { ring(id); });  // perhaps at once, before there is anything to find
  {
    std::lock_guard lock(mutex_);
    runs_.emplace(id, Run{std::move(response), std::move(producer), std::move(kept)});
    if (!thread_.joinable()) thread_ = std::thread([this] { draw(); });
  }
  ring(id);
}

void BackgroundRuns::ring(uint64_t id) {
  {
    std::lock_guard lock(mutex_);
    ready_.insert(id);
  }
  rung_.notify_one();
}

void BackgroundRuns::draw() {
  std::unique_lock lock(mutex_);
  while (true) {
    rung_.wait(lock, [&] { return ending_ || !ready_.empty(); });
    if (ending_) return;
    const uint64_t id = *ready_.begin();
    ready_.erase(ready_.begin());
    auto node = runs_.extract(id);
    if (node.empty()) continue;
    lock.unlock();
    const bool more = advance(node.mapped());
    if (!more) {
      node.mapped().response->on_cancel(nullptr);
      node = {};  // the engine's work with it; what it rang for now finds nothing
    }
    lock.lock();
    if (more) runs_.insert(std::move(node));
  }
}

bool BackgroundRuns::advance(Run& run) {
  while (!run.response->over()) {
    const Producer::Progress progress = run.producer->poll();
    run.response->append(run.producer->take());
    const size_t bytes = run.response->bytes();
    if (bytes >= run.asked_at + kAskEvery) {
      run.asked_at = bytes;
      if (!run.kept()) run.response->cancel();
    }
    if (progress == Producer::Progress::waiting) return true;
    if (progress == Producer::Progress::done) run.response->finish();
  }
  return false;
}

}  // namespace kvasir::server::http
