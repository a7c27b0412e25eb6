// Responses, and streams of chats, that are made without their client: one thread draws them from the engine, and
// whoever asks sees how far each is, follows its events from any number on, or ends it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "server/http/http.h"

namespace kvasir::server::http {

// One of them, shared by the thread that draws it, the store that keeps it and those who follow it.
class BackgroundResponse : public std::enable_shared_from_this<BackgroundResponse> {
 public:
  // `events`: they are kept, and can be followed.
  explicit BackgroundResponse(bool events) : has_events_(events) {}

  const bool has_events_;
  std::string response() const;  // OpenAI's object, as it is now
  bool over() const;
  size_t bytes() const;

  // Its newest state, and its events: any number of "event: ...\ndata: ...\n\n". Nothing once it is over.
  void now(std::string response);
  void append(std::string_view events);
  void finish();  // over, with what it is
  void cancel();  // over, and cancelled unless it has its end
  // Called when it is cancelled, from any thread; must only signal.
  void on_cancel(std::function<void()> callback);

  // Its events from that number on, as they come, without so many of their bytes.
  std::unique_ptr<Producer> follow(size_t from, std::vector<std::pair<std::string, std::string>> headers,
                                   size_t without = 0);

 private:
  class Follower;
  using Callback = std::shared_ptr<std::function<void()>>;
  void tell();

  mutable std::mutex mutex_;
  std::string response_;
  std::vector<std::string> events_;
  size_t event_bytes_ = 0;
  bool over_ = false;
  std::function<void()> cancelled_;
  std::map<const Follower*, Callback> followers_;
};

class BackgroundRuns {
 public:
  ~BackgroundRuns();  // gives up what still runs
  // Draws `producer` into `response` until it is over. `kept` is asked now and then whether anyone could still ask for
  // it; else it is cancelled.
  void start(std::shared_ptr<BackgroundResponse> response, std::unique_ptr<Producer> producer,
             std::function<bool()> kept);

 private:
  struct Run {
    std::shared_ptr<BackgroundResponse> response;
    std::unique_ptr<Producer> producer;
    std::function<bool()> kept;
    size_t asked_at = 0;  // bytes, when `kept` was asked last
  };
  void ring(uint64_t id);
  void draw();
  static bool advance(Run& run);  // false: over

  std::mutex mutex_;
  std::condition_variable rung_;
  std::map<uint64_t, Run> runs_;
  std::set<uint64_t> ready_;
  uint64_t next_ = 0;
  bool ending_ = false;
  std::thread thread_;  // from the first run on
};

}  // namespace kvasir::server::http
