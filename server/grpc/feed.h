// The events of one or many engine streams as one sequence, for calls that carry many requests. The cost
// of an event does not grow with the number of streams: only those that said they are ready are asked.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

#include "engine/request.h"

namespace kvasir::server::rpc {

class Feed {
 public:
  // Streams may be added before and after start(), by one thread at a time. The number of each: the least that is free,
  // so that a call that goes on for days needs no more of them than it has open at once.
  size_t add(std::unique_ptr<engine::Stream> stream) {
    size_t i;
    {
      std::lock_guard lock(mutex_);
      if (free_.empty()) {
        i = streams_.size();
        streams_.push_back(std::move(stream));
      } else {
        i = free_.top();
        free_.pop();
        streams_[i] = std::move(stream);
      }
      if (!wake_) return i;
    }
    listen(i);
    return i;
  }
  // `wake` must only signal, and may be called at once.
  void start(std::function<void()> wake) {
    size_t n;
    {
      std::lock_guard lock(mutex_);
      wake_ = std::move(wake);
      n = streams_.size();
    }
    for (size_t i = 0; i < n; ++i) listen(i);
  }
  // One reader at a time.
  std::optional<std::pair<size_t, engine::Event>> poll() {
    while (true) {
      size_t i;
      engine::Stream* stream;
      {
        std::lock_guard lock(mutex_);
        if (ready_.empty()) return std::nullopt;
        i = ready_.front();
        stream = streams_[i].get();
      }
      if (stream)
        if (auto event = stream->poll()) return std::pair(i, std::move(*event));
      std::lock_guard lock(mutex_);
      ready_.pop_front();
    }
  }
  // The reader is done with stream i. What was said of it may still be in ready_: whoever has its number next is asked
  // once more than needed.
  void drop(size_t i) {
    std::unique_ptr<engine::Stream> gone;  // destroyed last: its destructor waits for a callback that may want the lock
    std::lock_guard lock(mutex_);
    gone.swap(streams_[i]);
    free_.push(i);
  }
  // By the reader, or when no reader is left.
  void cancel() {
    size_t n;
    {
      std::lock_guard lock(mutex_);
      n = streams_.size();
    }
    for (size_t i = 0; i < n; ++i)
      if (engine::Stream* s = at(i)) s->cancel();  // may call on_ready: no lock is held
  }

 private:
  engine::Stream* at(size_t i) {
    std::lock_guard lock(mutex_);
    return streams_[i].get();
  }
  void listen(size_t i) {
    at(i)->on_ready([this, i] {
      {
        std::lock_guard lock(mutex_);
        ready_.push_back(i);
      }
      wake_();
    });
  }

  std::mutex mutex_;
  std::deque<size_t> ready_;
  std::function<void()> wake_;
  std::deque<std::unique_ptr<engine::Stream>> streams_;
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> free_;
};

}  // namespace kvasir::server::rpc
