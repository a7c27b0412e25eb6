// Cache events as vLLM publishes them, for routers that read these: frames of topic, number and msgpack from a PUB
// socket, and what somebody missed from a ROUTER socket. Two threads of its own, which the engine never waits for: a
// subscriber that reads nothing loses messages, and asks for them again.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "core/config.h"
#include "engine/engine.h"
#include "server/kv_zmq/zmq.h"

namespace kvasir::server {

struct KvPublisherOptions {
  std::string address, replay, topic, tenant;

  void define(Options& options);
};

// One event: an array of a time, a list of the one event, and the rank.
std::string kv_event_batch(const engine::CacheEvent& event, int page_size, double now);

class KvPublisher {
 public:
  static constexpr int kWaitingMessages = 10000;  // some 2 MB for a subscriber that reads nothing

  static Result<std::unique_ptr<KvPublisher>> start(const KvPublisherOptions& options, const engine::Engine& engine,
                                                    int page_size);
  ~KvPublisher();

 private:
  KvPublisher(const KvPublisherOptions& options, std::shared_ptr<const engine::CacheEvents> events, int page_size)
      : options_(options), events_(std::move(events)), page_size_(page_size) {}
  void publish();
  void replay();

  const KvPublisherOptions options_;
  const std::shared_ptr<const engine::CacheEvents> events_;
  const int page_size_;
  std::unique_ptr<Zmq> zmq_;
  std::unique_ptr<Zmq::Socket> pub_, router_;  // after zmq_: they go first
  std::atomic<bool> stopped_{false};
  std::thread publishing_, replaying_;
};

}  // namespace kvasir::server
