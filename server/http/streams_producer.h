// Engine streams as one answer, streamed or whole: polling, back pressure, what failed before and after the first byte.
// A protocol says how each event is written.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "server/http/http.h"

namespace kvasir::server::http {

inline constexpr const char* kEventStream = "text/event-stream; charset=utf-8";
inline constexpr const char* kJsonLines = "application/x-ndjson";

class StreamsProducer : public Producer {
 public:
  StreamsProducer(bool stream, std::vector<std::unique_ptr<engine::Stream>> streams,
                  std::vector<std::pair<std::string, std::string>> headers, const char* streamed_as = kEventStream);

  Progress poll() final;
  const HttpResponse& head() const final { return head_; }
  bool streams() const final { return streaming_; }
  std::string take() final { return std::exchange(out_, {}); }
  void on_ready(std::function<void()> callback) final;

 protected:
  // Of the stream with that number. Streamed or not, they append to out_ what is to be sent; of a whole answer that is
  // its body, at the end.
  virtual void on(size_t s, engine::Started& e) = 0;
  virtual void on(size_t s, engine::Tokens& e) = 0;
  virtual void on(size_t s, engine::Finished& e) = 0;  // of a choice that nobody cancelled
  // Whether an answer that was cancelled, by its id and from elsewhere, is told as far as it came; else it fails.
  virtual bool tells_cancelled() const { return false; }
  virtual void close() {}                                       // all have ended well
  virtual void fail(const Status& status) = 0;                  // a stream's last event
  virtual HttpResponse refuse(const Status& status) const = 0;  // nothing is out yet

  // What is in out_ before any event may be sent; what fails then fails in the stream.
  void begin_at_once() { streaming_ = stream_; }

  const bool stream_;
  std::string out_;

 private:
  void take_event(size_t s, engine::Event& event);
  void failed(const Status& status);

  std::vector<std::unique_ptr<engine::Stream>> engines_;
  std::vector<bool> open_;
  HttpResponse head_;
  bool streaming_ = false, finished_ = false;
};

}  // namespace kvasir::server::http
