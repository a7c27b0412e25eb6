// One subscriber to cache events: a snapshot where its cursor asks for one, then events as they come, and between
// them records of the load alone.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>

#include "server/grpc/kv_events.h"
#include "server/grpc/one_message.h"
#include "vllm_engine.pb.h"

namespace kvasir::server::rpc {

class KvSubscription final : public OneMessage<smg::grpc::common::SubscribeKvEventsRequest> {
 public:
  using Batch = smg::grpc::common::KvEventBatch;
  using Load = smg::grpc::common::EngineLoad;

  KvSubscription(KvEvents& owner, Opening opening) : OneMessage(std::move(opening)), owner_(owner) {}
  ~KvSubscription() override { owner_.remove(this); }

  void news(const Load& load, uint64_t load_version);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;

 private:
  using Clock = std::chrono::steady_clock;

  void look() override;  // from where
  Status check();
  void take_snapshot();
  void write();
  bool next_batch();
  bool next_load();
  void fill(const engine::CacheEvent& event);

  KvEvents& owner_;
  uint64_t start_ = 0;
  bool load_before_first_ = false;
  std::shared_ptr<const engine::CacheEvents> events_;
  int32_t page_size_ = 16;

  std::deque<Batch> snapshot_;  // what of it is still to be sent
  std::deque<engine::CacheEvent> pending_;
  Batch batch_;
  uint64_t sent_ = 0;         // the cursor: the last number taken from the ring or the snapshot
  uint64_t last_number_ = 0;  // on this stream
  Load load_;
  uint64_t load_version_ = 0, load_sent_ = 0, sample_ = 0;
  Clock::time_point wrote_{};
  bool ready_ = false, writing_ = false;
  grpc::ByteBuffer bytes_;
};

}  // namespace kvasir::server::rpc
