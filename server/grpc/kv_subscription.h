// One subscriber to cache events: a snapshot where its cursor asks for one, then events as they come, and between
// them records of the load alone.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>

#include "server/grpc/kv_events.h"

namespace kvasir::server::rpc {

class KvSubscription final : public grpc::ServerWriteReactor<smg::grpc::common::KvEventBatch>,
                             public std::enable_shared_from_this<KvSubscription> {
 public:
  using Batch = smg::grpc::common::KvEventBatch;
  using Load = smg::grpc::common::EngineLoad;

  KvSubscription(KvEvents& owner, grpc::CallbackServerContext* call,
                 const smg::grpc::common::SubscribeKvEventsRequest& request)
      : owner_(owner),
        call_(call),
        start_(request.start_sequence_number()),
        load_before_first_(request.load_records_before_first_batch()) {}

  void begin();                                // on a worker: who may, and from where
  void hold() { self_ = shared_from_this(); }  // owns itself until gRPC is done with it
  void news(const Load& load, uint64_t load_version);
  void end(const grpc::Status& status);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  bool done = false;  // under the owner's lock

 private:
  using Clock = std::chrono::steady_clock;

  Status check();
  void take_snapshot();
  void write();
  bool next_batch();
  bool next_load();
  void fill(const engine::CacheEvent& event);

  KvEvents& owner_;
  grpc::CallbackServerContext* const call_;
  const uint64_t start_;
  const bool load_before_first_;
  std::shared_ptr<const engine::CacheEvents> events_;
  std::string tenant_;
  int32_t page_size_ = 16;

  std::mutex mutex_;
  std::deque<Batch> snapshot_;  // what of it is still to be sent
  std::deque<engine::CacheEvent> pending_;
  Batch batch_;
  uint64_t sent_ = 0;         // the cursor: the last number taken from the ring or the snapshot
  uint64_t last_number_ = 0;  // on this stream
  Load load_;
  uint64_t load_version_ = 0, load_sent_ = 0, sample_ = 0;
  Clock::time_point wrote_{};
  bool ready_ = false, writing_ = false, finished_ = false;
  std::shared_ptr<KvSubscription> self_;
};

}  // namespace kvasir::server::rpc
