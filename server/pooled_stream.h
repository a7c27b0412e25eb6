// Prompts asked for as wholes (embeddings, scores) as one stream, which ends with one Finished that holds the results
// in order. So many are in the engine at a time; each that is done makes room for the next. To who reads and counts it
// is a request like any other.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace kvasir::server {

class PooledStream final : public engine::Stream {
 public:
  // What asks for the i-th prompt, in order.
  using Ask = std::function<Result<std::unique_ptr<engine::Stream>>(size_t i)>;
  // The first is asked at once, so that what the engine refuses is known before there is a stream.
  static Result<std::unique_ptr<engine::Stream>> begin(Ask ask, size_t prompts, size_t window);

  const std::string& id() const override { return id_; }
  std::optional<engine::Event> poll() override;
  std::optional<engine::Event> next() override;
  void on_ready(std::function<void()> callback) override;
  void cancel() override;

 private:
  struct Open {
    size_t prompt;
    std::unique_ptr<engine::Stream> stream;
  };
  PooledStream(Ask ask, size_t prompts, size_t window) : ask_(std::move(ask)), window_(window), results_(prompts) {}
  Status ask_more();
  // An event that ends it all, if this does; `over`: prompt's stream has no more.
  std::optional<engine::Event> take(size_t prompt, engine::Event event, bool* over);
  std::optional<engine::Event> fail(Status why);
  std::optional<engine::Event> end_if_done();

  const Ask ask_;
  const size_t window_;
  std::string id_;
  size_t asked_ = 0, done_ = 0;
  std::vector<size_t> again_;  // refused for want of room
  bool full_ = false;          // until one of these is done
  std::vector<std::vector<float>> results_;
  std::deque<Open> open_;
  engine::Usage usage_;
  std::mutex mutex_;  // poll, on_ready and cancel may come at once: a reader is woken while it still asks to be
  std::function<void()> callback_;
  bool over_ = false;
};

}  // namespace kvasir::server
