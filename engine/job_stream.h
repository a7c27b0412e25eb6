// What a client holds of its request: it reads the job's channel, tells the step thread when there is room again, and
// cancels what nobody reads any more.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "engine/job.h"

namespace kvasir::engine {

class JobStream final : public Stream {
 public:
  explicit JobStream(JobPtr job) : job_(std::move(job)) {}
  ~JobStream() override {
    job_->channel.detach();
    if (!over_) cancel();
  }
  const std::string& id() const override { return job_->request.id; }
  std::optional<Event> poll() override {
    bool drained;
    auto event = job_->channel.poll(&drained);
    return read(std::move(event), drained);
  }
  std::optional<Event> next() override {
    bool drained;
    auto event = job_->channel.wait(&drained);
    return read(std::move(event), drained);
  }
  void on_ready(std::function<void()> callback) override { job_->channel.on_ready(std::move(callback)); }
  void cancel() override {
    if (!job_->cancel_requested.exchange(true)) job_->touch();
  }

 private:
  std::optional<Event> read(std::optional<Event> event, bool drained) {
    if (!event) return event;
    const auto* finished = std::get_if<Finished>(&*event);
    if (std::holds_alternative<Failed>(*event) || (finished && finished->last)) over_ = true;
    if (drained && !over_) job_->touch();  // the step thread takes it back into the batch
    return event;
  }

  const JobPtr job_;
  bool over_ = false;
};

}  // namespace kvasir::engine
