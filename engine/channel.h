// A request's event queue: the publisher at one end, the reader at the other. Bounded by tokens:
// over the bound the request is paused out of the batch, never the publisher.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/request.h"

namespace kvasir::engine {

class Channel {
 public:
  explicit Channel(int64_t token_limit) : limit_(token_limit) {}

  // Publisher's end. True when this push made the channel full: the request is to be paused.
  bool push(Event event);
  // Tells the reader, if it had nothing before the pushes since the last call.
  void announce();

  // Reader's end. `drained` is set when a full channel has room again.
  std::optional<Event> poll(bool* drained);
  std::optional<Event> wait(bool* drained);
  void on_ready(std::function<void()> callback);
  void detach();  // no callback runs after this returns (unless it is the caller itself)

  bool full() const;

 private:
  std::optional<Event> take(bool* drained);
  void call();

  const int64_t limit_;
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Event> events_;  // few: adjacent Tokens of a choice are merged
  int64_t unread_tokens_ = 0;
  bool full_ = false, over_ = false, announced_ = false, waiting_ = false;

  // Apart from mutex_, so that a callback may poll, and recursive, so that it may even let go of its stream.
  std::recursive_mutex callback_mutex_;
  std::shared_ptr<const std::function<void()>> callback_;
};

}  // namespace kvasir::engine
