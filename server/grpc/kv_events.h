// VllmEngine's SubscribeKvEvents: which prefixes are cached here, and how busy this engine is, told to routers as it
// happens. A thread of its own waits for news while somebody subscribes, and sleeps for good otherwise.
//
// A subscriber with a cursor the ring still reaches gets what came after it. Any other (0: "from the current state")
// gets a snapshot first: what is cached, in chunks whose numbers end where the events go on.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "server/grpc/incoming.h"
#include "vllm_engine.pb.h"

namespace kvasir::server::rpc {

class KvSubscription;

class KvEvents {
 public:
  explicit KvEvents(const Context& context);
  ~KvEvents();

  std::shared_ptr<Incoming> subscribe(Opening opening);

 private:
  friend class KvSubscription;
  void add(KvSubscription* s);
  void remove(KvSubscription* s);
  void look();
  void measure();  // load_

  const Context c_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<KvSubscription*> subscriptions_;
  smg::grpc::common::EngineLoad load_;  // as it was at the last look
  uint64_t load_version_ = 0;           // grows when it changes
  std::chrono::steady_clock::time_point measured_{};
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace kvasir::server::rpc
