// VllmEngine's SubscribeKvEvents: which prefixes are cached here, told to routers as it happens. A thread
// of its own waits for news while somebody subscribes, and sleeps for good otherwise.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>

#include "server/grpc/call.h"
#include "vllm_engine.pb.h"

namespace kvasir::server::rpc {

class KvSubscription;

class KvEvents {
 public:
  explicit KvEvents(const Context& context);
  ~KvEvents();

  grpc::ServerWriteReactor<smg::grpc::common::KvEventBatch>* subscribe(
      grpc::CallbackServerContext* call, const smg::grpc::common::SubscribeKvEventsRequest* request);

 private:
  friend class KvSubscription;
  void add(KvSubscription* s);
  void remove(KvSubscription* s);
  void look();

  const Context c_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<KvSubscription*> subscriptions_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace kvasir::server::rpc
